"""What needs an account."""

from __future__ import annotations

import netrc
import os
from collections.abc import Iterator, Mapping
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lrlhf.callbacks.hub import HubRepo
from lrlhf.planning.checks.mistake import MistakeError
from lrlhf.planning.checks.trainer_options import entries_of
from lrlhf.planning.config_entries import options_of

_AWAY = {"offline", "disabled", "dryrun"}
"""Modes of W&B that need no account."""
_KEYS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def check_wandb(trainer: Mapping[str, Any]) -> None:
    """Refuse to log to W&B without an account, which it would say once the weights are loaded."""
    for logger in entries_of(trainer["logger"]):
        name = str(logger["class_path"])
        if name.rpartition(".")[2] != "WandbLogger" or _stays_away(logger) or _logged_in():
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


def _stays_away(logger: Mapping[str, Any]) -> bool:
    options = {**options_of(logger), **(logger.get("dict_kwargs") or {})}
    modes = {options.get("mode"), os.environ.get("WANDB_MODE"), *_settings("mode")}
    return bool(options.get("offline") or options.get("experiment") or modes & _AWAY)


def _logged_in() -> bool:
    if any(os.environ.get(name) for name in _KEYS) or any(_settings("api_key")):
        return True
    address = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    files = [Path(name).expanduser() for name in ("~/.netrc", "~/_netrc")]
    if given := os.environ.get("NETRC"):
        files = [Path(given).expanduser()]
    return any(_has_entry(file, urlsplit(address).hostname or "") for file in files)


def _has_entry(file: Path, host: str) -> bool:
    try:
        return file.is_file() and netrc.netrc(str(file)).authenticators(host) is not None
    except (netrc.NetrcParseError, OSError):
        return True  # what it says cannot be known


def _settings(name: str) -> Iterator[str]:
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
