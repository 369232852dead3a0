"""Which languages the texts are in, and answers in another one than their prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from heapq import nsmallest
from importlib import import_module
from zlib import crc32

from lrlhf.apps.lab.audit.findings import FaultKind, Finding, Measure, RowToLookAt
from lrlhf.apps.lab.audit.rows import AuditedRow

MIXED = FaultKind(
    "answers in another language than the prompt",
    "note",
    "Prompt and answer are in different languages, both beyond doubt.",
    "Leave these rows out, unless they are translations or the like.",
)
RARE = FaultKind(
    "rows in a rare language",
    "note",
    "Almost all rows are in one language, and these are not.",
    "Leave these rows out, or give the model more of the language.",
)
_MIN_WORDS = 12
"""Below which the language of a text is a guess."""
_LETTERS = 200
"""At the end of a text, of which the language is told."""
_MOST_ROWS = 10_000
"""That are looked at: it takes half a millisecond for each."""
_CERTAIN = 0.99
_MAIN = 0.95
"""Share of one language from which on the others are rare."""

Detector = Callable[[str], str | None]


def languages(rows: Sequence[AuditedRow]) -> tuple[list[Finding], list[Measure]]:
    """Tell the languages of prompts and answers by py3langid (97 languages, by letters).

    Texts of fewer than 12 words, and those of which the detector is less than 99 % certain, as of
    code and formulas, count as of no language. Of more than 10,000 rows so many are looked at,
    drawn by a digest of their texts.

    Raises:
        ImportError: py3langid is not installed; says how to install it.
    """
    language_of = detector()
    all_rows, rows = len(rows), nsmallest(_MOST_ROWS, rows, key=_drawn)
    spoken: list[tuple[AuditedRow, str | None, list[str | None]]] = [
        (row, language_of(row.prompt), [language_of(answer) for answer in row.answers])
        for row in rows
    ]
    known = Counter(
        language for _, prompt, answers in spoken for language in {prompt, *answers} if language
    )
    told = ", ".join(f"{name} {count:,}" for name, count in known.most_common(8))
    more = f" and {len(known) - 8} more" if len(known) > 8 else ""
    what = "languages (rows)" if len(rows) == all_rows else f"languages ({len(rows):,} rows drawn)"
    measures = [Measure(what, told + more, of=len(rows))] if known else []
    findings = MIXED.found(_mixed(spoken), len(rows))
    if known and known.most_common(1)[0][1] >= _MAIN * known.total():
        findings += RARE.found(_rare(spoken, known.most_common(1)[0][0]), len(rows))
    return findings, measures


def _mixed(
    spoken: Sequence[tuple[AuditedRow, str | None, list[str | None]]],
) -> Iterator[RowToLookAt]:
    for row, prompt, answers in spoken:
        others = [one for one in answers if one is not None and one != prompt]
        if others and prompt is not None:
            yield RowToLookAt(row.split, row.place, f"prompt {prompt}, answer {others[0]}")


def _rare(
    spoken: Sequence[tuple[AuditedRow, str | None, list[str | None]]], main: str
) -> Iterator[RowToLookAt]:
    for row, prompt, answers in spoken:
        others = [one for one in (prompt, *answers) if one is not None and one != main]
        if others:
            yield RowToLookAt(row.split, row.place, others[0])


def _drawn(row: AuditedRow) -> int:
    return crc32("\n".join(row.texts).encode("utf-8", "surrogatepass"))


def detector() -> Detector:
    """Return what tells the language of a text, or None where that is uncertain.

    Raises:
        ImportError: py3langid is not installed; says how to install it.
    """
    identifier = _identifier()

    def language_of(text: str) -> str | None:
        if len(text.split()) < _MIN_WORDS and (
            text.isascii() or len(text) < 4 * _MIN_WORDS
        ):
            return None
        name, certainty = identifier.classify(text[-_LETTERS:])
        return str(name) if certainty >= _CERTAIN else None

    return language_of


@cache
def _identifier():  # type: ignore[no-untyped-def]
    try:
        langid = import_module("py3langid.langid")
    except ModuleNotFoundError as error:
        raise ImportError(
            "telling languages needs py3langid: pip install 'lrlhf[audit]'"
        ) from error
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
