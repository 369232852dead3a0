"""Loaders that know where they stand, and go on from there after a resume.

They are not ``torch.utils.data.DataLoader``s: Lightning replaces the sampler of those when it
runs on several ranks. They are sized, so Lightning does not fetch a batch ahead of the step, which
would put the saved position one batch too far.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader

from lrlhf.datamodules.loading.fingerprint import fingerprint
from lrlhf.datamodules.loading.order import Order
from lrlhf.datamodules.rows.bad_rows import BadDataError, BadRow

logger = logging.getLogger(__name__)

_FILES = "images or other files that the train rows name have changed (the same names and rows)"
_BESIDE = "the texts beside the prompts (pretraining) have changed"
_TOKENS = "the train data has other tokens (other texts, tokenizer or chat template)"

RowT = TypeVar("RowT")
BatchT = TypeVar("BatchT")

_MOST_IN_A_ROW = 100


class LostWorkerError(RuntimeError):
    """A worker process of a loader ended before its work."""


class ReadRow(NamedTuple, Generic[RowT]):
    """A row that can be used, and why those before it could not."""

    row: RowT
    problems: list[tuple[str, str]]


class Fetched(NamedTuple, Generic[BatchT]):
    """A batch, and the reason and detail of every row that another one stands in for."""

    batch: BatchT
    problems: list[tuple[str, str]]


class ReadRows(Generic[RowT]):
    """Rows that are read when they are asked for.

    Args:
        rows: As they are known before training.
        read: See `Fetching`.
    """

    def __init__(self, rows: Sequence[RowT], read: Callable[[RowT], RowT] | None) -> None:
        self._rows = rows
        self._read = read

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> ReadRow[RowT]:
        if self._read is None:
            return ReadRow(self._rows[index], [])
        problems: list[tuple[str, str]] = []
        # which row stands in depends on the data alone, so a resumed run takes the same one
        for place in range(index, index + min(len(self._rows), _MOST_IN_A_ROW)):
            try:
                return ReadRow(self._read(self._rows[place % len(self._rows)]), problems)
            except BadRow as problem:
                problems.append((problem.reason, problem.detail))
        told = "\n".join(f"{reason}: {detail}" for reason, detail in problems[:5])
        raise BadDataError(f"{len(problems)} rows in a row cannot be used, the first are\n{told}")


class UnusableRows:
    """Counts rows that turned out to be unusable during training, and tells of them."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def tell(self, problems: Sequence[tuple[str, str]]) -> None:
        """Count rows by reason; each reason is told when its count doubles."""
        for reason, detail in problems:
            count = self.counts[reason] = self.counts.get(reason, 0) + 1
            if count.bit_count() == 1:
                logger.warning(
                    "a row could not be used and the next one took its place: %s: %s "
                    "(%d time(s) so far)",
                    reason,
                    detail,
                    count,
                )


