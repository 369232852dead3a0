"""Where callbacks write, and records as lines of JSON, from every rank."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import numpy as np
import torch
from torch import Tensor

from lrlhf.run.atomic import atomic_folder, atomic_write
from lrlhf.run.run_folder import HasRunFolder, hold_folder, is_trial, run_folder

__all__ = [
    "atomic_folder",
    "atomic_write",
    "gather_on_zero",
    "hold_output_folder",
    "json_line",
    "output_folder",
    "row_number",
]

T = TypeVar("T")


def output_folder(trainer: L.Trainer, dirpath: str | Path | None) -> Path:
    """Return the folder that a callback writes to.

    ``dirpath`` if given, else the run folder (see `run_folder`). Under ``fast_dev_run`` a folder of
    that name inside it, so that a trial never touches the results of a run.
    """
    if dirpath is None:
        return run_folder(trainer)
    return Path(dirpath) / "fast_dev_run" if is_trial(trainer) else Path(dirpath)


def hold_output_folder(trainer: L.Trainer, dirpath: str | Path | None, stage: str) -> None:
    """Refuse a training run whose folder another one writes to; see `hold_folder`.

    A logger sees to its own folder: those of this library hold it, Lightning's number it. An
    evaluation holds nothing: it may look at a run that goes on. All ranks call, from ``setup``.
    """
    of_logger = dirpath is None and any(log.log_dir is not None for log in trainer.loggers)
    of_logger = of_logger and not isinstance(trainer, HasRunFolder)
    if stage == "fit" and not of_logger:
        hold_folder(trainer, output_folder(trainer, dirpath))


def json_line(record: Mapping[str, Any]) -> str:
    """Serialise a record, without the line break.

    NaN and infinities become null: strict readers (jq, browsers, databases) refuse them.

    Raises:
        ValueError: If a value has no JSON form; names the key.
    """
    plain = _plain(record, "")
    line = json.dumps(plain, ensure_ascii=False, allow_nan=False)
    try:
        line.encode()
    except UnicodeEncodeError:
        # half a surrogate pair, as broken source text has it, exists only in escaped form
        return json.dumps(plain, allow_nan=False)
    return line


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return _plain(value.tolist(), where)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    raise ValueError(
        f"record key {where.removeprefix('.')!r} holds a {type(value).__name__}, which JSON has no "
        "form for; turn it into text or numbers, or leave it out of the record"
    )


def row_number(record: Mapping[str, Any], *names: str) -> int:
    """Return the first of some columns that a record has, if it is a whole number; else 0."""
    value = next((record[name] for name in names if name in record), 0)
    try:
        return operator.index(value)
    except TypeError:  # a column of the user's, which says nothing of the order
        return 0


def gather_on_zero(trainer: L.Trainer, rows: list[T]) -> list[T]:
    """Collect the rows of all ranks on rank zero, in rank order; elsewhere the result is empty.

    Every rank must call it.
    """
    if trainer.world_size == 1:
        return rows
    parts: list[list[T]] | None = None
    if trainer.is_global_zero:
        parts = [[] for _ in range(trainer.world_size)]
    torch.distributed.gather_object(rows, parts, dst=0)
    return [row for part in parts or [] for row in part]
