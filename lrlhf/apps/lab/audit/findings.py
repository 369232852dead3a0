"""What an audit has found: how grave, how often, what it means, what to do, and which rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""The gravest first."""


class FlaggedRow(NamedTuple):
    """A row that has what was found."""

    split: str
    """``train`` or ``validation``."""
    place: str
    """Source and row number, such as ``pairs.jsonl:17``."""
    detail: str
    """What is wrong with this one."""


@dataclass(frozen=True)
class Finding:
    """One kind of fault."""

    name: str
    severity: Severity
    """``error``: such rows harm the run or its evaluation. ``warning``: they probably do.
    ``note``: good to know."""
    count: int
    """How many rows have it; of a bias, how many pairs show it."""
    of: int
    """How many rows could have had it."""
    meaning: str
    remedy: str
    rows: Sequence[FlaggedRow]
    """All of them, in the order of the data; none of a bias."""

    @property
    def share(self) -> float:
        """Part of the rows that could have had it."""
        return self.count / self.of if self.of else 0.0


def _place(row: FlaggedRow) -> tuple[str, str, int]:
    """Sort rows as they stand in the data."""
    source, _, number = row.place.rpartition(":")
    return row.split, source, int(number) if number.isdigit() else 0


class FaultKind(NamedTuple):
    """What is said of a kind of fault wherever it is found."""

    name: str
    severity: Severity
    meaning: str
    remedy: str

    def findings_of(self, rows: Iterable[FlaggedRow], of: int) -> list[Finding]:
        """Return the finding, or nothing where no row has the fault.

        Args:
            rows: The rows that have it; one that is named twice counts once.
            of: Rows that could have had it.
        """
        first: dict[tuple[str, str], FlaggedRow] = {}
        for row in rows:
            first.setdefault((row.split, row.place), row)
        if not first:
            return []
        ordered = sorted(first.values(), key=_place)
        return [
            Finding(self.name, self.severity, len(first), of, self.meaning, self.remedy, ordered)
        ]


class Measure(NamedTuple):
    """A figure that is reported whether it is conspicuous or not."""

    name: str
    value: float | int | str
    low: float | None = None
    """Lower end of the 95 % interval; None: it has none."""
    high: float | None = None
    of: int | None = None
    """How many rows or pairs it is of."""
    unit: str = ""
    """What they are, where the name does not say it."""
    uncounted: str = ""
    """What was left out of them."""
