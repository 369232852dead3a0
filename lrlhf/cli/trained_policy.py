"""What generates, found by the name that a person gives it: a run, a checkpoint, a model."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jsonargparse import ArgumentError
from torch import nn

from lrlhf.cli.export_command import fill
from lrlhf.datamodules import PromptDataModule
from lrlhf.foreign_files import TRUST_FLAG, read_yaml, refuse_foreign_code
from lrlhf.models import CausalLM, LoRA, load_config
from lrlhf.models.loading.adapters import stored_adapters
from lrlhf.models.loading.model_sources import locate
from lrlhf.models.loading.reward_files import HEAD_CONFIG
from lrlhf.modules.policy.load_policy import LoadedPolicy, load_policy
from lrlhf.modules.policy_module import PolicyModule
from lrlhf.options.conversion import convert
from lrlhf.options.errors import ConfigError
from lrlhf.rollout import Sampling
from lrlhf.run.checkpoints.checkpoint_reader import is_folder_checkpoint
from lrlhf.run.checkpoints.checkpoint_search import SUFFIX, newest_intact

_logger = logging.getLogger(__name__)

_CONFIG = "config.yaml"
_ADAPTERS = "adapter_config.json"
_EXPORTS = ("export/final", "hf/final", "final")
_PROMPT_OPTIONS = (
    *("prompt_column", "prompt_template", "as_chat", "system_prompt"),
    *("chat_template", "chat_template_kwargs"),
)


class TrainedPolicy(NamedTuple):
    """A policy in memory, in eval mode, and what is known of its training."""

    policy: LoadedPolicy
    origin: str
    """What was loaded."""
    sampling: Sampling | None = None
    """Of the run's training responses; None: no run is known."""
    prompts: Mapping[str, Any] = {}
    """Options of the run's data module that say how a row becomes a prompt."""


class _Run(NamedTuple):
    """The part of a run's saved config that is about its policy."""

    spec: CausalLM
    sampling: Sampling
    prompts: Mapping[str, Any]


def load_named(options: argparse.Namespace) -> TrainedPolicy:
    """Load the policy that the options of `add_loading_options` name, see `load_trained`."""
    return load_trained(
        options.source,
        dtype=options.dtype,
        device=options.device,
        use_ema=options.use_ema,
        trust_remote_code=options.trust_remote_code,
    )


def load_trained(
    source: str,
    *,
    dtype: str | None = None,
    device: str = "auto",
    use_ema: bool = False,
    trust_remote_code: bool = False,
) -> TrainedPolicy:
    """Load a policy.

    Args:
        source: A run's folder (its newest checkpoint, else its export), a checkpoint, or a model:
            a folder that ``transformers`` loads, a ``.gguf`` file, ``package:<module>``, a hub id;
            or a folder of LoRA adapters, which are put around the model that they name.
        dtype: Of the weights; None: as stored, of a checkpoint as in the run.
        device: ``auto``: a GPU where there is one.
        use_ema: Of a checkpoint the averaged weights.
        trust_remote_code: Run code that comes with the model, or that the config of its run names.

    Raises:
        ConfigError: Nothing is there, it is damaged, or no language model; there is no such device;
            it would run code without consent.
    """
    checkpoint, target, trusted = None, _device(device), trust_remote_code
    with _as_one_line():
        checkpoint = _checkpoint_of(Path(source).expanduser())
    if isinstance(checkpoint, str):
        source, checkpoint = checkpoint, None
    if checkpoint is not None:
        trained = _from_checkpoint(checkpoint, dtype, use_ema=use_ema, trusted=trusted)
    else:
        if use_ema:
            raise ConfigError(f"use_ema: {source} is no checkpoint, and has no averaged weights")
        trained = _from_model(source, dtype, trusted=trusted)
    trained.policy.model.to(target).eval().requires_grad_(False)  # type: ignore[arg-type]
    return trained


