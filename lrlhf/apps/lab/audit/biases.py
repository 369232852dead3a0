"""Whether the better answer is the longer one, or the first one, more often than by chance."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from lrlhf.apps.lab.audit.findings import Finding, Measure, Severity
from lrlhf.apps.lab.audit.rows import AuditedRow
from lrlhf.statistics.proportions import share_interval

_NOTED, _GRAVE = 0.05, 0.15
"""How far from one half a share must be to be a finding, and to be a warning."""


def biases(rows: Sequence[AuditedRow]) -> tuple[list[Finding], list[Measure]]:
    """Measure length bias and position bias of pairs, by the first head that judges.

    Ties, and for the length pairs of equally long answers, do not count. The position is only
    that of candidates in an order that does not tell which is better (``candidate0``,
    ``candidate1``). Of the intervals, pairs of one prompt are a cluster.
    """
    judged = [(row, row.preferred) for row in rows if row.preferred is not None]
    longer = [
        (row.answer_tokens[better] > row.answer_tokens[1 - better], row.keys)
        for row, better in judged
        if len(set(row.answer_tokens)) == 2
    ]
    equally_long = len(judged) - len(longer)
    first = [(better == 0, row.keys) for row, better in judged if row.unordered]
    findings: list[Finding] = []
    measures: list[Measure] = []
    for name, preferred, found, uncounted, meaning, remedy in (
        (
            "length bias",
            "longer answer preferred",
            longer,
            f"{equally_long:,} with answers of equal length" if equally_long else "",
            "A reward model may learn the length instead of what makes answers good.",
            "Compare answers of equal length, balance the pairs, or watch the correlation of "
            "scores and length; right where longer answers are better.",
        ),
        (
            "position bias",
            "first answer preferred",
            first,
            "",
            "Whoever judged looked at the place of an answer too, or the order was not random.",
            "Judge each pair in both orders, or shuffle the candidates before they are judged.",
        ),
    ):
        outcomes, prompts = [one for one, _ in found], [keys for _, keys in found]
        count, of = sum(outcomes), len(outcomes)
        low, high = share_interval(outcomes, prompts)
        if of:
            share = Measure(f"{preferred} (share)", count / of, low, high, of, "pairs", uncounted)
            measures.append(share)
        if of and not low <= 0.5 <= high and abs(count / of - 0.5) >= _NOTED:
            severity: Severity = "warning" if abs(count / of - 0.5) >= _GRAVE else "note"
            where = f"In {count / of:.1%} of {of:,} pairs ({low:.1%} to {high:.1%})"
            said = f"{where} the {preferred.replace('preferred', 'is preferred')}. {meaning}"
            findings.append(Finding(name, severity, count, of, said, remedy, ()))
    return findings, measures


def lengths(rows: Sequence[AuditedRow]) -> list[Measure]:
    """Return the median and the largest number of tokens, of rows and of answers."""
    measures = []
    for what, unit, counts in (
        # a pair has two texts
        ("tokens of a row", "texts", [count for row in rows for count in row.tokens]),
        ("tokens of an answer", "answers", [count for row in rows for count in row.answer_tokens]),
    ):
        of = len(counts)
        if counts:
            middle = statistics.median(counts)
            measures.append(Measure(f"{what}, median", middle, of=of, unit=unit))
            measures.append(Measure(f"{what}, most", max(counts), of=of, unit=unit))
    return measures
