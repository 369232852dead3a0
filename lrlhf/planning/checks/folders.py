"""Folders that a run writes to."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lrlhf.planning.checks.mistake import MistakeError
from lrlhf.planning.checks.trainer_options import entries_of
from lrlhf.planning.config_entries import options_of
from lrlhf.run.run_folder import refuse_remote

_NAMES = ("dirpath", "save_dir", "root_dir")
"""What callbacks and loggers call the folder that they write to."""


def check_folders(trainer: Mapping[str, Any]) -> None:
    """Refuse a folder that cannot be made or written, by the option that names it."""
    if (root := trainer["default_root_dir"]) is not None:
        try:
            refuse_remote(root)
        except ValueError as error:
            raise MistakeError(("trainer", "default_root_dir"), str(error)) from error
    for key, folder in _folders(trainer):
        if "://" in folder:
            continue
        if problem := _problem(Path(folder).expanduser()):
            raise MistakeError(key, f"{folder} cannot be written: {problem}", value=folder)


def _folders(trainer: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    if (root := trainer["default_root_dir"]) is not None:
        yield ("trainer", "default_root_dir"), str(root)
    for section in ("callbacks", "logger"):
        for entry in entries_of(trainer[section]):
            options = options_of(entry)
            for name in _NAMES:
                if isinstance(folder := options.get(name), str | Path):
                    yield ("trainer", section), str(folder)


def _problem(folder: Path) -> str:
    """Say what is in the way; nothing: the folder is there, or can be made."""
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    except PermissionError:
        return "there is no permission to look into one of the folders above it"
    if not there.is_dir():
        return f"{there} is a file" if there != folder else "it is a file"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"there is no permission to write in {there}"
    return ""
