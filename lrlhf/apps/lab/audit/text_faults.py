"""What is wrong with the texts of single rows: templates, roles, marks, blanks, lengths."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from heapq import nsmallest
from importlib import import_module
from itertools import pairwise
from typing import Any
from zlib import crc32

from transformers import PreTrainedTokenizerBase

from lrlhf.apps.lab.audit.findings import FaultKind, Finding, FlaggedRow, Measure
from lrlhf.apps.lab.audit.rows import AuditedData, AuditedRow

PLACEHOLDER = FaultKind(
    "unfilled templates",
    "warning",
    "A text holds a placeholder such as {{ question }} that nobody filled in.",
    "Repair what wrote these rows, or leave them out.",
)
LITERAL = FaultKind(
    "literal None or nan",
    "warning",
    "A text is, or a line of a prompt ends with, None, nan, null or undefined: a missing value "
    "was written as text.",
    "Repair what wrote these rows, or leave them out, unless the word is meant.",
)
ROLES = FaultKind(
    "roles missing or repeated",
    "warning",
    "The turns of a conversation do not alternate, begin or end as those of a chat do, so that "
    "the model learns from an order that it never meets.",
    "Repair the turns, or leave these rows out.",
)
NEXT_TURN = FaultKind(
    "answers that go on with the next turn",
    "warning",
    "An answer goes on with what the user says next: whatever generated it did not stop.",
    "Cut the answer off before the next turn.",
)
REPEATED_PROMPT = FaultKind(
    "prompt inside of the answer",
    "warning",
    "An answer holds the question word for word: often a prompt that was not cut off.",
    "Take the prompt out of the answer.",
)
SPECIALS = FaultKind(
    "special tokens in texts",
    "warning",
    "A text holds marks such as <|im_end|> itself. Marks of this tokenizer become control tokens "
    "in the middle of the text; those of another one become letters.",
    "Give the rows as messages, which the chat template renders, or take the marks out; right "
    "only for plain text that was rendered for this very model.",
)
DOUBLED = FaultKind(
    "doubled special tokens",
    "warning",
    "A special token, such as the end of a text, stands twice in a row after tokenising.",
    "Take the mark out of the text: tokenizer and chat template add it themselves.",
)
BLANK = FaultKind(
    "empty texts",
    "warning",
    "A text or a turn is empty or white space. Where an answer or all of a prompt is, a run "
    "leaves the row out.",
    "Fill in what is missing, or leave these rows out.",
)
CUT = FaultKind(
    "answers cut off at a limit",
    "warning",
    "Conspicuously many answers have exactly as many tokens as the longest: they look cut off at "
    "the limit of whatever generated them.",
    "Generate them again with more room, or leave them out.",
)
CONTEXT = FaultKind(
    "longer than the model's context",
    "error",
    "With the room for a response, where there is one, the row has more tokens than the model was "
    "made for.",
    "Set max_tokens (of prompts max_prompt_tokens) so that these rows are left out.",
)

_TEMPLATE = re.compile(
    # not \frac{{x}}{2} nor style={{wide}}
    r"(?<![\w}\\^_=$({]){{\s*[A-Za-z_][\w.\[\]'\"]*(?:\s*\|\s*\w+)?\s*}}"
    r"|{%-?\s*(?:if|for|endif|endfor|else|set)\b[^%]*%}"
    r"|(?<![\w}\\^_=$({]){(?:prompt|question|instruction|input|response|answer|context|query)}"
)
_NOTHING = ("None", "nan", "NaN", "null", "undefined", "<NA>", "NaT")
_ENDS_WITH_NOTHING = re.compile(rf"[:=]\s*(?:{'|'.join(_NOTHING)})\s*$", re.MULTILINE)
_SPEAKER = re.compile(r"\n\n(?:Human|Assistant):")
_FOREIGN = (
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|start_header_id|>",
    "<|begin_of_text|>", "<|end_of_text|>", "<start_of_turn>", "<end_of_turn>", "[INST]",
    "[/INST]", "<<SYS>>", "<|assistant|>", "<|user|>", "<|system|>", "<|end|>",
)  # fmt: skip
_TEMPLATE_ROLES = {"system", "developer", "user", "assistant", "tool", "function", "ipython"}
_FEWEST_WORDS = 5
"""Of a question, below which an answer may well repeat it."""
_CUT_FROM, _CUT_TOKENS, _CUT_TIMES = 5, 32, 5


def text_faults(data: AuditedData, context: int | None, new_tokens: int) -> list[Finding]:
    """Look at the texts of every row.

    Args:
        data: All rows.
        context: Tokens that the model was made for; None: not known.
        new_tokens: Room that a run leaves for the response to a prompt; 0 for pairs.
    """
    names = _marks(data.tokenizer)
    marks = re.compile("|".join(map(re.escape, names)))
    # far faster than the expression, which hardly any text needs
    begun = re.compile(f"[{re.escape(''.join({name[0] for name in names}))}]").search
    looks: list[tuple[FaultKind, Callable[[AuditedRow], str]]] = [
        (PLACEHOLDER, _placeholder),
        (LITERAL, _literal),
        (ROLES, _roles),
        (NEXT_TURN, _next_turn),
        (REPEATED_PROMPT, _repeated_prompt),
        (SPECIALS, lambda row: _first(marks, [text for text in row.texts if begun(text)])),
        (DOUBLED, lambda row: f"{row.doubled} twice" if row.doubled else ""),
        (CONTEXT, lambda row: _too_long(row, context, new_tokens)),
    ]
    findings = []
    for kind, look in looks:
        details = ((row, look(row)) for row in data.rows)
        flagged = (FlaggedRow(row.split, row.place, detail) for row, detail in details if detail)
        findings += kind.findings_of(flagged, len(data.rows))
    return [
        *findings,
        *BLANK.findings_of(_blank(data), data.total),
        *CUT.findings_of(_cut_off(data.rows), len(data.rows)),
    ]


def _first(pattern: re.Pattern[str], texts: Sequence[str]) -> str:
    for text in texts:
        if match := pattern.search(text):
            return match[0].strip()
    return ""


def _placeholder(row: AuditedRow) -> str:
    return _first(_TEMPLATE, [text for text in row.texts if "{" in text])


def _literal(row: AuditedRow) -> str:
    literal = next((text.strip() for text in row.texts if text.strip() in _NOTHING), "")
    return literal or _first(_ENDS_WITH_NOTHING, [row.prompt])


def _roles(row: AuditedRow) -> str:
    return next(filter(None, (_wrong_roles(roles, row) for roles in row.roles)), "")


def _wrong_roles(roles: Sequence[str], row: AuditedRow) -> str:
    unknown = [role for role in roles if role not in _TEMPLATE_ROLES]
    if unknown:
        return f"unknown role {unknown[0]!r}"
    if "user" not in roles:
        return "no turn of the user"
    if any(role in ("system", "developer") for role in roles[1:]):
        return "a system turn that is not the first"
    spoken = [role for role in roles if role not in ("system", "developer")]
    if spoken[0] != "user":
        return f"begins with {spoken[0]}"
    for one, two in pairwise(spoken):
        if one == two and one in ("user", "assistant"):
            return f"two turns of the {one} in a row"
    # what is shown to a model that judges pictures is a turn of the user
    if row.prompt and row.answers and spoken[-1] != "assistant":
        return f"the answer ends with {spoken[-1]}"
    return ""


def _next_turn(row: AuditedRow) -> str:
    return _first(_SPEAKER, [answer.lstrip("\n") for answer in row.answers])


def _repeated_prompt(row: AuditedRow) -> str:
    question = row.question.strip()
    if not row.prompt or len(question.split()) < _FEWEST_WORDS:
        return ""
    holds = [str(index) for index, answer in enumerate(row.answers) if question in answer]
    if holds and len(row.answers) == 1:
        return "in the answer"
    return f"in candidate {' and '.join(holds)}" if holds else ""


def _marks(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the special tokens to look for, the longest first."""
    own = {str(token) for token in tokenizer.all_special_tokens}
    return sorted({*own, *_FOREIGN} - {""}, key=lambda mark: (-len(mark), mark))