@dataclass(frozen=True)
class Fetching(Generic[RowT, BatchT]):
    """How rows become batches.

    Args:
        collate: Makes a batch of rows; must be picklable to reach worker processes.
        num_workers: Processes that read and collate; 0: the training process does.
        pin_memory: Pin batches for an asynchronous copy to a GPU.
        read: Reads what a row only names, such as images; raises `BadRow` on one that turns out to
            be unusable. The next usable row takes its place, and it is told.
    """

    collate: Callable[[Sequence[RowT]], BatchT]
    num_workers: int = 0
    pin_memory: bool = False
    read: Callable[[RowT], RowT] | None = None
    unusable: UnusableRows = field(default_factory=UnusableRows)
    drop: bool = False
    """Leave unusable rows out, where each row is to come once; a batch that would be empty gets one
    other row."""

    def batches(self, rows: Sequence[RowT], batches: Sequence[Sequence[int]]) -> Iterator[BatchT]:
        """Go through batches of the given row indices."""
        loader: DataLoader[Fetched[BatchT]] = DataLoader(
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
                self.unusable.tell(problems)
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
        self.unusable.tell(problems)
        return made

    def _collate(self, read: Sequence[ReadRow[RowT]]) -> Fetched[BatchT]:
        problems = [problem for row in read for problem in row.problems]
        if self.drop:
            read = [row for row in read if not row.problems] or read[:1]
        return Fetched(self.collate([row.row for row in read]), problems)


@dataclass(frozen=True)
class Ranks:
    """Which share of each batch is this process's."""

    rank: int = 0
    world: int = 1


class TrainLoader(Generic[RowT, BatchT]):
    """Shuffled batches of one rank, as an endless stream cut into passes.

    Batch ``s`` of the stream is a pure function of the seed and ``s``; the state is ``s``. Rows
    left over at the end of an epoch, fewer than one batch of all ranks, are left out of that
    epoch: others in each epoch, as the order is drawn anew.

    Args:
        rows: All rows.
        order: Their order in each epoch.
        batch_size: Rows per batch and rank.
        fetching: How rows become batches.
        ranks: This process among all.
        pass_limit: Lightning's ``limit_train_batches``: a number of batches, or a share of the
            epoch. The next pass goes on where this one ended.
        extend: Adds to each batch what goes with its number in the stream.
        beside: The rows that it takes that from.
        accept_changed: Go on although the rows are not those of the checkpoint: in no case, if
            only their ``tokens`` differ, or in ``all`` cases; it is said.
    """

    def __init__(  # noqa: PLR0913 - all that the stream is a function of
        self,
        rows: Sequence[RowT],
        order: Order,
        batch_size: int,
        *,
        fetching: Fetching[RowT, BatchT],
        ranks: Ranks,
        pass_limit: int | float = 1.0,
        extend: Callable[[BatchT, int], BatchT] | None = None,
        beside: Sequence[object] = (),
        accept_changed: Literal["nothing", "tokens", "all"] = "nothing",
    ) -> None:
        self._rows = rows
        self._order = order
        self._beside = beside
        self._accept_changed = accept_changed
        self.batch_size = batch_size
        self._fetching = fetching
        self._ranks = ranks
        self._extend = extend
        self._size = len(order) // (batch_size * ranks.world)
        if self._size == 0:
            largest = len(order) // ranks.world
            raise ValueError(
                f"batch_size={batch_size} on {ranks.world} rank(s) takes "
                f"{batch_size * ranks.world} rows for one batch, and there are {len(order)} train "
                + (
                    f"rows: the largest possible batch_size is {largest}"
                    if largest
                    else "rows: train on fewer ranks or give more data"
                )
            )
        limit = pass_limit if isinstance(pass_limit, int) else int(pass_limit * self._size)
        self._per_pass = min(limit, self._size) or self._size
        self._done = 0
        self._resumed = False
        self._tell_remainder()

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[BatchT]:
        """Go through one pass, or through what is left of it after a resume."""
        left = self._per_pass - self._done % self._per_pass if self._resumed else self._per_pass
        self._resumed = False
        while left:
            batches = self._rest_of_epoch()[:left]
            for batch in self._fetching.batches(self._rows, batches):
                number = self._done
                self._done += 1  # before the step: a checkpoint within it counts this batch
                left -= 1
                yield batch if self._extend is None else self._extend(batch, number)

    def upcoming(self) -> BatchT:
        """Return the batch that comes next, and leave the position where it is."""
        batch = self._fetching.batch(self._rows, self._rest_of_epoch()[0])
        return batch if self._extend is None else self._extend(batch, self._done)

    def _rest_of_epoch(self) -> list[list[int]]:
        epoch, first = divmod(self._done, self._size)
        order = self._order.epoch(epoch)
        own, all_ranks = self.batch_size, self.batch_size * self._ranks.world
        starts = [index * all_ranks + self._ranks.rank * own for index in range(first, self._size)]
        return [order[start : start + own].tolist() for start in starts]

    @cached_property
    def _digests(self) -> dict[str, str]:
        beside = "-".join(fingerprint(self._beside)) if self._beside else ""
        return {**fingerprint(self._rows)._asdict(), "beside": beside}

    def state_dict(self) -> dict[str, int | str]:
        """Return the position in the stream and the rows' digests, the same on every rank."""
        return {
            "batches": self._done,
            "rows": len(self._order),
            "seed": self._order.seed,
            "batch_size": self.batch_size,
            "ranks": self._ranks.world,
            **{name: digest for name, digest in self._digests.items() if digest},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken.

        Another batch size or number of ranks is allowed; then some rows of the current epoch can
        come a second time.

        Raises:
            ValueError: The seed is not that of the checkpoint, or the rows are not, and that was
                not accepted.
        """
        if state["seed"] != self._order.seed:
            raise ValueError(
                f"cannot resume: the checkpoint was made with seed={state['seed']} of the train "
                f"data, this run has seed={self._order.seed}, so the order of the rows is another. "
                "Restore the seed, or begin a new run from the exported weights"
            )
        self._check_rows(state)
        then, now = state["batch_size"] * state["ranks"], self.batch_size * self._ranks.world
        epoch, batches = divmod(state["batches"], state["rows"] // then)
        position, again = divmod(batches * then, now)
        self._done = epoch * self._size + min(position, self._size)
        self._resumed = True
        if again:
            logger.warning("the batch size changed: %d rows of this epoch come again", again)

    def _check_rows(self, state: Mapping[str, Any]) -> None:
        change = self._change_since(state)
        if not change:
            return
        if self._accept_changed == "nothing" or (
            change not in (_TOKENS, _BESIDE) and self._accept_changed != "all"
        ):
            raise ValueError(
                f"cannot resume: {change} since the checkpoint was written, so rows would be left "
                "out and others would come twice. Restore what was there, or accept it with "
                "--data.accept_changed_data true: the run then goes on at the same place of the "
                "epoch in the new rows"
            )
        logger.warning("%s since the checkpoint was written; accepted", change)

    def _change_since(self, state: Mapping[str, Any]) -> str:
        """Say what changed since ``state`` was taken; empty if nothing did."""
        if state["rows"] != len(self._order):
            return f"the train data had {state['rows']} usable rows and has {len(self._order)} now"
        changes = {
            "data": f"the train data has changed (still {state['rows']} usable rows, but others)",
            "files": _FILES,
            "tokens": _TOKENS,
            "beside": _BESIDE,
        }
        for name, change in changes.items():
            # checkpoints of earlier versions have no digests, or not all of them
            if state.get(name, self._digests[name]) != self._digests[name]:
                return change
        return ""

    @rank_zero_only
    def _tell_remainder(self) -> None:
        remainder = len(self._order) % (self.batch_size * self._ranks.world)
        if remainder:
            logger.info(
                "an epoch has %d batches; the last %d of its %d rows make no full batch and are "
                "left out, other rows in every epoch",
                self._size,
                remainder,
                len(self._order),
            )


class EvalLoader(Generic[RowT, BatchT]):
    """Every row once and in order, shared out over the ranks.

    All ranks get the same number of batches, so that no rank waits in a collective for another
    that is done; where the rows do not divide, batches are a row shorter or longer.

    Args:
        rows: All rows.
        batch_size: Rows per batch and rank.
        fetching: How rows become batches.
        ranks: This process among all.
        extend: Adds to each batch what goes with its number in the pass.
    """

    def __init__(
        self,
        rows: Sequence[RowT],
        batch_size: int,
        *,
        fetching: Fetching[RowT, BatchT],
        ranks: Ranks,
        extend: Callable[[BatchT, int], BatchT] | None = None,
    ) -> None:
        if len(rows) < ranks.world:
            raise ValueError(
                f"{len(rows)} validation rows cannot be shared out over {ranks.world} ranks: give "
                f"at least {ranks.world} rows, or validate on {len(rows)} rank(s)"
            )
        self._rows = rows
        self.batch_size = batch_size
        self._fetching = fetching
        self._extend = extend
        self._batches = _share_out(len(rows), batch_size, ranks)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[BatchT]:
        for number, batch in enumerate(self._fetching.batches(self._rows, self._batches)):
            yield batch if self._extend is None else self._extend(batch, number)


def _share_out(rows: int, batch_size: int, ranks: Ranks) -> list[list[int]]:
    own = list(range(ranks.rank, rows, ranks.world))
    fewest, most = rows // ranks.world, math.ceil(rows / ranks.world)
    count = min(math.ceil(most / batch_size), fewest)
    if count == math.ceil(fewest / batch_size) == math.ceil(most / batch_size):
        return [own[start : start + batch_size] for start in range(0, len(own), batch_size)]
    edges = [len(own) * index // count for index in range(count + 1)]
    return [own[start:end] for start, end in pairwise(edges)]
