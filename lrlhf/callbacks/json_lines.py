"""Records as lines of JSON, from every rank."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")


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