def _too_long(row: AuditedRow, context: int | None, new_tokens: int) -> str:
    longest = max(row.tokens, default=0) + (0 if row.answers else new_tokens)
    if context is None or longest <= context:
        return ""
    return f"{longest} tokens, the model reads {context}"


def _blank(data: AuditedData) -> Iterator[FlaggedRow]:
    for split, place, problem in data.bad:
        if problem.reason == "empty text":
            yield FlaggedRow(split, place, problem.detail)
    for row in data.rows:
        if row.blank:
            yield FlaggedRow(row.split, row.place, f"{row.blank} is blank")


def _cut_off(rows: Sequence[AuditedRow]) -> Iterator[FlaggedRow]:
    """Yield the rows of the longest answers, if far more have that length than any near it."""
    lengths = Counter(length for row in rows for length in row.answer_tokens)
    longest = max(lengths, default=0)
    below = [lengths[longest - step] for step in range(1, 11)]
    conspicuous = max(_CUT_FROM, _CUT_TIMES * max(below))
    if longest < _CUT_TOKENS or lengths[longest] < conspicuous:
        return
    for row in rows:
        if longest in row.answer_tokens:
            yield FlaggedRow(row.split, row.place, f"{longest} tokens")


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
Spoken = tuple[AuditedRow, str | None, list[str | None]]
"""A row, and the languages of its prompt and answers; None: uncertain."""