@contextmanager
def _as_one_line() -> Iterator[None]:
    """Have whatever is wrong with what the user named end as a complaint about that."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError, ImportError, ArgumentError) as error:
        raise ConfigError(" ".join(str(error).split())) from error


def _checkpoint_of(path: Path) -> Path | str | None:
    """Find the checkpoint that a path stands for, or a run's export; None: it is a model.

    Raises:
        ConfigError: It is a folder with neither.
    """
    if path.is_file():
        return path if path.suffix == SUFFIX else None
    if is_folder_checkpoint(path):
        return path
    if path.suffix == SUFFIX and not path.exists():
        there = sorted(entry.name for entry in path.parent.glob(f"*{SUFFIX}"))
        listed = f"; there are {', '.join(there)}" if there else ""
        raise ConfigError(f"no checkpoint {path}{listed}")
    names = ("config.json", _ADAPTERS, "*.gguf")
    if not path.is_dir() or any(found for name in names for found in path.glob(name)):
        return None
    folders = [folder for folder in (path / "checkpoints", path) if folder.is_dir()]
    passed: dict[Path, str] = {}
    for folder in folders:
        checkpoint = newest_intact(folder, "last")
        if checkpoint.path is not None:
            return _export_instead(path, checkpoint.path) or checkpoint.path
        passed |= checkpoint.passed
    if (export := _export_of(path)) is not None:
        return export
    flaws = "".join(f"; {one}: {flaw}" for one, flaw in passed.items())
    raise ConfigError(
        f"{path} has neither a checkpoint (looked in {', '.join(map(str, folders))}) nor a "
        f"config.json{flaws}; give the folder of a run, a checkpoint, or a model"
    )


def _export_of(run: Path) -> str | None:
    exports = (run / name for name in _EXPORTS)
    return next((str(export) for export in exports if (export / "config.json").is_file()), None)


def _export_instead(run: Path, checkpoint: Path) -> str | None:
    """Return the export of a run that Python started, of which no config says what it trained."""
    if _config_of(checkpoint) is not None or (export := _export_of(run)) is None:
        return None
    _logger.info("%s has no %s, as of a run from Python: takes %s", run, _CONFIG, export)
    return export


def _config_of(checkpoint: Path) -> Path | None:
    """Find the config that the run of a checkpoint has saved."""
    folders = list(checkpoint.absolute().parents)[:3]
    return next((folder / _CONFIG for folder in folders if (folder / _CONFIG).is_file()), None)


def _from_model(named: str, dtype: str | None, *, trusted: bool) -> TrainedPolicy:
    source = named
    with _as_one_line():
        lora, adapters = None, Path(source).expanduser()
        if (adapters / _ADAPTERS).is_file() and not (adapters / "config.json").is_file():
            lora = LoRA(source=str(adapters))
            source = stored_adapters(str(adapters)).base_model_name_or_path or ""
        folder = locate(source)
        if isinstance(folder, str) or folder.is_dir():
            _refuse_other_models(source, folder, trusted=trusted)
        spec = CausalLM(
            source=source,
            dtype=dtype or "auto",  # type: ignore[arg-type]
            trust_remote_code=trusted,
            lora=lora,
        )
        return TrainedPolicy(load_policy(spec, None, None), named)


def _refuse_other_models(source: str, folder: Path | str, *, trusted: bool) -> None:
    """Refuse what has no words to say, before its weights are loaded."""
    names = load_config(source, trust_remote_code=trusted).architectures or []
    heads = isinstance(folder, Path) and (folder / HEAD_CONFIG).is_file()
    if heads or any("SequenceClassification" in name for name in names):
        raise _is_reward_model(source, f"lrlhf serve-reward --model.source {source}")


def _is_reward_model(what: str, command: str) -> ConfigError:
    return ConfigError(
        f"{what} is a reward model, which scores texts and writes none; `{command}` serves it, and "
        "`lrlhf predict` scores a data set"
    )


def _from_checkpoint(
    checkpoint: Path, dtype: str | None, *, use_ema: bool, trusted: bool
) -> TrainedPolicy:
    with _as_one_line():
        run = _run_of(checkpoint, trusted=trusted)
        spec = run.spec if dtype is None else replace(run.spec, dtype=dtype)  # type: ignore[arg-type]
        loaded = load_policy(spec, None, None)
        # the names of a module's checkpoint
        holder = nn.ModuleDict({"policy": loaded.model})
        trained = {n: weight for n, weight in holder.named_parameters() if weight.requires_grad}
        fill(holder, checkpoint, averaged=trained if use_ema else None, prefix="policy.")
    return TrainedPolicy(loaded, str(checkpoint), run.sampling, run.prompts)


def _run_of(checkpoint: Path, *, trusted: bool) -> _Run:
    """Read the config that the run of a checkpoint has saved.

    Raises:
        ConfigError: There is none, or none of a run with a policy.
        ValueError: It is no such config, or would run code of others.
    """
    path = _config_of(checkpoint)
    if path is None:
        folder = checkpoint.absolute().parent
        raise ConfigError(
            f"{checkpoint}: no {_CONFIG} beside it or in the folders {folder} and above, so "
            "the model is not known; give an exported folder (lrlhf export, or the run's "
            "export/final)"
        )
    config = read_yaml(path)
    model = _section(config, "model")
    options = _section(model, "init_args")
    name = str(model.get("class_path", "")).rpartition(".")[2]
    if name == "RewardModel":
        export = f"lrlhf export --config {path} --ckpt_path {checkpoint} --output FOLDER"
        raise _is_reward_model(
            str(checkpoint), f"{export}; lrlhf serve-reward --model.source FOLDER"
        )
    if "policy" not in options:
        raise ConfigError(
            f"{path}: the module {name or '?'} has no option policy, so what generates is not "
            "known; export its model (lrlhf export), and give that folder"
        )
    run_options = {name: options[name] for name in ("policy", "sampling") if options.get(name)}
    refuse_foreign_code(run_options, path, trusted=trusted)
    data = _section(_section(config, "data"), "init_args")
    prompts = {key: data[key] for key in _PROMPT_OPTIONS if data.get(key)}
    try:
        built = convert(PolicyModule, run_options, PolicyModule)
        convert(PromptDataModule, prompts, PromptDataModule)
    except TypeError as error:
        raise ConfigError(f"{path}: {error}") from error
    policy = built["policy"]
    spec = CausalLM(source=policy) if isinstance(policy, str) else policy
    if not trusted:
        _refuse_foreign_template(prompts.get("chat_template") or "", path)
    return _Run(spec, built.get("sampling") or Sampling(), prompts)


def _refuse_foreign_template(template: str, config: Path) -> None:
    """Refuse that a run's config names a file that did not come with it, nor is worked with here.

    Raises:
        ConfigError: It does.
    """
    file = Path(template).expanduser()
    folders = (config.absolute().parent, Path.cwd())
    if "{" in template or any(map(file.resolve().is_relative_to, folders)):
        return
    raise ConfigError(
        f"{config}: data.chat_template is the file {file}, and a file that came with a model names "
        f"none outside of its folder: if you trust it, add {TRUST_FLAG} to this command"
    )


def _section(config: Any, name: str) -> Mapping[str, Any]:
    """Return a part of a config; empty: it has none."""
    section = config.get(name) if isinstance(config, Mapping) else None
    return section if isinstance(section, Mapping) else {}


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        raise ConfigError(
            f"device: there is no {name!r} on this machine; give auto, cpu, cuda or cuda:1"
        ) from error
    return device
