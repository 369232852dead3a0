"""Which of two candidates is better, for each head."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lrlhf.datamodules.loading.sources import Row
from lrlhf.datamodules.rows.bad_rows import BadRow, missing_column, nearest
from lrlhf.datamodules.rows.columns import is_empty, number_of, structure_of, wrong_type

LABELS = {"a": 1.0, "b": -1.0, "c": 0.0, "equal": 0.0, "tie": 0.0, "same": 0.0}
"""Label texts in lower case; A: candidate 0 is better, B: candidate 1, the others: a tie."""

MISSING = float("nan")


@dataclass(frozen=True)
class LabelReader:
    """Reads one label per head, in the order of ``heads``.

    A head that ``columns`` does not name is looked up in the column ``labels`` (a mapping from
    heads to labels), then in columns called like the head or ``<head>_label``; with one head,
    ``label`` and ``preference`` serve too.
    """

    heads: Sequence[str]
    columns: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for head in self.columns:
            if head not in self.heads:
                raise ValueError(
                    f"label_columns names the head {head!r}{nearest(head, self.heads)}; "
                    f"the heads are {', '.join(self.heads)}"
                )

    def of_candidates(self, row: Row) -> tuple[float, ...]:
        """Read +1, -1 or 0 per head of a row with ``candidate0`` and ``candidate1``; NaN: none."""
        labels = tuple(self._label(row, head) for head in self.heads)
        if all(math.isnan(label) for label in labels):
            problem = missing_column(
                self.columns.get(self.heads[0], "labels"), row, setting="label_columns"
            )
            raise BadRow(
                "no label",
                f"none of the heads {', '.join(self.heads)} is labelled: {problem.detail}",
                remedy="name each head's column in `label_columns`",
            )
        return labels

    def of_chosen(self, row: Row) -> tuple[float, ...]:
        """Read the labels of a row with ``chosen`` and ``rejected``.

        With several heads the column ``head`` says which of them, one name or a list, judged
        chosen better; the others are not labelled.
        """
        named = row.get("head")
        if len(self.heads) == 1 and named is None:
            return (1.0,)
        if named is None:
            raise BadRow(
                "no label",
                f"it says which answer is better, not by which head ({', '.join(self.heads)})",
                remedy="add a column `head` with the head's name, or `columns: {head: …}` to the "
                "source in the list",
            )
        listed = [named] if isinstance(named, str) else named
        if not isinstance(listed, list | tuple):
            raise wrong_type("head", "a head's name or a list of them", named)
        for head in listed:
            if head not in self.heads:
                raise BadRow(
                    "unknown head", f"column 'head' names {head!r}{nearest(str(head), self.heads)}"
                )
        return tuple(1.0 if head in listed else MISSING for head in self.heads)

    def _label(self, row: Row, head: str) -> float:
        if head in self.columns:
            return _label_of(row.get(self.columns[head]), self.columns[head])
        labels = row.get("labels")
        written = isinstance(labels, str) and labels.lstrip().startswith("{")
        if written or isinstance(labels, Mapping):
            labels = structure_of(row, "labels", dict) or {}
            return _label_of(labels.get(head), f"labels[{head}]")
        names = [head, f"{head}_label"]
        if len(self.heads) == 1:
            names += ["labels", "label", "preference"]
        for name in names:
            if row.get(name) is not None:
                return _label_of(row[name], name)
        return MISSING


def _label_of(value: object, column: str) -> float:
    if is_empty(value):
        return MISSING
    key = value.strip().lower() if isinstance(value, str) else None
    if key not in LABELS:
        raise BadRow(
            "unknown label",
            f"column {column!r} is {value!r}",
            remedy="write A (candidate 0 is better), B (candidate 1 is better) or C (equal)",
        )
    return LABELS[key]


@dataclass(frozen=True)
class MarginReader:
    """Reads by how much the better candidate should win.

    Args:
        column: Column with the margin; None: it is not read.
        scores: Columns with the scores of the better and the worse candidate, whose difference is
            the margin of a row that has none in ``column``; None: scores are columns like any.
    """

    column: str | None = "margin"
    scores: tuple[str, str] | None = None

    def __call__(self, row: Row) -> float | None:
        """Return the margin of a row, None where it has none, or raise `BadRow`."""
        margin = None if self.column is None else number_of(row, self.column)
        what = f"column {self.column!r}"
        if margin is None and self.scores is not None:
            better, worse = (self._score(row, name) for name in self.scores)
            margin = better - worse
            what = f"{self.scores[0]} - {self.scores[1]}"
        if margin is not None and margin < 0:
            raise BadRow(
                "negative margin",
                f"{what} is {margin:g}: the better one cannot win by less",
                remedy="see which of the two candidates is the better one",
            )
        return margin

    def _score(self, row: Row, column: str) -> float:
        if column not in row:
            raise missing_column(column, row, setting="score_columns")
        score = number_of(row, column)
        if score is None:
            raise wrong_type(column, "a number", row[column])
        return score
