"""The audit of a data set: every look at it, and what they found together."""

from __future__ import annotations

import io
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from lrlhf.apps.lab.audit.findings import SEVERITIES, FaultKind, Finding, FlaggedRow, Measure
from lrlhf.apps.lab.audit.repeated_rows import IDENTICAL, repeated_rows
from lrlhf.apps.lab.audit.rows import AuditedData, AuditedRow, read_data
from lrlhf.apps.lab.audit.text_faults import languages, text_faults
from lrlhf.apps.lab.page import Cell, Chart, Number, Section, Table, Text, print_page, write_page
from lrlhf.datamodules.core import RowDataModule
from lrlhf.media import MediaError, media_name
from lrlhf.media.decode import check_image
from lrlhf.statistics.intervals import share_interval

_NOTED, _GRAVE = 0.05, 0.15
"""How far from one half a share must be to be a finding, and to be a warning."""


def biases(rows: Sequence[AuditedRow]) -> tuple[list[Finding], list[Measure]]:
    """Measure length bias and position bias of pairs, by the first head that judges.

    Ties, and for the length pairs of equally long answers, do not count. The position is only
    that of candidates in an order that does not tell which is better (``candidate0``,
    ``candidate1``). Of the intervals, pairs of one prompt are a cluster.
    """
    labelled = [(row, row.preferred) for row in rows if row.preferred is not None]
    longer = [
        (row.answer_tokens[better] > row.answer_tokens[1 - better], row.keys)
        for row, better in labelled
        if len(set(row.answer_tokens)) == 2
    ]
    equally_long = len(labelled) - len(longer)
    first = [(better == 0, row.keys) for row, better in labelled if row.unordered]
    findings: list[Finding] = []
    measures: list[Measure] = []
    for name, preferred, pairs, uncounted, meaning, remedy in (
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
        outcomes, prompts = [outcome for outcome, _ in pairs], [keys for _, keys in pairs]
        count, of = sum(outcomes), len(outcomes)
        low, high = share_interval(outcomes, prompts)
        if of:
            share = Measure(f"{preferred} (share)", count / of, low, high, of, "pairs", uncounted)
            measures.append(share)
        if of and not low <= 0.5 <= high and abs(count / of - 0.5) >= _NOTED:
            where = f"In {count / of:.1%} of {of:,} pairs ({low:.1%} to {high:.1%})"
            summary = f"{where} the {preferred.replace('preferred', 'is preferred')}. {meaning}"
            grave = abs(count / of - 0.5) >= _GRAVE
            findings.append(
                Finding(name, "warning" if grave else "note", count, of, summary, remedy, ())
            )
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


UNREADABLE = FaultKind(
    "bad media",
    "error",
    "An image, video or sound is missing, damaged, or does not fit the text; a run leaves the row "
    "out.",
    "Repair or download the files, or leave these rows out.",
)
TINY = FaultKind(
    "tiny images",
    "warning",
    "A side of the image has fewer pixels than a patch of most vision encoders: an icon, or an "
    "address that returned a blank.",
    "Download these images again, or leave the rows out.",
)
HUGE = FaultKind(
    "huge images",
    "note",
    "The image has more than 25 million pixels: reading it takes long, and models scale it down.",
    "Scale such images down beforehand, or set media.max_pixels.",
)
_FEWEST, _MOST = 16, 25_000_000
_THREADS = 8


def media_faults(data: AuditedData) -> list[Finding]:
    """Look at what rows show: at the heads of images, not at their pixels.

    What a run finds unusable as it reads rows (with ``media.check: all`` every pixel) is counted as
    bad media too.
    """
    showing = [row for row in data.rows if any(row.refs)]
    unreadable = [
        FlaggedRow(split, place, problem.detail)
        for split, place, problem in data.bad
        if isinstance(problem, MediaError)
    ]
    with ThreadPoolExecutor(_THREADS) as pool:
        looked_at = pool.map(lambda row: [*_faults(row)], showing)
        flagged = [each for faults in looked_at for each in faults]
    flagged += [(UNREADABLE, row) for row in unreadable]
    of = len(showing) + len(unreadable)
    return [
        finding
        for kind in (UNREADABLE, TINY, HUGE)
        for finding in kind.findings_of((row for own, row in flagged if own is kind), of)
    ]


def _faults(row: AuditedRow) -> Iterator[tuple[FaultKind, FlaggedRow]]:
    for refs in row.refs:
        for image in refs.images:
            try:
                width, height = check_image(image)
            except MediaError as problem:
                yield UNREADABLE, FlaggedRow(row.split, row.place, problem.detail)
                continue
            row_fault = FlaggedRow(row.split, row.place, f"{media_name(image)}: {width} x {height}")
            if min(width, height) < _FEWEST:
                yield TINY, row_fault
            if width * height > _MOST:
                yield HUGE, row_fault


TOO_LONG = "too long"


@dataclass(frozen=True)
class Audit:
    """What is known of a data set."""

    totals: dict[str, int]
    """Rows by split, whether they can be used or not."""
    usable: dict[str, int]
    measures: Sequence[Measure]
    findings: Sequence[Finding]
    """The gravest first, and of these the most frequent."""


def audit(
    data: RowDataModule[Any, Any],
    trainer: object,
    *,
    context: int | None = None,
    new_tokens: int = 0,
) -> Audit:
    """Look for faults in the training and validation data of a run.

    Rows are read as the run reads them: with its tokenizer, chat template, limits and split. Their
    order changes nothing but the order of what is listed.

    Args:
        data: A `PromptDataModule`, `PreferenceDataModule` or `SupervisedDataModule`.
        trainer: Has what the data takes from the module that it is used with, such as a
            ``tokenizer``.
        context: Tokens that the model was made for; None: not known.
        new_tokens: Room that the run leaves for the response to a prompt.

    Raises:
        BadDataError: A source cannot be read, or the data makes no sense as a whole.
        ValueError: The data module is of another kind, or has no tokenizer.
    """
    read = read_data(data, trainer)
    findings = [
        *repeated_rows(read),
        *text_faults(read, context, 0 if read.is_pairs else new_tokens),
        *media_faults(read),
        *_left_out(read),
    ]
    measures = lengths(read.rows)
    looks = [biases] if read.is_pairs else []
    if find_spec("py3langid") is not None:
        looks.append(languages)
    else:
        measures.append(Measure("languages", "not looked at: pip install 'lrlhf[audit]'"))
    for look in looks:
        detected, measured = look(read.rows)
        findings += detected
        measures += measured
    usable = {split: sum(row.split == split for row in read.rows) for split in read.totals}
    findings.sort(key=lambda each: (SEVERITIES.index(each.severity), -each.share, each.name))
    return Audit(read.totals, usable, measures, findings)


def _left_out(data: AuditedData) -> list[Finding]:
    """Return what else a run leaves rows out for, by reason."""
    by_reason: dict[str, list[FlaggedRow]] = defaultdict(list)
    remedies: dict[str, str] = {}
    for split, place, problem in data.bad:
        if problem.reason in (IDENTICAL, "empty text") or isinstance(problem, MediaError):
            continue  # they have findings of their own
        by_reason[problem.reason].append(FlaggedRow(split, place, problem.detail))
        remedies.setdefault(problem.reason, problem.remedy)
    findings = []
    for reason, rows in sorted(by_reason.items()):
        remedy = remedies[reason] or "correct these rows"
        long = reason == TOO_LONG
        kind = FaultKind(
            "left out: too long" if long else f"left out: {reason}",
            "warning" if long else "error",
            "A run leaves these rows out, as they have more tokens than its limit; nothing is "
            "ever cut."
            if long
            else "A run cannot use these rows, and leaves them out.",
            f"{remedy[0].upper()}{remedy[1:]}.",
        )
        findings += kind.findings_of(rows, data.total)
    return findings


_ROWS, _WIDTH = 200, 100
"""Rows of a finding that are listed at most; letters of a line on a terminal."""
_COLUMNS = ("data", "row", "what is seen")


def as_text(audit: Audit) -> str:
    """Return the audit as lines for a terminal, with the first rows of each finding."""
    file = io.StringIO()
    print_page(_sections(audit), Console(file=file, width=_WIDTH, highlight=False))
    return file.getvalue()


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
    return write_page(path, title, _sections(audit))


def _sections(audit: Audit) -> list[Section]:
    counts: list[list[Cell]] = [
        [split, of, audit.usable[split]] for split, of in audit.totals.items()
    ]
    figures: list[list[Cell]] = [
        [each.name, each.value, each.low, each.high, each.of, each.unit, each.uncounted]
        for each in audit.measures
    ]
    findings: list[list[Cell]] = [
        [f.severity, f.name, f.count, f.of, Number(f.share, f"{f.share:.2%}")]
        for f in audit.findings
    ]
    columns = ["figure", "value", "95 % from", "to", "of", "what", "not counted"]
    overview: list[Text | Table | Chart] = [
        Table(["data", "rows", "usable"], counts),
        Table(columns, figures, title="Figures"),
        Table(["severity", "finding", "rows", "of", "share"], findings, title="Findings"),
        *([] if findings else [Text("Nothing was found.")]),
    ]
    return [Section("Overview", overview), *map(_section, audit.findings)]


def _section(finding: Finding) -> Section:
    shown = [[row.split, row.place, row.detail] for row in finding.rows[:_ROWS]]
    more = len(finding.rows) - len(shown)
    note = f"{more:,} more are in the JSON report." if more else ""
    return Section(
        finding.name,
        [
            Text(f"{finding.severity}. {finding.meaning}"),
            Text(f"What to do: {finding.remedy}"),
            *([Table(_COLUMNS, shown, note=note, to_read=True)] if shown else []),
        ],
    )
