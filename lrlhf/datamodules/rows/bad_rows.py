"""Rows that cannot be used: counted by reason, logged once, and too many of them stop the run."""

from __future__ import annotations

import difflib
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lightning.fabric.utilities.rank_zero import rank_zero_only

from lrlhf.media import BadRow

__all__ = [
    "BadDataError",
    "BadRow",
    "BadRows",
    "Unused",
    "missing_column",
    "nearest",
    "unused_notes",
]

logger = logging.getLogger(__name__)

MAX_EXAMPLES = 5


class BadDataError(ValueError):
    """The data as a whole cannot be used; the message names rows and says what to do."""


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the candidate closest to ``word``, else nothing."""
    close = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def missing_column(column: str, columns: Iterable[str], *, setting: str = "") -> BadRow:
    """Describe a row that has nothing in ``column``, which the user names in ``setting``."""
    names = sorted(columns)
    lacks = f"no column {column!r}{nearest(column, names)} (columns: {', '.join(names) or 'none'})"
    return BadRow(
        "missing column",
        f"column {column!r} has no value" if column in names else lacks,
        remedy=f"name the right column in `{setting}`" if setting else "",
    )


class Unused(NamedTuple):
    """Values of usable rows that reach nothing."""

    name: str
    remedy: str


class BadRows:
    """Counts rows of the ``what`` data, such as ``train``, by what is wrong with them."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.total = 0
        self.notes: Sequence[str] = ()
        """What else is to be said of them."""
        self.unused: Counter[Unused] = Counter()
        """Usable rows by what of them reaches nothing."""
        self._counts: Counter[str] = Counter()
        self._examples: dict[str, list[str]] = {}
        self._remedies: dict[str, str] = {}

    def add(self, location: str, problem: BadRow) -> None:
        """Count one bad row; ``location`` is its file and row number."""
        self._counts[problem.reason] += 1
        examples = self._examples.setdefault(problem.reason, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(f"{location}: {problem.detail}")
        if problem.remedy:
            self._remedies.setdefault(problem.reason, problem.remedy)

    @property
    def count(self) -> int:
        """Bad rows of all reasons."""
        return self._counts.total()

    def table(self) -> str:
        """List the reasons with their counts and the first rows of each."""
        lines = ["   rows  reason"]
        for reason, count in self._counts.most_common():
            lines.append(f"{count:7d}  {reason}")
            lines += [f"         - {example}" for example in self._examples[reason]]
        return "\n".join(lines)

    def check(self, max_fraction: float) -> None:
        """Report the bad rows once, or raise `BadDataError` if too many are bad or none is left."""
        self.refuse(max_fraction)
        if self.count:
            head = f"{self._head} and are left out"
            rank_zero_only(logger.warning)("%s:\n%s", head, self.table())
        else:
            message = "all %d rows of the %s data can be used"
            rank_zero_only(logger.info)(message, self.total, self.what)
        for note in self.notes:
            rank_zero_only(logger.warning)("%s data: %s", self.what, note)

    def refuse(self, max_fraction: float) -> None:
        """Raise `BadDataError` if too many rows are bad or none is left."""
        share = self.count / self.total
        head = self._head
        if self.count == self.total:
            alike = f": {next(iter(self._counts))}" if len(self._counts) == 1 else ""
            raise BadDataError(f"no usable rows: {head}{alike}.\n{self.table()}\n{self._advice()}")
        if share > max_fraction:
            enough = math.ceil(share * 1e4) / 1e4
            raise BadDataError(
                f"{head}: {share:.2%}, more than max_bad_fraction={max_fraction:g}.\n"
                f"{self.table()}\n{self._advice()}"
                f"Or raise max_bad_fraction to {enough:g} or more to leave these rows out."
            )

    @property
    def _head(self) -> str:
        return f"{self.count} of {self.total} rows of the {self.what} data cannot be used"

    def _advice(self) -> str:
        remedies = list(dict.fromkeys(self._remedies.values()))
        return f"To do: {'; '.join([*remedies, 'correct these rows'])}.\n"


def unused_notes(unused: Mapping[Unused, int]) -> Iterator[str]:
    """Yield a line for each count of rows and remedy, with the values that are lost of them."""
    together: dict[tuple[str, int], list[str]] = {}
    for value, rows in unused.items():
        together.setdefault((value.remedy, rows), []).append(value.name)
    for (remedy, rows), names in together.items():
        yield (
            f"neither the model nor the task reads {', '.join(names)} of {rows} "
            f"{'row' if rows == 1 else 'rows'}: {remedy}"
        )
