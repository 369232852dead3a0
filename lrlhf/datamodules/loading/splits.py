"""The train and the validation side of a data set."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from lightning.fabric.utilities.rank_zero import rank_zero_only

from lrlhf.datamodules.loading.order import EpochOrder
from lrlhf.datamodules.loading.sources import Component, Entries, Row, components_of
from lrlhf.datamodules.loading.splitting import hold_out
from lrlhf.datamodules.rows.bad_rows import BadDataError, BadRow, BadRows
from lrlhf.datamodules.rows.parsed_rows import Placed, keep_good, read_rows

logger = logging.getLogger(__name__)

DraftT = TypeVar("DraftT")
RowT = TypeVar("RowT")


@dataclass(frozen=True)
class Side(Generic[RowT]):
    """Usable rows, and the entries that they came from."""

    components: Sequence[Component]
    rows: Sequence[Placed[RowT]]

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
        _tell("an epoch is mixed from\n%s", order.table([part.name for part in self.components]))
        return order


class Sides(NamedTuple, Generic[RowT]):
    """Both sides of the data."""

    train: Side[RowT]
    validation: Side[RowT] | None


@dataclass(frozen=True)
class Split:
    """Where the validation rows come from.

    Args:
        val: Data of its own, or
        size: this number of the train rows, or
        fraction: this share of them.
        seed: Which rows are held out.
    """

    val: Entries | None
    size: int
    fraction: float
    seed: int

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
        return self.val is not None or self.wanted

    @property
    def wanted(self) -> bool:
        """Whether train rows are to be held out."""
        return self.size > 0 or self.fraction > 0


@dataclass(frozen=True)
class Preparation(Generic[DraftT, RowT]):
    """How rows of one kind come to be.

    Args:
        parse: Reads one row, given the folder of its file, or raises `BadRow`.
        finish: Tokenises many rows at once; a `BadRow` stands for one that cannot be used.
        keys: What a row must not share with a row of the other side.
        check: Refuses rows that are good one by one and make no sense together.
        max_bad_fraction: Largest share of bad rows to go on with.
    """

    parse: Callable[[Row, Path | None], DraftT]
    finish: Callable[[Sequence[DraftT]], Sequence[RowT | BadRow]]
    keys: Callable[[RowT], tuple[str, ...]]
    check: Callable[[Side[RowT], str], Side[RowT]]
    max_bad_fraction: float

    def load(self, entries: Entries, what: str) -> Side[RowT]:
        """Load every source; bad rows are counted and told.

        Raises:
            BadDataError: Too many rows are bad.
        """
        components = components_of(entries)
        bad_rows = BadRows(what)
        drafts = read_rows(components, self.parse, bad_rows)
        rows = keep_good(drafts, self.finish([draft.value for draft in drafts]), bad_rows)
        if bad_rows.total == 0:
            names = ", ".join(component.name for component in components)
            raise BadDataError(f"the {what} data is empty: no rows in {names}")
        bad_rows.check(self.max_bad_fraction)
        return self.check(Side(components, rows), what)

    def load_sides(self, train: Entries, split: Split) -> Sides[RowT]:
        """Load the train data, and the validation data if there is to be any."""
        side = self.load(train, "train")
        if split.val is not None:
            return Sides(side, self._load_validation(split.val, side))
        return self._hold_out(side, split) if split.wanted else Sides(side, None)

    def _load_validation(self, entries: Entries, train: Side[RowT]) -> Side[RowT]:
        """Load validation data of its own, and tell how much of it is also train data."""
        if any(part.weight is not None for part in components_of(entries)):
            raise ValueError("val: validation takes every row once, so its sources have no weights")
        side = self.load(entries, "validation")
        seen = {key for row in train.rows for key in self.keys(row.value)}
        shared = sum(not seen.isdisjoint(self.keys(row.value)) for row in side.rows)
        if shared:
            logger.warning(
                "%d of %d validation rows share a prompt or a text with the train data: their "
                "results say less than they seem to",
                shared,
                len(side.rows),
            )
        return side

    def _hold_out(self, side: Side[RowT], split: Split) -> Sides[RowT]:
        keys = [self.keys(row.value) for row in side.rows]
        train, held = hold_out(keys, size=split.size, fraction=split.fraction, seed=split.seed)
        _tell("held out %d of %d rows for validation", len(held), len(keys))
        return Sides(
            Side(side.components, [side.rows[row] for row in train]),
            Side(side.components, [side.rows[row] for row in held]),
        )


def prepare_sources(*entries: Entries | None) -> None:
    """Let every source download or compute what it needs."""
    for given in entries:
        for component in components_of(given) if given is not None else ():
            for source in component.sources:
                source.prepare()


@rank_zero_only
def _tell(message: str, *arguments: object) -> None:
    logger.info(message, *arguments)
