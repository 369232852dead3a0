"""How a judge is asked which of two is better, and how it says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from lrlhf.rewards.judge.templates import ANSWER, DIRECT, PAIRWISE
from lrlhf.rewards.judge.verdicts import (
    Choice,
    answer_of,
    choice_of,
    only_choice_of,
    read_answer,
    reasoning_before_answer,
    reasoning_before_line,
)

FormName = Literal["line", "direct", "answer"]
Shown = Literal["Response", "Image", "Video"]


class VerdictForm(NamedTuple):
    """One way of asking for a verdict on two, and of giving it."""

    template: str
    """Jinja text of the question."""
    write: Callable[[Choice, Shown, str], str]
    """Returns the reply with a verdict, on what is shown, after some reasoning."""
    read: Callable[[str], Choice | None]
    """Returns the verdict in a reply, None where it is not clear."""
    reasoning: Callable[[str], str]
    """Returns what stands before the verdict."""
    writes_reasoning: bool = True
    """Whether a written reply has the reasoning."""


def _line(verdict: Choice, shown: Shown, reasoning: str) -> str:
    del shown
    return f"{reasoning}\n\nVerdict: {verdict}" if reasoning else f"Verdict: {verdict}"


def _direct(verdict: Choice, shown: Shown, reasoning: str) -> str:
    del reasoning
    return _line(verdict, shown, "")


def _answer(verdict: Choice, shown: Shown, reasoning: str) -> str:
    said = f"<answer>{answer_of(verdict, shown)}</answer>"
    return f"<think>\n{reasoning}\n</think>\n{said}" if reasoning else said


FORMS: Mapping[FormName, VerdictForm] = {
    "line": VerdictForm(PAIRWISE, _line, choice_of, reasoning_before_line),
    "direct": VerdictForm(
        DIRECT, _direct, only_choice_of, reasoning_before_line, writes_reasoning=False
    ),
    "answer": VerdictForm(ANSWER, _answer, read_answer, reasoning_before_answer),
}
"""``line``: reasoning, then a last line ``Verdict: A``, ``B`` or ``tie``. ``direct``: that alone.
``answer``: ``<think>…</think><answer>Image 1 is better</answer>``, as LightRFT's models say it."""


def verdict_form(name: FormName) -> VerdictForm:
    """Return the form of that name.

    Raises:
        ValueError: There is none.
    """
    if name not in FORMS:
        raise ValueError(f"form is {name!r}; choose one of {', '.join(FORMS)}")
    return FORMS[name]
