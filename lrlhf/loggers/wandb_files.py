"""Which rows the files of Weights & Biases hold."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Iterator
from pathlib import Path

_FILE_HEADER = 7
_BLOCK = 32 * 1024
_HEADER = struct.Struct("<IHB")  # checksum, length, kind
_WHOLE, _FIRST, _LAST = 1, 2, 4


def rows_on_file(save_dir: Path, run_id: str) -> set[int]:
    """Collect the steps of all rows that processes of a run have brought to the disk.

    The service that writes them keeps up to 15 seconds in memory, and takes them along when it is
    killed or the process that it serves.

    Args:
        save_dir: Where the folder ``wandb`` is.
        run_id: Of the run.
    """
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    rows: set[int] = set()
    for path in sorted(save_dir.glob(f"wandb/*run-*-{run_id}/run-{run_id}.wandb")):
        for data in records_of(path.read_bytes()):
            record = messages.Record()
            record.ParseFromString(data)
            rows.update(
                int(item.value_json)
                for item in record.history.item
                if "_step" in (item.key, *item.nested_key)
            )
    return rows


def records_of(data: bytes) -> Iterator[bytes]:
    """Split a file in LevelDB's log format, up to what was cut short."""
    at, parts = _FILE_HEADER, b""
    while at + _HEADER.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER.size:
            at += left  # no header fits: the block is filled up
            continue
        _, length, kind = _HEADER.unpack_from(data, at)
        start = at + _HEADER.size
        if kind == 0 or start + length > len(data):
            return
        chunk = data[start : start + length]
        parts = chunk if kind in (_WHOLE, _FIRST) else parts + chunk
        if kind in (_WHOLE, _LAST):
            yield parts
        at = start + length
