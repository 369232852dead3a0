"""Evaluates models that are to be compared, each in a process of its own."""

from __future__ import annotations

import hashlib
import inspect
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from pydoc import ErrorDuringImport, locate
from typing import Any

import yaml

from lrlhf.cli.config_files import (
    config_arguments,
    folders_of_own_code,
    is_inline,
    read_config_files,
)
from lrlhf.foreign_files import read_yaml
from lrlhf.options.errors import ConfigError
from lrlhf.secrets import safe

CHECKPOINT = ".ckpt"
MODEL_OPTIONS = ("policy", "model")
"""Of the modules, for what they train."""
_OF_RUN = ("checkpoints/last.ckpt", "export/final")
"""What stands for a run."""


def evaluate_models(
    sides: Mapping[str, Sequence[str]], configs: Sequence[str], output: Path
) -> dict[str, list[Path]]:
    """Evaluate models on the validation set of a config.

    All of them get the same prompts, and, where responses are sampled, the same seeds.

    Args:
        sides: Models of each side: runs (their last checkpoint, else their export), checkpoints,
            exported folders, hub ids.
        configs: Config files, later ones override earlier ones.
        output: Where the evaluations go, a folder for each model.

    Returns:
        The folders, as `compare_runs` takes them.

    Raises:
        ConfigError: A config cannot be used, there is no such model, or an evaluation has failed.
    """
    flags = [flag for config in configs for flag in ("--config", config)]
    files = read_config_files(flags)
    folders_of_code = folders_of_own_code(files)
    # all of them before the first evaluation, which takes the place of an earlier one
    sources = {model: _source(model) for models in sides.values() for model in models}
    option = ""
    if not all(map(_has_path, sources.values())):
        option = _model_option(config_arguments(flags), folders_of_code)
    return {
        name: [_evaluate(model, sources[model], flags, option, output) for model in models]
        for name, models in sides.items()
    }


def is_export(path: str | Path) -> bool:
    """Whether it is a folder that ``transformers`` loads."""
    return (Path(path) / "config.json").is_file()


def export_folder(root: str | Path, export: str | Path) -> Path:
    """Return where the evaluation of an exported model goes, below the run folder."""
    return Path(root) / "validate" / Path(export).resolve().name


def _source(model: str) -> str:
    """Return the checkpoint, the exported folder, or the source elsewhere that a model stands for.

    Raises:
        ConfigError: There is none.
    """
    path = Path(model)
    if path.suffix != CHECKPOINT and path.is_dir() and not is_export(path):
        source = next((path / name for name in _OF_RUN if (path / name).exists()), None)
        if source is None and not any(path.glob("*.gguf")):
            raise ConfigError(
                f"{model} is no model: it has neither config.json nor {' nor '.join(_OF_RUN)}"
            )
        return str(source or path)
    if (path.suffix == CHECKPOINT or model.startswith((".", "/"))) and not path.exists():
        raise ConfigError(f"no model {model}")
    return model


def _has_path(source: str) -> bool:
    """Whether ``--ckpt_path`` takes it."""
    return Path(source).suffix == CHECKPOINT or is_export(source)


def _evaluate(model: str, source: str, flags: Sequence[str], option: str, output: Path) -> Path:
    root = output / _folder_name(model)
    folder = export_folder(root, source) if is_export(source) else root
    for old in folder.glob("eval_scores_*.jsonl"):
        old.unlink()
    chosen = "--ckpt_path" if _has_path(source) else f"--model.{option}"
    command = [sys.executable, "-m", "lrlhf", "validate", *flags, chosen, source]
    command += ["--trainer.default_root_dir", str(root)]
    sys.stderr.write(safe(f"evaluating {model}\n"))
    sys.stderr.flush()
    # its table and its progress are not the comparison
    ended = subprocess.run(command, stdout=sys.stderr, check=False)
    if ended.returncode:
        raise ConfigError(f"the evaluation of {model} has failed, see above")
    if not list(folder.glob("eval_scores_*.jsonl")):
        raise ConfigError(
            f"the evaluation of {model} has written no eval_scores_<step>.jsonl: does the config "
            "have validation data (data.val or val_size) and the callback EvalJSONL?"
        )
    return folder


def _folder_name(model: str) -> str:
    """Name a folder so that ``a/final`` and ``b/final`` have different ones, which tell them."""
    digest = hashlib.sha256(str(model).encode()).hexdigest()[:8]
    return "-".join([*(part for part in Path(model).parts[-4:] if part.strip("./")), digest])


def _model_option(configs: Sequence[str], folders_of_code: Sequence[str]) -> str:
    """Return which option of the config's module names the model.

    Raises:
        ConfigError: There is no module, or it has no such option.
    """
    class_path = ""
    for config in configs:
        content: Any = yaml.safe_load(config) if is_inline(config) else read_yaml(Path(config))
        model = content.get("model") if isinstance(content, Mapping) else None
        if isinstance(model, Mapping):
            model = model.get("class_path")
        class_path = str(model or class_path)
    if not class_path:
        raise ConfigError(f"{', '.join(configs)}: no model.class_path to evaluate models with")
    known = _parameters(class_path, folders_of_code)
    option = next((name for name in MODEL_OPTIONS if name in known), None)
    if option is None:
        raise ConfigError(
            f"{class_path} has none of the options {' and '.join(MODEL_OPTIONS)} to load a model "
            "with; give checkpoints"
        )
    return option


def _parameters(class_path: str, folders_of_code: Sequence[str]) -> Collection[str]:
    """Return the parameters of a module of lrlhf's or of the user's."""
    # not at the top: it brings torch, which evaluations that need no option do without
    from lrlhf import modules  # noqa: PLC0415

    sys.path[:0] = [folder for folder in folders_of_code if folder not in sys.path]
    try:
        kind = getattr(modules, class_path, None) or locate(class_path)
    except ErrorDuringImport as error:
        raise ConfigError(f"{class_path}: {error}") from error
    if not isinstance(kind, type):
        raise ConfigError(f"{class_path}: there is no such class")
    return inspect.signature(kind).parameters
