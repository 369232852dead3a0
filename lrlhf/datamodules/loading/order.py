"""In which order an epoch goes through the rows: a pure function of seed and epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lrlhf.rollout.balance import partition

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
class GivenOrder:
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
        """Of the other order."""
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
