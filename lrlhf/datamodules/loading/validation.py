"""Validation sets: data of their own, each with a name, or some of the train rows."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeGuard, TypeVar

from lightning.fabric.utilities.rank_zero import rank_zero_only

from lrlhf.datamodules.loading.files import is_data_file
from lrlhf.datamodules.loading.python_rows import is_table
from lrlhf.datamodules.loading.sources import Data, Source, Weighted, components_of, entries_of
from lrlhf.datamodules.loading.splits import Split, Splits, hold_out
from lrlhf.datamodules.rows.bad_rows import BadDataError

logger = logging.getLogger(__name__)

RowT = TypeVar("RowT")
_NAME = re.compile(r"(?!t\d)\w[\w.@:=-]*")


@dataclass(frozen=True)
class ValidationSet:
    """One of several validation sets, where its rows are read otherwise than the train rows.

    Args:
        source: As ``val`` takes it for a single set.
        options: Options of the data module that say how a row is read, in place of the data
            module's: ``{prompt_column: question}``.
    """

    source: Data
    options: dict[str, Any] = field(default_factory=dict)


Validation = Data | dict[str, Data | ValidationSet]
"""What ``val`` of a data module takes: one set, or several by their names."""


class NamedSet(NamedTuple):
    """A validation set under its name; empty: the only one, which was given none."""

    name: str
    entries: list[Weighted]
    options: Mapping[str, Any]

    @property
    def what(self) -> str:
        """What messages call its data."""
        return title_of(self.name)


def title_of(name: str) -> str:
    """Return what messages call the data of a validation set."""
    return f"{name} validation" if name else "validation"


def is_named(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Tell names of sets from names of columns: a column holds texts, numbers or dialogues."""
    return type(value) is dict and len(value) > 0 and all(map(_holds_rows, value.values()))


def _holds_rows(value: object) -> bool:
    if isinstance(value, list | tuple):
        first = value[0] if value else None
        is_file = isinstance(first, str) and is_data_file(Path(first))
        return is_file or isinstance(first, Path | Source | Weighted | Mapping)
    is_source = isinstance(value, str | Path | Source | Weighted | ValidationSet | Mapping)
    return is_source or is_table(value)


def named_sets(validation: Validation | None) -> list[NamedSet]:
    """List the validation sets of what a user gave as ``val``.

    Raises:
        ValueError: A name cannot be a part of a metric's.
    """
    if validation is None:
        return []
    if not is_named(validation):
        return [NamedSet("", entries_of(validation, "val"), {})]
    sets = []
    for name, one in validation.items():
        if not _NAME.fullmatch(str(name)) or name in ("class_path", "init_args"):
            raise ValueError(
                f"val: {name!r} cannot name a validation set: a name is one word without slashes, "
                "and t0.7 is that of a temperature"
            )
        source, options = one, {}
        if isinstance(one, ValidationSet):
            source, options = one.source, one.options
        sets.append(NamedSet(str(name), entries_of(source, f"val.{name}"), options))
    return sets


@dataclass(frozen=True)
class ValidationData(Generic[RowT]):
    """Where the validation rows come from: data of its own, or some of the train rows."""

    sets: list[NamedSet]
    size: int = 0
    fraction: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        settings = {"val": self.sets, "val_size": self.size, "val_fraction": self.fraction}
        chosen = [name for name, value in settings.items() if value]
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} are given: give only one of them")
        if not 0 <= self.fraction < 1 or self.size < 0:
            raise ValueError(
                f"val_fraction={self.fraction}, val_size={self.size}: the fraction lies in 0…1, "
                "the size is 0 or more"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Of the sets, empty for one without a name; none: there is nothing to validate on."""
        own_names = ("",) if self.size > 0 or self.fraction > 0 else ()
        return tuple(named_set.name for named_set in self.sets) or own_names

    def described(
        self, held_out: Mapping[str, Split[RowT]], describe: Callable[..., str]
    ) -> Iterator[str]:
        """Say in a line what each set is, once it is loaded with its rows."""
        for named_set in self.sets:
            name = f" {named_set.name}" if named_set.name else ""
            yield f"val{name}: {describe(named_set.entries, held_out.get(named_set.name))}"
        if self.names and not self.sets:
            count = (
                f"{len(held_out[''].rows):,}" if held_out else self.size or f"{self.fraction:.2%}"
            )
            yield f"val: {count} of the train rows, held out"

    def load(
        self,
        train: Split[RowT],
        load: Callable[[NamedSet], Split[RowT]],
        keys: Callable[[RowT], Iterable[str]],
    ) -> Splits[RowT]:
        """Hold rows out of the train data by what they must not share, or load data of its own."""
        if not self.sets:
            return self._hold_out(train, keys) if self.names else (train, {})
        held_out = {}
        for named_set in self.sets:
            if any(part.weight is not None for part in components_of(named_set.entries)):
                raise ValueError(
                    "val: validation takes every row once, so its sources have no weights"
                )
            held_out[named_set.name] = load(named_set)
        seen = {key for row in train.values for key in keys(row)}
        for each in self.sets:
            own = held_out[each.name].values
            shared = sum(not seen.isdisjoint(keys(row)) for row in own)
            if shared:
                logger.warning(
                    "%d of %d %s rows share a prompt or a text with the train data: their "
                    "results say less than they seem to",
                    shared,
                    len(own),
                    each.what,
                )
        return train, held_out

    def _hold_out(self, train: Split[RowT], keys: Callable[[RowT], Iterable[str]]) -> Splits[RowT]:
        split = hold_out(
            [keys(row) for row in train.values],
            size=self.size,
            fraction=self.fraction,
            seed=self.seed,
        )
        kept, held_out = (replace(train, rows=[train.rows[k] for k in rows]) for rows in split)
        rank_zero_only(logger.info)(
            "held out %d of %d rows for validation", len(held_out.rows), len(train.rows)
        )
        return kept, {"": held_out}


def check_options(sets: Iterable[NamedSet], known: Mapping[str, object], owner: str) -> None:
    """Refuse options of single sets that say nothing of how a row is read.

    Raises:
        ValueError: There is one; names those that there are.
    """
    for named_set in sets:
        if unknown := sorted(set(named_set.options) - set(known)):
            raise BadDataError(
                f"val.{named_set.name}.options: {owner} has no option {unknown[0]!r} that a single "
                f"set may change; there are {', '.join(known) or 'none'}"
            )
