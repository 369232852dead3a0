"""Options of the trainer: strategy, devices, length, loggers, accounts and folders."""

from __future__ import annotations

import importlib.util
import netrc
import os
from collections.abc import Callable, Iterator, Mapping
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning.pytorch.accelerators import CUDAAccelerator

from lrlhf.callbacks.hub import HubRepo
from lrlhf.cli.config_entries import has_batch_plan, is_a, options_of, processes
from lrlhf.modules.base import TrainingModule
from lrlhf.modules.row_module import RowModule
from lrlhf.options.errors import MistakeError
from lrlhf.run.run_folder import refuse_remote
from lrlhf.trainer_options import (
    REPLACED,
    refuse_accelerator,
    refuse_folder,
    refuse_replaced,
    refuse_strategy,
)


def check_strategy(trainer: Mapping[str, Any]) -> None:
    """Refuse a strategy that does not exist, or that does not know of several models."""
    _as_mistake("strategy", refuse_strategy, trainer["strategy"])


def check_accelerator(trainer: Mapping[str, Any]) -> None:
    """Refuse a GPU that is not there."""
    _as_mistake("accelerator", refuse_accelerator, trainer["accelerator"])


def _as_mistake(option: str, refuse: Callable[..., None], *values: Any) -> None:
    try:
        refuse(*values)
    except ValueError as error:
        raise MistakeError(("trainer", option), str(error)) from error


def check_devices(trainer: Mapping[str, Any]) -> None:
    """Refuse more GPUs than this machine has."""
    key = ("trainer", "devices")
    try:
        count = processes({**trainer, "num_nodes": 1}).number or 1
    except ValueError as error:
        raise MistakeError(key, str(error).removeprefix("trainer.")) from error
    if trainer["accelerator"] not in ("auto", "gpu", "cuda") or not CUDAAccelerator.is_available():
        return
    here, devices = CUDAAccelerator.auto_device_count(), trainer["devices"]
    listed = devices if isinstance(devices, list) else []
    numbers = [device for device in listed if isinstance(device, int)]
    if count > here or any(number >= here for number in numbers):
        raise MistakeError(
            key, f"{devices} is asked for, and this machine has {here} GPU(s), counted from 0"
        )


def check_length(trainer: Mapping[str, Any]) -> None:
    """Refuse a training run without a length, or with two that exclude each other."""
    steps, epochs = trainer["max_steps"], trainer["max_epochs"]
    ends = (trainer["max_time"], trainer["fast_dev_run"], epochs)
    if steps == -1 and not any(end not in (None, False) for end in ends):
        raise MistakeError(
            ("trainer", "max_steps"),
            "nothing says how long to train: give trainer.max_steps (such as 100) or "
            "trainer.max_epochs (such as 1); -1 trains until it is interrupted",
        )
    for least, most in (("min_steps", "max_steps"), ("min_epochs", "max_epochs")):
        low, high = trainer[least], trainer[most]
        if low is not None and high not in (None, -1) and low > high:
            raise MistakeError(
                ("trainer", least), f"{low} is more than trainer.{most}, which is {high}"
            )
    for name, value in (("max_steps", steps), ("max_epochs", epochs)):
        if value is not None and value < -1:
            raise MistakeError(("trainer", name), f"{value} is no length; -1 stands for no limit")


def check_replaced(trainer: Mapping[str, Any], model: Any) -> None:
    """Refuse options that a module has others for, which Lightning would not apply to it."""
    is_policy = is_a(model, TrainingModule) and has_batch_plan(options_of(model))
    if not is_policy and not is_a(model, RowModule):
        return
    refuse = partial(refuse_replaced, is_policy=is_policy)
    name = str(model["class_path"]).rpartition(".")[2]
    for option in REPLACED:
        _as_mistake(option, refuse, name, option, trainer[option])


def check_loggers(trainer: Mapping[str, Any]) -> None:
    """Refuse a logger whose package is missing."""
    needed = {
        "WandbLogger": (("wandb",), "wandb"),
        "TensorBoardLogger": (("tensorboard", "tensorboardX"), "tensorboard"),
    }
    for logger in entries_of(trainer["logger"]):
        name = str(logger["class_path"])
        packages, extra = needed.get(name.rpartition(".")[2], ((), ""))
        if packages and not any(map(importlib.util.find_spec, packages)):
            raise MistakeError(
                ("trainer", "logger"),
                f"{name.rpartition('.')[2]} needs the package {packages[0]}: pip install "
                f"'lrlhf[{extra}]'",
                value=name,
            )


