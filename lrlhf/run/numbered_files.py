"""Renames the files of an earlier run to a free number, so that no run overwrites another's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_info


def move_to_numbered(who: str, names: Sequence[Path], old: Sequence[Path]) -> None:
    """Rename ``old`` files or folders, all by the same number: ``name.1.jsonl``.

    The number is free beside all ``names`` that the new run is going to use.
    """
    number = 1
    while any(_numbered(path, number).exists() for path in names):
        number += 1
    for path in old:
        path.rename(_numbered(path, number))
    if old:
        first, *others = old
        more = f" and {len(others)} more; they are" if others else "; it is"
        rank_zero_info(
            f"{who}: an earlier run has written {first.name}{more} now "
            f"{_numbered(first, number)}{' and so on' if others else ''}"
        )


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")
