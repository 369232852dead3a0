"""Rollouts of an earlier run, trained on again without an engine."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import lightning as L
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lrlhf.datamodules.core import RowDataModule, RowKind
from lrlhf.datamodules.loading.loader import data_ranks
from lrlhf.datamodules.loading.sources import Row, Source
from lrlhf.datamodules.loading.splits import Split
from lrlhf.rollout.storage import load_group_ids, load_rollout, rollout_files
from lrlhf.types import StoredRollout

logger = logging.getLogger(__name__)


class ReplayDataModule(RowDataModule[Path, StoredRollout]):
    """Yields the rollouts that ``RolloutLog(save_tensors=True)`` has kept, one file per step.

    The files of an iteration, one per rank of the run that wrote them, are rollouts of their own:
    they are shared out to the ranks of this run, each getting the same number. There is nothing to
    validate on.

    Args:
        folder: The folder ``rollouts`` of the earlier run.
        shuffle: Shuffle the files in each epoch; else they come oldest first.
        seed: Of the order.
        max_rollouts: Take only so many files, the newest; None: all.
        as_recorded: Repeat the updates of the earlier run, whose configuration the rest of this one
            must be: with the log-probabilities that the policy has before each update as the old
            ones, and importance weights against the engine's. Else the old ones are the engine's.
        accept_changed_data: Resume although the files are not those of the checkpoint.

    Raises:
        ValueError: In `setup`, when the folder or a file in it cannot be used.
    """

    def __init__(
        self,
        folder: str | Path,
        shuffle: bool = True,
        seed: int = 0,
        max_rollouts: int | None = None,
        as_recorded: bool = False,
        accept_changed_data: bool = False,
    ) -> None:
        if max_rollouts is not None and max_rollouts < 1:
            raise ValueError(f"max_rollouts={max_rollouts}: give at least 1")
        self._as_recorded = as_recorded
        super().__init__(
            self._rollouts,
            RolloutFolder(folder, max_rollouts),
            batch_size=1,
            shuffle=shuffle,
            seed=seed,
            accept_changed_data=accept_changed_data,
        )

    def _rollouts(self, trainer: L.Trainer | None) -> RowKind[Path, Path, StoredRollout]:
        world = data_ranks(trainer).world
        return RowKind(
            parse=lambda row, _: row["path"],
            collate=partial(load_only, as_recorded=self._as_recorded),
            check=lambda split, _: _checked(split, world),
        )


def _checked(split: Split[Path], world: int) -> Split[Path]:
    """Make sure that all groups are of one size, and files too where several ranks share them."""
    expected: tuple[int, Path] | None = None
    rows: dict[int, Path] = {}
    for path in split.values:
        sizes = _group_sizes(path)
        expected = expected or (sizes[0], path)
        for group, size in enumerate(sizes):
            if size != expected[0]:
                raise ValueError(
                    f"{path}: group {group} holds {size} responses, the first group of "
                    f"{expected[1]} holds {expected[0]}: remove the files of other runs"
                )
        rows.setdefault(sum(sizes), path)
    if len(rows) > 1 and world > 1:
        sizes_and_files = ", ".join(f"{count} in {path}" for count, path in rows.items())
        raise ValueError(
            f"the files hold different numbers of responses ({sizes_and_files}), and ranks "
            "that differ would wait for each other for ever: replay on one rank, or choose "
            "files of equal size with max_rollouts"
        )
    return split


class RolloutFolder(Source):
    """The files of a folder of rollouts, oldest first; arguments as of `ReplayDataModule`."""

    def __init__(self, folder: str | Path, max_rollouts: int | None) -> None:
        self._folder = Path(folder).expanduser()
        self._max_rollouts = max_rollouts

    @property
    def name(self) -> str:
        return str(self._folder)

    def rows(self) -> Iterable[Row]:
        if not self._folder.is_dir():
            raise ValueError(f"there is no folder {self._folder} with rollouts to replay")
        files = rollout_files(self._folder)
        if not files:
            inside = self._folder / "rollouts"
            hint = f" (did you mean {inside}?)" if rollout_files(inside) else ""
            raise ValueError(
                f"{self._folder} holds no step_*.rank_*.safetensors{hint}; a run writes them with "
                "the callback RolloutLog(save_tensors=True)"
            )
        chosen = files if self._max_rollouts is None else files[-self._max_rollouts :]
        rank_zero_only(logger.info)(
            "replay takes %d of %d rollouts of %s, iterations %d to %d",
            len(chosen),
            len(files),
            self._folder,
            chosen[0].step,
            chosen[-1].step,
        )
        return [{"path": file.path} for file in chosen]


def load_only(paths: Sequence[Path], *, as_recorded: bool) -> StoredRollout:
    """Collate one path: read its file."""
    (path,) = paths
    if not path.is_file():
        raise ValueError(
            f"{path} was there when the run began and is gone: a RolloutLog of this run that "
            "writes to the same place has set the folder aside. Move it back, and give RolloutLog "
            "another dirpath"
        )
    return replace(load_rollout(path), as_recorded=as_recorded)


def _group_sizes(path: Path) -> list[int]:
    """Count the consecutive rows of each group.

    Raises:
        ValueError: There are no rows, or those of one group do not stand together.
    """
    groups, sizes = torch.unique_consecutive(load_group_ids(path), return_counts=True)
    if len(groups) == 0:
        raise ValueError(f"{path} holds a rollout without rows: remove the file")
    if len(groups) != len(groups.unique()):
        raise ValueError(f"{path}: the responses of a group do not stand together: remove the file")
    return [int(size) for size in sizes]
