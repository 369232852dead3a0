"""What two runs have left in their folders, compared without any tolerance."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CLOCK = ("timings.csv", "*.png")
"""Files that hold times: how long a phase took is not the same in any two runs."""
ASIDE = re.compile(r"(rollouts|metrics|timings|eval_scores_\d+)\.\d+\.(jsonl|csv)")
"""What a run has put aside that was started again."""
_OTHERWISE = re.compile(
    # Lightning does not count an epoch as begun where the checkpoint was saved after the last batch
    # of the one before; where a run goes on is told by ``processed`` and ``completed``
    r"\.loops\.fit_loop\.epoch_progress\.(current|total)\.(ready|started)"
    # the row that is about to be logged has times too
    r"|\.log_rows\.row\.metrics\.perf/\w+"
)
"""What may differ in a checkpoint."""


def differences(whole: Path, resumed: Path) -> list[str]:
    """Compare two run folders, file by file.

    Args:
        whole: Of the run that nothing disturbed.
        resumed: Of the one that was killed and continued.

    Returns:
        One line for each difference; none if the folders are equal. Checkpoints are compared by
        all that they hold, every other file by its bytes.
    """
    ours, theirs = _files(whole), _files(resumed)
    found = [f"{name} is missing" for name in sorted(ours - theirs)]
    found += [f"{name} is there too" for name in sorted(theirs - ours)]
    for name in sorted(ours & theirs):
        if name.endswith(".ckpt"):
            pair = (torch.load(folder / name, weights_only=True) for folder in (whole, resumed))
            lines = unequal(*pair, (str(whole), str(resumed)))
            found += [f"{name}: {line}" for line in lines]
        else:
            found += [f"{name}: {line}" for line in _texts(whole / name, resumed / name)]
    return found


def _files(folder: Path) -> set[str]:
    paths = [path for path in folder.rglob("*") if not path.is_dir()]
    kept = [path for path in paths if not any(path.match(pattern) for pattern in CLOCK)]
    return {str(path.relative_to(folder)) for path in kept if not ASIDE.fullmatch(path.name)}


def _texts(whole: Path, resumed: Path) -> Iterator[str]:
    ours, theirs = whole.read_bytes(), resumed.read_bytes()
    if whole.name == "config.yaml":
        # the command of the resumed run is another in this
        theirs = theirs.replace(b"\nckpt_path: last\n", b"\nckpt_path: null\n")
    if ours == theirs:
        return
    lines = zip(ours.split(b"\n"), theirs.split(b"\n"), strict=False)
    first = next((n for n, (one, other) in enumerate(lines, 1) if one != other), None)
    where = f"line {first} is the first that differs" if first else "one is the other's beginning"
    yield f"{len(ours)} bytes and {len(theirs)}; {where}"


def unequal(ours: Any, theirs: Any, places: tuple[str, str], where: str = "") -> Iterator[str]:
    """Go through two nested values, and say where they are not the same.

    Args:
        ours: One of them.
        theirs: The other.
        places: Folders of the two; a path into the one is equal to that path into the other.
        where: Name of these values.
    """
    if _OTHERWISE.fullmatch(where):
        return
    if type(ours) is not type(theirs):
        yield f"{where} is {type(ours).__name__} and {type(theirs).__name__}"
    elif isinstance(ours, Mapping):
        pairs, others = _by_key(ours, places[0]), _by_key(theirs, places[1])
        yield from (f"{where}.{key} is in one only" for key in sorted(pairs.keys() ^ others.keys()))
        for key in sorted(pairs.keys() & others.keys()):
            yield from unequal(pairs[key], others[key], places, f"{where}.{key}")
    elif isinstance(ours, list | tuple):
        pair = (dict(enumerate(ours)), dict(enumerate(theirs)))
        yield from unequal(*pair, places, where)
    elif isinstance(ours, Tensor):
        yield from () if _same_tensors(ours, theirs) else (f"{where} differs",)
    elif not _same_values(ours, theirs, places):
        yield f"{where} is {ours!r} and {theirs!r}"


def _by_key(values: Mapping[Any, Any], place: str) -> dict[str, Any]:
    return {str(key).replace(place, ""): value for key, value in values.items()}


def _same_values(ours: Any, theirs: Any, places: tuple[str, str]) -> bool:
    if isinstance(ours, str):
        return bool(ours.replace(places[0], "") == theirs.replace(places[1], ""))
    # NaN is the same as NaN
    return bool(ours == theirs or (ours != ours and theirs != theirs))


def _same_tensors(ours: Tensor, theirs: Tensor) -> bool:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    # as bytes: NaN equals NaN, and 0.0 is not -0.0
    one, other = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (ours, theirs))
    return torch.equal(one, other)
