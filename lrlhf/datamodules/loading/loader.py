"""Loaders that know where they stand, and go on from there after a resume.

They are not ``torch.utils.data.DataLoader``s: Lightning replaces the sampler of those when it
runs on several ranks. They are sized, so Lightning does not fetch a batch ahead of the step, which
would put the saved position one batch too far.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import lightning as L
import numpy as np
from lightning.fabric.utilities.rank_zero import rank_zero_only
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from lrlhf.datamodules.loading.sources import Fetching
from lrlhf.datamodules.rows.media_rows import DeferredMedia
from lrlhf.media import MediaRefs
from lrlhf.media.refs import MediaPart, file_digest
from lrlhf.run.sequence_balancing import partition

_THREADS = 8

_JSON = {str, int, float, bool, type(None), dict, list, tuple}
"""Of these, json makes one line, which takes a tenth of the time of going through them here."""


class Fingerprint(NamedTuple):
    """Digests of all rows in their order."""

    data: str
    """Of what rows hold: texts, columns, labels, and the names of files."""
    tokens: str
    """Of the token ids, which depend on the tokenizer too."""
    files: str
    """Of what is in the files that rows name, such as images: the size of each, and all of it up to
    64 KiB, else four pieces of 16 KiB evenly from its first to its last byte. An image that was
    made anew has another size or, compressed, another end; a change that keeps the size and lies
    between two pieces is not seen. Empty where rows name no file."""


def fingerprint(rows: Iterable[object], *, read_files: bool = True) -> Fingerprint:
    """Digest rows; equal rows in equal order have equal digests, in every process.

    A folder that was moved makes no difference: of a path only the name counts, and the file.
    Without ``read_files`` only the name does.
    """
    digest, files = _Digest(), hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.feed(row)
    if digest.files and read_files:
        with ThreadPoolExecutor(_THREADS) as pool:  # disks of a network answer late
            for content in pool.map(file_digest, digest.files):
                files.update(content or b"missing")
    contents = files.hexdigest() if digest.files and read_files else ""
    return Fingerprint(digest.data.hexdigest(), digest.tokens.hexdigest(), contents)


class _Digest:
    """Goes through the parts of rows."""

    def __init__(self) -> None:
        self.data, self.tokens = (hashlib.blake2b(digest_size=16) for _ in range(2))
        self.files: dict[Path, None] = {}  # in the order in which they are named, each once

    def feed(self, value: Any) -> None:
        if type(value) in _JSON:
            try:
                self.data.update(json.dumps(value, sort_keys=True).encode() + b"\n")
            except (TypeError, ValueError):  # something in it that JSON has no form for
                self._feed_parts(value)
        elif isinstance(value, np.ndarray | Tensor | Image.Image):
            array = np.ascontiguousarray(
                value.detach().cpu() if isinstance(value, Tensor) else value
            )
            if array.dtype == object:  # its bytes are addresses
                self._feed_parts(array.tolist())
                return
            digest = self.tokens if array.dtype == np.int32 else self.data
            digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        elif isinstance(value, bytes | bytearray):
            self.data.update(b"b%d:" % len(value) + value)
        elif isinstance(value, Path):
            self.files[value] = None
            self.feed(value.name)
        else:
            self._feed_parts(value)

    def _feed_parts(self, value: Any) -> None:
        self.data.update(b"(")
        for part in self._parts(value):
            self.feed(part)
        self.data.update(b")")

    def _parts(self, value: Any) -> Iterable[Any]:
        if isinstance(value, Mapping):
            return (part for key in sorted(value, key=str) for part in (str(key), value[key]))
        if isinstance(value, list | tuple):
            return value
        if isinstance(value, set | frozenset):
            return sorted(value, key=str)  # their own order is another in every process
        if isinstance(value, DeferredMedia):
            return (value.refs,)  # its text was made of the row by the chat template
        if isinstance(value, MediaRefs):
            return (_named(entry) for entry in value.everything)
        if is_dataclass(value):
            return (getattr(value, field.name) for field in fields(value) if field.compare)
        # dates and the like; what prints its address would differ in every process
        text = str(value)
        return (type(value).__name__, "" if " at 0x" in text else text)


def _named(media: Any) -> Any:
    """Return an image, video or audio, as a `Path` where it is given by one."""
    if isinstance(media, MediaPart):
        return [_named(media.value), media.options]
    if isinstance(media, Mapping):
        if media.get("array") is not None:
            return [media["array"], media.get("sampling_rate")]
        return media.get("bytes") or _named(media.get("path"))
    if isinstance(media, list | tuple):
        return [_named(entry) for entry in media]
    if isinstance(media, str) and not media.startswith("data:"):
        return Path(media)
    return media


Rows = NDArray[np.int64]


class Order(Protocol):
    """In which order each epoch goes through the rows."""

    @property
    def seed(self) -> int:
        """What the order is a function of; a resumed run must have the same."""
        ...

    def __len__(self) -> int: ...

    def epoch(self, epoch: int) -> Rows:
        """Return the row indices of an epoch in their order."""
        ...


@dataclass(frozen=True)
class EpochOrder:
    """Seeded order of the rows of one or several sources.

    Without weights an epoch holds every row once. With weights an epoch is as long as all sources
    together, and source ``i`` fills the share ``weights[i] / sum(weights)`` of it. Each source
    runs through its own permutations, which go on from one epoch to the next: all of its rows
    come once before any comes again, so a small share loses no rows, it only takes longer.
    """

    members: Sequence[Sequence[int]]
    weights: Sequence[float] | None
    seed: int

    def __len__(self) -> int:
        return sum(map(len, self.members))

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of each source in an epoch: shares rounded by largest remainder."""
        if self.weights is None:
            return tuple(map(len, self.members))
        exact = np.asarray(self.weights) / sum(self.weights) * len(self)
        counts = np.floor(exact).astype(int)
        by_remainder = np.argsort(counts - exact, kind="stable")
        counts[by_remainder[: len(self) - counts.sum()]] += 1
        return tuple(counts.tolist())

    def epoch(self, epoch: int) -> Rows:
        """Return the row indices of an epoch in their order."""
        rows = np.concatenate(
            [
                self._stretch(source, epoch * count, count)
                for source, count in enumerate(self.counts)
            ]
        )
        return rows[np.random.default_rng([self.seed, 0, epoch]).permutation(len(rows))]

    def _stretch(self, source: int, start: int, count: int) -> Rows:
        """Take the stretch of a source's endless sequence of permutations."""
        members = np.asarray(self.members[source], dtype=np.int64)
        size = len(members)
        if count == 0:
            return members[:0]
        passes = range(start // size, (start + count - 1) // size + 1)
        stretch = np.concatenate(
            [
                members[np.random.default_rng([self.seed, 1, source, turn]).permutation(size)]
                for turn in passes
            ]
        )
        offset = start - passes[0] * size
        return stretch[offset : offset + count]


@dataclass(frozen=True)
class CyclicOrder:
    """The rows as they are given, round and round.

    An epoch takes ``per_epoch`` of them; the next one begins with the row after them, so the rows
    that are left over at the end are not always the same.
    """

    size: int
    per_epoch: int
    seed: int
    """Without effect on the order; a resumed run is compared by it."""

    def __len__(self) -> int:
        return self.size

    def epoch(self, epoch: int) -> Rows:
        """Return the row indices of an epoch in their order."""
        return (np.arange(self.size, dtype=np.int64) + epoch * self.per_epoch) % self.size


@dataclass(frozen=True)
class BalancedOrder:
    """Another order, in which the ranks' shares of each batch have about equally many tokens.

    The rows of a batch of all ranks are those of the other order, and so is what an optimizer step
    learns from; only which rank gets which of them is another.
    """

    order: Order
    costs: Sequence[int]
    """Tokens of every row."""
    batch_size: int
    world: int

    @property
    def seed(self) -> int:
        return self.order.seed

    def __len__(self) -> int:
        return len(self.order)

    def epoch(self, epoch: int) -> Rows:
        """Return the row indices of an epoch, where each batch has its first rank's rows first."""
        rows = self.order.epoch(epoch).copy()
        size = self.batch_size * self.world
        for start in range(0, len(rows) - size + 1, size):
            batch = rows[start : start + size]
            shares = partition([self.costs[row] for row in batch], self.world, equal_counts=True)
            rows[start : start + size] = batch[np.concatenate(shares)]
        return rows


logger = logging.getLogger(__name__)

CHANGES = {
    "rows": "the train data had {then} usable rows and has {now} now",
    "data": "the train data has changed (still {now} usable rows, but others)",
    "files": (
        "images or other files that the train rows name have changed (the same names and rows)"
    ),
    "tokens": "the train data has other tokens (other texts, tokenizer or chat template)",
    "beside": "the texts beside the prompts (pretraining) have changed",
}
"""What it means that an entry of the state is not the checkpoint's, the gravest first."""

RowT = TypeVar("RowT")
BatchT = TypeVar("BatchT")


class Companion(Protocol[BatchT]):
    """Adds to each train batch what goes with its number in the stream."""

    @property
    def rows(self) -> Sequence[object]:
        """What it takes that from; a resumed run must have the same."""
        ...

    def __call__(self, batch: BatchT, number: int) -> BatchT:
        """Return batch number ``number`` with what goes with it."""
        ...


@dataclass(frozen=True)
class Ranks:
    """Which share of each batch is this process's."""

    rank: int = 0
    world: int = 1


class TrainLoader(Generic[RowT, BatchT]):
    """Train batches of one rank, as an endless stream cut into passes over an epoch.

    Batch ``s`` of the stream is a pure function of the seed and ``s``; the state is ``s``. Rows
    left over at the end of an epoch, fewer than one batch of all ranks, are left out of that
    epoch: others in each epoch, as rows are shuffled anew.

    Args:
        rows: All rows.
        order: Their order in each epoch.
        batch_size: Rows per batch and rank.
        fetching: How rows become batches.
        ranks: This process among all.
        pass_limit: Lightning's ``limit_train_batches``: a number of batches, or a share of the
            epoch. The next pass goes on where this one ended.
        companion: Adds to each batch what goes with its number in the stream.
        accept_changed: Which of `CHANGES` since the checkpoint do not stop a resumed run, but are
            logged.
    """

    draws_epochs = True
    """Whether an epoch has each row once, but for those that make no full batch."""

    def __init__(
        self,
        rows: Sequence[RowT],
        order: Order,
        batch_size: int,
        *,
        fetching: Fetching[RowT, BatchT],
        ranks: Ranks,
        pass_limit: int | float = 1.0,
        companion: Companion[BatchT] | None = None,
        accept_changed: Sequence[str] = (),
    ) -> None:
        self._rows = rows
        self._order = order
        self._accept_changed = accept_changed
        self.batch_size = batch_size
        self._fetching = fetching
        self._ranks = ranks
        self._companion = companion
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
        remainder = len(order) % (batch_size * ranks.world)
        if remainder and self.draws_epochs:
            rank_zero_only(logger.info)(
                "an epoch has %d batches; the last %d of its %d rows make no full batch and are "
                "left out, other rows in every epoch",
                self._size,
                remainder,
                len(order),
            )

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[BatchT]:
        """Go through one pass, or through what is left of it after a resume."""
        left = self._per_pass - self._done % self._per_pass if self._resumed else self._per_pass
        self._resumed = False
        while left:
            batches = self._rest_of_epoch(self._done)[:left]
            for batch in self._fetching.batches(self._rows, batches):
                number = self._done
                self._done += 1  # before the step: a checkpoint within it counts this batch
                left -= 1
                yield batch if self._companion is None else self._companion(batch, number)

    def upcoming(self, skip: int = 0) -> BatchT:
        """Return the batch after the next ``skip`` ones, and leave the position where it is."""
        number = self._done + skip
        batch = self._fetching.batch(self._rows, self._rest_of_epoch(number)[0])
        return batch if self._companion is None else self._companion(batch, number)

    def _rest_of_epoch(self, number: int) -> list[list[int]]:
        """Return the rows of batch ``number`` of the stream, and of those behind it."""
        epoch, first = divmod(number, self._size)
        order = self._order.epoch(epoch)
        own, all_ranks = self.batch_size, self.batch_size * self._ranks.world
        starts = [index * all_ranks + self._ranks.rank * own for index in range(first, self._size)]
        return [order[start : start + own].tolist() for start in starts]

    @cached_property
    def _digests(self) -> dict[str, str]:
        digests = fingerprint(self._rows)._asdict()
        if self._companion is not None:
            digests["beside"] = "-".join(fingerprint(self._companion.rows))
        return {name: digest for name, digest in digests.items() if digest}

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream and the rows' digests, the same on every rank."""
        return {
            "batches": self._done,
            "rows": len(self._order),
            "seed": self._order.seed,
            "batch_size": self.batch_size,
            "ranks": self._ranks.world,
            **self._digests,
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
        own = {"rows": len(self._order), **self._digests}
        # a checkpoint without texts beside the prompts, or files, says nothing about them
        changed = [name for name in CHANGES if name in state and state[name] != own.get(name)]
        if not changed:
            return
        change = CHANGES[changed[0]].format(then=state["rows"], now=len(self._order))
        if changed[0] not in self._accept_changed:
            raise ValueError(
                f"cannot resume: {change} since the checkpoint was written, so rows would be left "
                "out and others would come twice. Restore what was there, or accept it with "
                "--data.accept_changed_data true: the run then goes on at the same place of the "
                "epoch in the new rows"
            )
        logger.warning("%s since the checkpoint was written; accepted", change)


class EvalLoader(Generic[RowT, BatchT]):
    """Every row once and in order, shared out over the ranks; arguments as of `TrainLoader`.

    All ranks get the same number of batches, so that no rank waits in a collective for another
    that is done; where the rows do not divide, batches are a row shorter or longer.
    """

    def __init__(
        self,
        rows: Sequence[RowT],
        batch_size: int,
        *,
        fetching: Fetching[RowT, BatchT],
        ranks: Ranks,
        companion: Companion[BatchT] | None = None,
    ) -> None:
        if len(rows) < ranks.world:
            raise ValueError(
                f"{len(rows)} validation rows cannot be shared out over {ranks.world} ranks: give "
                f"at least {ranks.world} rows, or validate on {len(rows)} rank(s)"
            )
        self._rows = rows
        self.batch_size = batch_size
        self._fetching = fetching
        self._companion = companion
        self._batches = _share_out(len(rows), batch_size, ranks)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[BatchT]:
        for number, batch in enumerate(self._fetching.batches(self._rows, self._batches)):
            yield batch if self._companion is None else self._companion(batch, number)


def _share_out(rows: int, batch_size: int, ranks: Ranks) -> list[list[int]]:
    own = list(range(ranks.rank, rows, ranks.world))
    fewest, most = rows // ranks.world, math.ceil(rows / ranks.world)
    count = min(math.ceil(most / batch_size), fewest)
    if count == math.ceil(fewest / batch_size) == math.ceil(most / batch_size):
        return [own[start : start + batch_size] for start in range(0, len(own), batch_size)]
    edges = [len(own) * index // count for index in range(count + 1)]
    return [own[start:end] for start, end in pairwise(edges)]


def data_ranks(trainer: L.Trainer | None) -> Ranks:
    """Return which share of the data this process gets.

    Processes that share one model (tensor parallel) share their data too, which the strategy's
    own sampler arguments say.
    """
    arguments = trainer.distributed_sampler_kwargs if trainer is not None else None
    if not arguments:
        return Ranks()
    return Ranks(rank=arguments["rank"], world=arguments["num_replicas"])
