"""Evaluates models that are to be compared, each in a process of its own."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lrlhf.cli.config_files import config_arguments, read_config_files
from lrlhf.cli.messages.errors import ConfigError

_CHECKPOINT = ".ckpt"
_OF_RUN = ("checkpoints/last.ckpt", "export/final")
"""What stands for a run."""
_OPTIONS = {"RewardModel": "model"}
"""What a module calls the model that it trains; others call it ``policy``."""


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
        ConfigError: A config cannot be used, or an evaluation has failed.
    """
    flags = [flag for config in configs for flag in ("--config", config)]
    read_config_files(flags)
    option = _option(config_arguments(flags))
    folders: dict[str, list[Path]] = {}
    for name, models in sides.items():
        folders[name] = [_evaluate(model, flags, option, output) for model in models]
    return folders


def _evaluate(model: str, flags: Sequence[str], option: str, output: Path) -> Path:
    folder = output / _folder_name(model)
    for old in folder.glob("eval_scores_*.jsonl"):
        old.unlink()
    path = Path(model)
    if path.is_dir() and path.suffix != _CHECKPOINT and not (path / "config.json").exists():
        path = next((path / one for one in _OF_RUN if (path / one).exists()), path)
    is_checkpoint = path.suffix == _CHECKPOINT
    if (is_checkpoint or model.startswith((".", "/"))) and not path.exists():
        raise ConfigError(f"no model {model}")
    source = str(path) if path.exists() else model
    chosen = ["--ckpt_path", source] if is_checkpoint else [f"--model.{option}", source]
    command = [sys.executable, "-m", "lrlhf", "validate", *flags, *chosen]
    command += ["--trainer.default_root_dir", str(folder)]
    sys.stderr.write(f"evaluating {model}\n")
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
    """Name a folder so that ``a/final`` and ``b/final`` have different ones."""
    digest = hashlib.sha256(str(model).encode()).hexdigest()[:8]
    return f"{Path(model).name}-{digest}"


def _option(configs: Sequence[str]) -> str:
    """Return which option of the config's module names the model."""
    name = ""
    for config in configs:
        content: Any = yaml.safe_load(Path(config).read_text(encoding="utf-8")) or {}
        model = content.get("model")
        if isinstance(model, Mapping) and "class_path" in model:
            name = str(model["class_path"]).rpartition(".")[2]
    return _OPTIONS.get(name, "policy")