def languages(rows: Sequence[AuditedRow]) -> tuple[list[Finding], list[Measure]]:
    """Tell the languages of prompts and answers by py3langid (97 languages, by letters).

    Texts of fewer than 12 words, and those of which the detector is less than 99 % certain, as of
    code and formulas, count as of no language. Of more than 10,000 rows so many are looked at,
    drawn by a digest of their texts.
    """
    all_rows, rows = len(rows), nsmallest(_MOST_ROWS, rows, key=_drawn)
    spoken: list[Spoken] = [
        (row, _language(row.prompt), [*map(_language, row.answers)]) for row in rows
    ]
    known = Counter(
        language for _, prompt, answers in spoken for language in {prompt, *answers} if language
    )
    if not known:
        return [], []
    listed = ", ".join(f"{name} {count:,}" for name, count in known.most_common(8))
    more = f" and {len(known) - 8} more" if len(known) > 8 else ""
    what = "languages (rows)" if len(rows) == all_rows else f"languages ({len(rows):,} rows drawn)"
    findings = MIXED.findings_of(_mixed(spoken), len(rows))
    ((main, count),) = known.most_common(1)
    if count >= _MAIN * known.total():
        findings += RARE.findings_of(_not_in(main, spoken), len(rows))
    return findings, [Measure(what, listed + more, of=len(rows))]


def _mixed(spoken: Sequence[Spoken]) -> Iterator[FlaggedRow]:
    for row, prompt, answers in spoken:
        others = [answer for answer in answers if answer is not None and answer != prompt]
        if others and prompt is not None:
            yield FlaggedRow(row.split, row.place, f"prompt {prompt}, answer {others[0]}")


def _not_in(main: str, spoken: Sequence[Spoken]) -> Iterator[FlaggedRow]:
    for row, prompt, answers in spoken:
        others = [each for each in (prompt, *answers) if each is not None and each != main]
        if others:
            yield FlaggedRow(row.split, row.place, others[0])


def _drawn(row: AuditedRow) -> int:
    return crc32("\n".join(row.texts).encode("utf-8", "surrogatepass"))


@cache
def _identifier() -> Any:
    langid = import_module("py3langid.langid")
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


def _language(text: str) -> str | None:
    """Tell the language of a text; None: it is uncertain."""
    if len(text.split()) < _MIN_WORDS and (text.isascii() or len(text) < 4 * _MIN_WORDS):
        return None
    name, certainty = _identifier().classify(text[-_LETTERS:])
    return str(name) if certainty >= _CERTAIN else None
