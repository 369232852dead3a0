"""Which checkpoint of a folder a run can go on from, and why it cannot from others."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from lightning.pytorch.strategies import Strategy

from lrlhf.run.atomic import recover_folder
from lrlhf.run.checkpoints.checkpoint_reader import (
    META_FILE,
    NotACheckpointError,
    flaw_of,
    mark_intact,
)
from lrlhf.run.collectives import from_rank_zero

SUFFIX: Final = ".ckpt"
# what damaged bytes make torch's reader of pickles say
UNREADABLE = (
    *(RuntimeError, pickle.UnpicklingError, EOFError, OSError, ArithmeticError, AssertionError),
    *(AttributeError, LookupError, TypeError, ValueError),
)
_WEIGHTS_ONLY: Final = "it holds weights only (save_weights_only), from which no run can go on"


class FoundCheckpoint(NamedTuple):
    """What a folder of checkpoints has."""

    path: Path | None
    """The newest one that is whole; None: there is none."""
    passed: Mapping[Path, str]
    """Why those that would have come first cannot be used."""
    damaged: Sequence[Path]
    """Files and folders among them that are not as they were written."""


class _Candidate(NamedTuple):
    """A checkpoint, as far as it tells without its tensors being read."""

    path: Path
    step: int
    version: int
    flaw: str = ""
    saved: tuple[str, ...] = ()


def places_in(folder: Path) -> Iterator[Path]:
    """The folder and those below it, which names such as ``{eval/score}`` make.

    One with a ``last.ckpt`` belongs to another run; one that is a checkpoint has none inside.
    """
    if not folder.is_dir():
        return
    yield folder
    for entry in sorted(folder.iterdir()):
        inner = entry.is_dir() and not entry.is_symlink() and not entry.name.startswith(".")
        if inner and entry.suffix != SUFFIX and not os.path.lexists(entry / f"last{SUFFIX}"):
            yield from places_in(entry)


def recover_checkpoints(folder: Path) -> None:
    """Put back what a crash left between two renames; several processes may do so at a time."""
    for location in list(places_in(folder)):
        for old in location.glob(f".*{SUFFIX}.old"):
            recover_folder(old.with_name(old.name.removeprefix(".").removesuffix(".old")))


def newest_intact(
    folder: Path, last: str, strategy: Strategy | None = None, *, tidy: bool = False
) -> FoundCheckpoint:
    """Look for the checkpoint that a run goes on from.

    It is the one called ``last`` (or ``last-v1``, of a later run), or the one that a killed process
    had saved and not called so yet. If they are damaged, it is the one of most steps among the
    others: the step is that in the checkpoint, as clocks jump and copies have other times.

    Args:
        folder: Of checkpoints; need not exist.
        last: Name of the newest one, without ending.
        strategy: Of a run of several processes that are connected, all of which call: each reads
            its share. None: this process reads all.
        tidy: Put back first what a crash left between two renames.

    Raises:
        NotACheckpointError: A process does not see what rank zero has found.
        OSError: One is there and cannot be read now.
    """

    def look() -> list[_Candidate]:
        if tidy:
            recover_checkpoints(folder)
        paths = (path for location in places_in(folder) for path in location.glob(f"*{SUFFIX}"))
        checkpoints = sorted(path for path in paths if not path.name.startswith("."))
        return _in_order([_describe(path) for path in checkpoints], folder, last)

    candidates = look() if strategy is None else from_rank_zero(strategy, look)
    passed: dict[Path, str] = {}
    damaged: list[Path] = []
    for candidate in candidates:
        path = candidate.path
        damage = flaw_of(path) if strategy is None else _flaw_on_all_ranks(path)
        if not (damage or candidate.flaw):
            return FoundCheckpoint(path, passed, damaged)
        if path.resolve() not in {known.resolve() for known in passed}:
            passed[path] = damage or candidate.flaw
            damaged += [path.resolve()] if damage and path.exists() else []
    return FoundCheckpoint(None, passed, damaged)


def _in_order(candidates: Sequence[_Candidate], folder: Path, last: str) -> list[_Candidate]:
    name = re.compile(rf"{re.escape(last)}(-v\d+)?")
    inside = [each for each in candidates if each.path.parent == folder]
    lasts = [each for each in inside if name.fullmatch(each.path.stem)]
    lasts.sort(key=lambda each: each.version, reverse=True)
    others = [each for each in candidates if each not in lasts]
    others.sort(key=lambda each: (each.step, each.version), reverse=True)
    # saved right after the last one, by a process that was killed before it called it so
    unnamed = [other for other in others if lasts and _follows(other, lasts[0])]
    return [*unnamed, *lasts, *others]


def _follows(one: _Candidate, last: _Candidate) -> bool:
    """Tell whether a run saved ``one`` after ``last``; old ones may have gone in between."""
    known = one.saved[:-1]
    return bool(known) and one.step > last.step and last.saved[-len(known) :] == known


def _describe(path: Path) -> _Candidate:
    named = re.search(r"-v(\d+)$", path.stem)
    version = int(named[1]) if named else 0
    step = re.search(r"step=(\d+)", path.name)
    unread = _Candidate(path, int(step[1]) if step else -1, version)
    try:
        content = without_tensors(path)
    except UNREADABLE:
        # its checksums tell what is damaged; classes of the user's own are no damage
        return unread
    if not isinstance(content, dict) or "state_dict" not in content:
        return _Candidate(path, unread.step, version, "it has no state_dict")
    flaw = "" if "optimizer_states" in content else _WEIGHTS_ONLY
    saved = tuple(_saved(content.get("callbacks", {})))
    return _Candidate(path, int(content.get("global_step", unread.step)), version, flaw, saved)


def without_tensors(path: Path) -> Any:
    """Read a checkpoint, whose tensors stay where they are."""
    source = path / META_FILE if path.is_dir() else path
    return torch.load(source, map_location="meta", weights_only=True, mmap=not path.is_dir())


def ranking_states(path: Path) -> list[dict[str, Any]]:
    """Return the states of the callbacks that had ranked checkpoints by a metric when it was saved.

    Args:
        path: Of a checkpoint that is whole.
    """
    states = without_tensors(path).get("callbacks", {}).values()
    return [state for state in states if isinstance(state, dict) and state.get("best_k_models")]


def _saved(callbacks: Mapping[str, Any]) -> Iterable[str]:
    """Names of the checkpoints that the callback had saved and kept, the oldest first."""
    for state in callbacks.values():
        if isinstance(state, dict) and "saved" in state and "best_model_path" in state:
            return [Path(path).name for path in state["saved"]]
    return ()


def check(path: Path, *, together: bool = False) -> None:
    """Read a whole checkpoint, and compare it with its checksums.

    Args:
        path: Of a file or folder.
        together: Each rank, all of which call, reads its share, and all agree.

    Raises:
        NotACheckpointError: It is damaged; names what is.
        OSError: It cannot be read now.
    """
    several = together and torch.distributed.is_initialized()
    if flaw := _flaw_on_all_ranks(path) if several else flaw_of(path):
        raise NotACheckpointError(
            f"{path} is damaged: {flaw}; --ckpt_path last takes the newest whole one of its folder"
        )


def _flaw_on_all_ranks(path: Path) -> str:
    """Say what is damaged in a checkpoint, of which each rank reads its share."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    results: list[tuple[bool, str, OSError | None]] = [(False, "", None)] * world
    seen, flaw, failure = os.path.lexists(path), "", None
    try:
        flaw = flaw_of(path, index=rank, count=world) if seen else ""
    except OSError as error:  # the others wait to be told
        failure = error
    torch.distributed.all_gather_object(results, (seen, flaw, failure))
    unseen = [number for number, (there, _, _) in enumerate(results) if not there]
    if unseen and len(unseen) < world:
        raise NotACheckpointError(
            f"the processes do not see the same checkpoints: rank {unseen[0]} has no {path}; set "
            "dirpath of RLCheckpoint to a folder on a disk that all of them share"
        )
    for _, _, raised in results:
        if raised is not None:
            raise raised
    flaw = next((flaw_of_rank for _, flaw_of_rank, _ in results if flaw_of_rank), "")
    if not flaw and seen:
        mark_intact(path)
    return flaw if seen else "it is not there"
