"""The audit of a data set: every look at it, and what they found together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from lrlhf.apps.lab.audit.biases import biases, lengths
from lrlhf.apps.lab.audit.findings import SEVERITIES, FaultKind, Finding, Measure, RowToLookAt
from lrlhf.apps.lab.audit.label_noise import label_noise
from lrlhf.apps.lab.audit.languages import languages
from lrlhf.apps.lab.audit.media_faults import media_faults
from lrlhf.apps.lab.audit.repeated_rows import IDENTICAL, repeated_rows
from lrlhf.apps.lab.audit.rows import AuditedData, read_data
from lrlhf.apps.lab.audit.text_faults import text_faults
from lrlhf.datamodules.core import RowDataModule
from lrlhf.media import MediaError

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
    beside: object,
    *,
    context: int | None = None,
    new_tokens: int = 0,
    with_label_noise: bool = False,
) -> Audit:
    """Look for faults in the training and validation data of a run.

    Rows are read as the run reads them: with its tokenizer, chat template, limits and split. Their
    order changes nothing but the order of what is listed.

    Args:
        data: A `PromptDataModule`, `PreferenceDataModule` or `SupervisedDataModule`.
        beside: Has what the data takes from the module that it is used with, such as a
            ``tokenizer``.
        context: Tokens that the model was made for; None: not known.
        new_tokens: Room that the run leaves for the response to a prompt.
        with_label_noise: Also fit reward models to look for wrong labels, which takes far longer.

    Raises:
        BadDataError: A source cannot be read, or the data makes no sense as a whole.
        ImportError: ``with_label_noise`` needs scikit-learn.
        ValueError: The data module is of another kind, or has no tokenizer.
    """
    read = read_data(data, beside)
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
    if with_label_noise and read.is_pairs:
        looks.append(label_noise)
    for look in looks:
        found, measured = look(read.rows)
        findings += found
        measures += measured
    usable = {split: sum(row.split == split for row in read.rows) for split in read.totals}
    findings.sort(key=lambda one: (SEVERITIES.index(one.severity), -one.share, one.name))
    return Audit(read.totals, usable, measures, findings)


def _left_out(data: AuditedData) -> list[Finding]:
    """Return what else a run leaves rows out for, by reason."""
    by_reason: dict[str, list[RowToLookAt]] = defaultdict(list)
    remedies: dict[str, str] = {}
    for split, place, problem in data.bad:
        if problem.reason in (IDENTICAL, "empty text") or isinstance(problem, MediaError):
            continue  # they have findings of their own
        by_reason[problem.reason].append(RowToLookAt(split, place, problem.detail))
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
        findings += kind.found(rows, data.total)
    return findings