def entries_of(value: Any) -> Iterator[Mapping[str, Any]]:
    """Go through the classes that an option with one of them, a list or neither holds."""
    for entry in value if isinstance(value, list) else [value]:
        if isinstance(entry, Mapping) and "class_path" in entry:
            yield entry


_WANDB_AWAY = {"offline", "disabled", "dryrun"}
"""Modes of W&B that need no account."""
_WANDB_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def check_wandb(trainer: Mapping[str, Any]) -> None:
    """Refuse to log to W&B without an account, which it would say once the weights are loaded."""
    for logger in entries_of(trainer["logger"]):
        name = str(logger["class_path"])
        if name.rpartition(".")[2] != "WandbLogger" or _logs_offline(logger) or _logged_in():
            continue
        raise MistakeError(
            ("trainer", "logger"),
            "nobody is logged in at W&B on this machine: run `wandb login`, or set WANDB_API_KEY; "
            "WANDB_MODE=offline keeps the run here, for `wandb sync` later",
            value=name,
        )


def check_hub(trainer: Mapping[str, Any]) -> None:
    """Refuse to push to the hub offline or without an account, before the weights are loaded."""
    for callback in entries_of(trainer["callbacks"]):
        name = options_of(callback).get("push_to_hub")
        if str(callback["class_path"]).rpartition(".")[2] != "HFExport" or name is None:
            continue
        try:
            HubRepo(repo_id=name).check()
        except ValueError as error:
            raise MistakeError(("trainer", "callbacks"), str(error), value=name) from error


def _logs_offline(logger: Mapping[str, Any]) -> bool:
    options = {**options_of(logger), **(logger.get("dict_kwargs") or {})}
    modes = {options.get("mode"), os.environ.get("WANDB_MODE"), *_wandb_settings("mode")}
    return bool(options.get("offline") or options.get("experiment") or modes & _WANDB_AWAY)


def _logged_in() -> bool:
    if any(os.environ.get(name) for name in _WANDB_KEYS) or any(_wandb_settings("api_key")):
        return True
    address = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    files = [Path(name).expanduser() for name in ("~/.netrc", "~/_netrc")]
    if netrc := os.environ.get("NETRC"):
        files = [Path(netrc).expanduser()]
    return any(_has_entry(file, urlsplit(address).hostname or "") for file in files)


def _has_entry(file: Path, host: str) -> bool:
    try:
        return file.is_file() and netrc.netrc(str(file)).authenticators(host) is not None
    except (netrc.NetrcParseError, OSError):
        return True  # what it says cannot be known


def _wandb_settings(name: str) -> Iterator[str]:
    """Read what `wandb offline` and other commands of W&B have left for this folder and user."""
    folder = Path(os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")).expanduser()
    for file in (folder / "settings", Path("wandb/settings")):
        parser = ConfigParser()
        try:
            parser.read(file)
        except (ConfigParserError, OSError, UnicodeDecodeError):
            continue
        if value := parser.get("default", name, fallback=""):
            yield value


_FOLDER_OPTIONS = ("dirpath", "save_dir", "root_dir")
"""What callbacks and loggers call the folder that they write to."""


def check_folders(trainer: Mapping[str, Any]) -> None:
    """Refuse a folder that cannot be made or written, by the option that names it."""
    if (root := trainer["default_root_dir"]) is not None:
        _as_mistake("default_root_dir", refuse_remote, root)
        _as_mistake("default_root_dir", refuse_folder, root)
    for key, folder in _folders(trainer):
        try:
            refuse_folder(folder)
        except ValueError as error:
            raise MistakeError(key, str(error), value=folder) from error


def _folders(trainer: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    for section in ("callbacks", "logger"):
        for entry in entries_of(trainer[section]):
            options = options_of(entry)
            for name in _FOLDER_OPTIONS:
                if isinstance(folder := options.get(name), str | Path):
                    yield ("trainer", section), str(folder)
