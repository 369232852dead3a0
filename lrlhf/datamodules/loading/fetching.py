"""From rows to batches, in worker processes where wanted; unusable rows are replaced."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch.utils.data import DataLoader

from lrlhf.datamodules.rows.bad_rows import BadDataError, BadRow

logger = logging.getLogger(__name__)

RowT = TypeVar("RowT")
BatchT = TypeVar("BatchT")

_MOST_IN_A_ROW = 100

Problems = list[tuple[str, str]]
"""Reason and detail of each row that another one stands in for."""


class LostWorkerError(RuntimeError):
    """A worker process of a loader ended before its work."""


@dataclass(frozen=True)
class ReadRows(Generic[RowT]):
    """Rows that are read when they are asked for, with what was wrong with those before them."""

    rows: Sequence[RowT]
    read: Callable[[RowT], RowT] | None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[RowT, Problems]:
        if self.read is None:
            return self.rows[index], []
        problems: Problems = []
        # which row stands in depends on the data alone, so a resumed run takes the same one
        for place in range(index, index + min(len(self.rows), _MOST_IN_A_ROW)):
            try:
                return self.read(self.rows[place % len(self.rows)]), problems
            except BadRow as problem:
                problems.append((problem.reason, problem.detail))
        shown = "\n".join(f"{reason}: {detail}" for reason, detail in problems[:5])
        raise BadDataError(f"{len(problems)} rows in a row cannot be used, the first are\n{shown}")


@dataclass(frozen=True)
class Fetching(Generic[RowT, BatchT]):
    """How rows become batches.

    Args:
        collate: Makes a batch of rows; must be picklable to reach worker processes.
        num_workers: Processes that read and collate; 0: the training process does.
        pin_memory: Pin batches for an asynchronous copy to a GPU.
        read: Reads what a row only names, such as images; raises `BadRow` on one that turns out to
            be unusable. The next usable row takes its place, which is logged.
        drop: Leave unusable rows out, where each row is to come once; a batch that would be empty
            gets one other row.
    """

    collate: Callable[[Sequence[RowT]], BatchT]
    num_workers: int = 0
    pin_memory: bool = False
    read: Callable[[RowT], RowT] | None = None
    drop: bool = False
    unusable: Counter[str] = field(default_factory=Counter)
    """Rows that turned out to be unusable during training, by reason."""

    def batches(self, rows: Sequence[RowT], batches: Sequence[Sequence[int]]) -> Iterator[BatchT]:
        """Go through batches of the given row indices."""
        loader: DataLoader[tuple[BatchT, Problems]] = DataLoader(
            ReadRows(rows, self.read),  # type: ignore[arg-type]  # a map-style data set
            batch_sampler=[list(batch) for batch in batches],
            collate_fn=self._collate,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            # its own generator: else every epoch takes a number from the global one, and what is
            # sampled afterwards depends on how often a run was resumed
            generator=torch.Generator().manual_seed(0),
        )
        try:
            for batch, problems in loader:
                self._log(problems)
                yield batch
        except RuntimeError as error:
            # torch has no class of its own for it
            if not str(error).startswith("DataLoader worker"):
                raise
            raise LostWorkerError(
                f"a process that reads data is gone ({error}), mostly because memory ran out: "
                f"lower data.num_workers (it is {self.num_workers}), and go on with "
                "--ckpt_path last"
            ) from error

    def batch(self, rows: Sequence[RowT], batch: Sequence[int]) -> BatchT:
        """Make one batch in this process."""
        readable = ReadRows(rows, self.read)
        made, problems = self._collate([readable[row] for row in batch])
        self._log(problems)
        return made

    def _collate(self, read: Sequence[tuple[RowT, Problems]]) -> tuple[BatchT, Problems]:
        if self.drop:
            kept = [row for row, problems in read if not problems] or [read[0][0]]
        else:
            kept = [row for row, _ in read]
        return self.collate(kept), [problem for _, problems in read for problem in problems]

    def _log(self, problems: Problems) -> None:
        """Count unusable rows by reason; each reason is logged when its count doubles."""
        for reason, detail in problems:
            self.unusable[reason] += 1
            if self.unusable[reason].bit_count() == 1:
                logger.warning(
                    "a row could not be used and the next one took its place: %s: %s "
                    "(%d time(s) so far)",
                    reason,
                    detail,
                    self.unusable[reason],
                )
