"""The train and the validation split of a data set, without leaks from one to the other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lrlhf.datamodules.loading.order import EpochOrder
from lrlhf.datamodules.loading.sources import Component, Entries, components_of
from lrlhf.datamodules.rows.bad_rows import BadDataError

logger = logging.getLogger(__name__)

RowT = TypeVar("RowT")


class Located(NamedTuple, Generic[RowT]):
    """A row, or what becomes one, and where it comes from."""

    component: int
    """Index of the entry of the mixture."""
    place: str
    """Source and row number, such as ``train.jsonl:17``."""
    value: RowT


@dataclass(frozen=True)
class Split(Generic[RowT]):
    """Usable rows, and the entries that they came from."""

    components: Sequence[Component]
    rows: Sequence[Located[RowT]]
    columns: tuple[str, ...] = ()
    """Names of the columns that any row of the data has, whether it can be used or not."""

    @property
    def values(self) -> list[RowT]:
        """The rows without their places."""
        return [row.value for row in self.rows]

    def order(self, seed: int) -> EpochOrder:
        """Return the order in which epochs go through the rows.

        Raises:
            BadDataError: A source has a weight and no usable rows.
        """
        members: list[list[int]] = [[] for _ in self.components]
        for index, row in enumerate(self.rows):
            members[row.component].append(index)
        weights = [part.weight for part in self.components if part.weight is not None]
        if not weights:
            return EpochOrder(members, None, seed)
        for part, rows in zip(self.components, members, strict=True):
            if not rows:
                raise BadDataError(
                    f"{part.name} has weight {part.weight:g} and no usable train row"
                )
        order = EpochOrder(members, weights, seed)
        shares = (
            f"{part.name} ({len(rows)} rows: {count / len(order):.1%} of it, "
            f"{count / len(rows):.2f} passes)"
            for part, rows, count in zip(self.components, members, order.counts, strict=True)
        )
        rank_zero_only(logger.info)("an epoch is mixed from %s", ", ".join(shares))
        return order


Splits = tuple[Split[RowT], Split[RowT] | None]
"""The rows to train on, and those to validate on."""


class FirstRows(NamedTuple, Generic[RowT]):
    """The first rows of the train or the validation data."""

    what: str
    """What messages call the data, such as ``train``."""
    rows: Sequence[RowT]
    """Those that can be used."""
    seen: int
    """How many were read."""
    complete: bool
    """Whether these are all that there are."""


@dataclass(frozen=True)
class ValidationData(Generic[RowT]):
    """Where the validation rows come from: data of its own, or some of the train rows."""

    val: Entries | None = None
    size: int = 0
    fraction: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        settings = {"val": self.val, "val_size": self.size, "val_fraction": self.fraction}
        given = [name for name, value in settings.items() if value]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given: give only one of them")
        if not 0 <= self.fraction < 1 or self.size < 0:
            raise ValueError(
                f"val_fraction={self.fraction}, val_size={self.size}: the fraction lies in 0…1, "
                "the size is 0 or more"
            )

    @property
    def any(self) -> bool:
        """Whether there are to be validation rows."""
        return self.val is not None or self.size > 0 or self.fraction > 0

    def load(
        self,
        train: Split[RowT],
        load: Callable[[Entries, str], Split[RowT]],
        keys: Callable[[RowT], Iterable[str]],
    ) -> Splits[RowT]:
        """Hold rows out of the train data by what they must not share, or load data of its own."""
        if not self.any:
            return train, None
        if self.val is None:
            return self._hold_out(train, keys)
        if any(part.weight is not None for part in components_of(self.val)):
            raise ValueError("val: validation takes every row once, so its sources have no weights")
        own = load(self.val, "validation")
        seen = {key for row in train.values for key in keys(row)}
        shared = sum(not seen.isdisjoint(keys(row)) for row in own.values)
        if shared:
            logger.warning(
                "%d of %d validation rows share a prompt or a text with the train data: their "
                "results say less than they seem to",
                shared,
                len(own.rows),
            )
        return train, own

    def _hold_out(self, train: Split[RowT], keys: Callable[[RowT], Iterable[str]]) -> Splits[RowT]:
        split = hold_out(
            [keys(row) for row in train.values],
            size=self.size,
            fraction=self.fraction,
            seed=self.seed,
        )
        kept, held = (replace(train, rows=[train.rows[row] for row in rows]) for rows in split)
        rank_zero_only(logger.info)(
            "held out %d of %d rows for validation", len(held.rows), len(train.rows)
        )
        return kept, held


def hold_out(
    keys: Sequence[Iterable[Hashable]], *, size: int = 0, fraction: float = 0.0, seed: int
) -> tuple[list[int], list[int]]:
    """Hold ``size`` rows, or a ``fraction`` of them, out so that no key is in both splits.

    Groups of rows that share keys stay together, so that the held-out split can come out somewhat
    smaller.

    Returns:
        Indices of the train and of the held-out rows, each in the order of the data.

    Raises:
        BadDataError: One of the splits would be empty.
    """
    wanted = size or round(fraction * len(keys))
    held: list[int] = []
    groups = connected_groups(keys)
    for index in np.random.default_rng([seed, len(keys)]).permutation(len(groups)).tolist():
        if len(held) + len(groups[index]) <= wanted:
            held += groups[index]
    if not held or len(held) == len(keys):
        largest = max(map(len, groups), default=0)
        raise BadDataError(
            f"cannot hold out {wanted} of {len(keys)} rows for validation: they form {len(groups)} "
            f"groups that share a prompt or a text, the largest of {largest} rows, and one split "
            "would be empty. Give `val` data of its own, or another val_size or val_fraction"
        )
    kept = set(held)
    return [row for row in range(len(keys)) if row not in kept], sorted(held)


def connected_groups(keys: Sequence[Iterable[Hashable]]) -> list[list[int]]:
    """Group the indices of rows that share a key, directly or through other rows."""
    leader = list(range(len(keys)))

    def find(row: int) -> int:
        while leader[row] != row:
            leader[row] = leader[leader[row]]
            row = leader[row]
        return row

    first_with: dict[Hashable, int] = {}
    for row, own in enumerate(keys):
        for key in own:
            low, high = sorted((find(row), find(first_with.setdefault(key, row))))
            leader[high] = low
    groups: dict[int, list[int]] = {}
    for row in range(len(keys)):
        groups.setdefault(find(row), []).append(row)
    return list(groups.values())
