"""Rows and where they come from, and splits without leaks from one to the other."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lrlhf.datamodules.loading.loader import EpochOrder, fingerprint
from lrlhf.datamodules.loading.sources import Component, Entries, Source, entries_of
from lrlhf.datamodules.rows.bad_rows import BadDataError
from lrlhf.run.collectives import Collectives
from lrlhf.secrets import hide

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


Splits = tuple[Split[RowT], Mapping[str, Split[RowT]]]
"""The rows to train on, and those to validate on, by the name of their set."""


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
    notes: Sequence[str] = ()
    """What is to be said of them."""


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
    target = size or round(fraction * len(keys))
    held_out: list[int] = []
    groups = connected_groups(keys)
    for index in np.random.default_rng([seed, len(keys)]).permutation(len(groups)).tolist():
        if len(held_out) + len(groups[index]) <= target:
            held_out += groups[index]
    if not held_out or len(held_out) == len(keys):
        largest = max(map(len, groups), default=0)
        raise BadDataError(
            f"cannot hold out {target} of {len(keys)} rows for validation: they form {len(groups)} "
            f"groups that share a prompt or a text, the largest of {largest} rows, and one split "
            "would be empty. Give `val` data of its own, or another val_size or val_fraction"
        )
    excluded = set(held_out)
    return [row for row in range(len(keys)) if row not in excluded], sorted(held_out)


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


_MOST_NAMED = 3


def described(entries: Entries, split: Split[Any] | None) -> str:
    """Name some sources, with rows and columns once these are known."""
    sources = [entry.source for entry in entries_of(entries, "data")]
    named = [
        source.name if isinstance(source, Source) and split is not None else str(source)
        for source in sources[:_MOST_NAMED]
    ]
    more = len(sources) - _MOST_NAMED
    listed = hide(", ".join(named)) + (f" and {more} more" if more > 0 else "")
    if split is None:
        return listed
    return f"{len(split.rows):,} rows from {listed}; columns: {', '.join(split.columns) or 'none'}"


def refuse_other_rows(trainer: L.Trainer | None, splits: Splits[Any], *, dated: bool) -> None:
    """Stop every rank where one has made other rows: batches would overlap, and rows be left out.

    Raises:
        BadDataError: A rank has other rows, or another order of them.
    """
    if trainer is None or trainer.world_size == 1 or not torch.distributed.is_initialized():
        return
    train, held_out = splits
    parts = (train, *held_out.values())
    own = [fingerprint(split.values, read_files=False) for split in parts]
    # today's date may be in the tokens, and midnight fall between two ranks
    digests = Collectives(trainer).gather([(each.data, not dated and each.tokens) for each in own])
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise BadDataError(
            f"rank {', '.join(map(str, others))} has other rows than rank 0, or another order of "
            "them: every process must make the same (seed what is drawn, sort what comes from a "
            "set or a folder)"
        )
