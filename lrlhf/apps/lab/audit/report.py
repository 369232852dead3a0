"""An audit as text, as JSON, and as a page."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lrlhf.apps.lab.audit.audit import Audit
from lrlhf.apps.lab.audit.findings import Finding, Measure
from lrlhf.apps.lab.page import Number, Section, Table, Text, write_page

_IN_TEXT, _ON_PAGE = 3, 200
_WIDTH = 100


def as_text(audit: Audit) -> str:
    """Return the audit as lines for a terminal, with the first rows of each finding."""
    return "\n".join(_lines(audit))


def as_json(audit: Audit) -> dict[str, Any]:
    """Return the audit in JSON types, with all rows of each finding."""
    return {
        "rows": audit.totals,
        "usable_rows": audit.usable,
        "measures": [measure._asdict() for measure in audit.measures],
        "findings": [
            {
                **vars(finding),
                "share": finding.share,
                "rows": [row._asdict() for row in finding.rows],
            }
            for finding in audit.findings
        ],
    }


def as_page(audit: Audit, path: str | Path, title: str) -> Path:
    """Write the audit as one HTML file.

    Args:
        audit: What to write.
        path: The ``.html`` file.
        title: Of the page.
    """
    counts: list[list[Any]] = [
        [split, of, audit.usable[split]] for split, of in audit.totals.items()
    ]
    measures: list[list[Any]] = [
        [each.name, each.value, each.low, each.high, each.of, each.unit, each.uncounted]
        for each in audit.measures
    ]
    overview = Section(
        "Overview",
        [
            Table(["data", "rows", "usable"], counts),
            Table(
                ["severity", "finding", "rows", "of", "share"],
                [
                    [f.severity, f.name, f.count, f.of, Number(f.share, f"{f.share:.2%}")]
                    for f in audit.findings
                ],
                title="Findings",
                note="" if audit.findings else "Nothing was found.",
            ),
            Table(
                ["figure", "value", "95 % from", "to", "of", "what", "not counted"],
                measures,
                title="Figures",
            ),
        ],
    )
    return write_page(path, title, [overview, *map(_section, audit.findings)])


def _section(finding: Finding) -> Section:
    shown = finding.rows[:_ON_PAGE]
    parts: list[Text | Table] = [
        Text(f"{finding.severity}, {_how_many(finding)}. {finding.meaning}"),
        Text(f"What to do: {finding.remedy}"),
    ]
    if shown:
        more = len(finding.rows) - len(shown)
        parts.append(
            Table(
                ["data", "row", "what is seen"],
                [[row.split, row.place, row.detail] for row in shown],
                note=f"{more:,} more are in the JSON report." if more else "",
            )
        )
    return Section(finding.name, parts)


def _lines(audit: Audit) -> Iterator[str]:
    for split, total in audit.totals.items():
        yield f"{split:<10} {total:,} rows, {audit.usable[split]:,} can be used"
    yield ""
    for measure in audit.measures:
        yield _line(measure)
    yield ""
    if not audit.findings:
        yield "nothing was found"
    for finding in audit.findings:
        yield f"{finding.severity}: {finding.name}: {_how_many(finding)}"
        for text in (finding.meaning, f"What to do: {finding.remedy}"):
            yield from textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="  ")
        for row in finding.rows[:_IN_TEXT]:
            yield f"    {row.place}: {_short(row.detail)}"
        more = len(finding.rows) - _IN_TEXT
        if more > 0:
            yield f"    and {more:,} more (--json and --html list them)"


def _line(measure: Measure) -> str:
    value = measure.value if isinstance(measure.value, str) else f"{measure.value:,.4g}"
    interval = f" ({measure.low:.3g} to {measure.high:.3g})" if measure.low is not None else ""
    of = "" if measure.of is None else f", of {measure.of:,}"
    if measure.unit:
        of = f" in {measure.of:,} {measure.unit}"
    left_out = f"; not counted: {measure.uncounted}" if measure.uncounted else ""
    return f"{measure.name}: {value}{interval}{of}{left_out}"


def _how_many(finding: Finding) -> str:
    return f"{finding.count:,} of {finding.of:,} ({finding.share:.2%})"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _WIDTH else f"{line[:_WIDTH]}…"
