"""What an earlier run has written makes room for a new one, under a number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_info


def set_aside(who: str, names: Sequence[Path], old: Sequence[Path]) -> None:
    """Rename ``old`` files or folders, all by the same number: ``name.1.jsonl``.

    The number is free beside all ``names`` that the new run is going to use.
    """
    number = 1
    while any(_numbered(place, number).exists() for place in names):
        number += 1
    for place in old:
        place.rename(_numbered(place, number))
    if old:
        first, *others = old
        more = f" and {len(others)} more; they are" if others else "; it is"
        rank_zero_info(
            f"{who}: an earlier run has written {first.name}{more} now "
            f"{_numbered(first, number)}{' and so on' if others else ''}"
        )


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")
