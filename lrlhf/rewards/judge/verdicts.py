"""What a judge's reply says, read strictly: anything else than one clear verdict is none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain
from typing import Literal

from lrlhf.rewards.function import before_open_thought, outside_thoughts

_LINE = re.compile(r"verdict\s*:(.*)", re.IGNORECASE)
_MARKUP = "*_` \t"
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_THOUGHT, _END_OF_THOUGHT = "<think>", "</think>"
_ANSWER, _END_OF_ANSWER = "<answer>", "</answer>"
_EQUALLY_GOOD = "Both are equally good"
Choice = Literal["A", "B", "tie"]
"""Which of two is better."""
SWAPPED: Mapping[Choice, Choice] = {"A": "B", "B": "A", "tie": "tie"}
"""What a verdict is where the two change places."""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def verdict_of(reply: str) -> str | None:
    """Return what stands behind ``Verdict:`` in the last line; None: it is not so.

    What a model has thought before ``</think>`` does not count, and a reply that ends in a thought
    has no verdict. Neither has one with two lines of verdicts.
    """
    lines = _lines_of(reply)
    found = [match for line in lines if (match := _LINE.fullmatch(line))]
    if len(found) != 1 or found[0].string != lines[-1]:
        return None
    return found[0].group(1).strip(_MARKUP)


def _lines_of(reply: str) -> list[str]:
    """Return the lines behind the thoughts, without markup and empty ones."""
    return [line for one in _said(reply).splitlines() if (line := one.strip(_MARKUP))]


def _said(reply: str) -> str:
    """Return what stands behind the thoughts; nothing, if the reply ends in one."""
    return outside_thoughts(reply) if before_open_thought(reply) == reply else ""


def read_rating(verdict: str, low: float, high: float) -> tuple[float, ...] | None:
    """Read a number of a scale.

    Returns:
        Where it lies between the ends, from 0 to 1; None: it is no number of the scale.
    """
    if not _NUMBER.fullmatch(verdict) or not low <= float(verdict) <= high:
        return None
    return ((float(verdict) - low) / (high - low),)


def choice_of(reply: str) -> Choice | None:
    """Return which of two responses the last line of a reply calls better; None: it does not."""
    choices: dict[str, Choice] = {"a": "A", "b": "B", "tie": "tie"}
    return choices.get((verdict_of(reply) or "").casefold())


def only_choice_of(reply: str) -> Choice | None:
    """Return which of two responses is called better by a reply that says no more than that."""
    return choice_of(reply) if len(_lines_of(reply)) == 1 else None


def choice_scores(choice: Choice | None) -> tuple[float, ...] | None:
    """Return 1 for the better and 0 for the other, 0.5 each for a tie; None: of no verdict."""
    scores = {"A": (1.0, 0.0), "B": (0.0, 1.0), "tie": (0.5, 0.5)}
    return None if choice is None else scores[choice]


def reasoning_before_line(reply: str) -> str:
    """Return what stands before the last line."""
    return reply.rstrip().rpartition("\n")[0].rstrip()


def answer_of(verdict: str, shown: str) -> str:
    """Return a verdict in words, such as ``Image 1 is better``; ``shown``: what the two are."""
    numbers = {"A": 1, "B": 2}
    return f"{shown} {numbers[verdict]} is better" if verdict in numbers else _EQUALLY_GOOD


def read_answer(reply: str) -> Choice | None:
    """Read ``<answer>Image 1 is better</answer>``, behind which and before which nothing may stand.

    What a model has thought between ``<think>`` and ``</think>`` does not count.

    Returns:
        ``A``, ``B``, or ``tie`` where both are equally good; None: it is nothing of these.
    """
    said = _said(reply).strip()
    if not said.startswith(_ANSWER) or not said.endswith(_END_OF_ANSWER):
        return None
    return _ANSWERS.get(said.removeprefix(_ANSWER).removesuffix(_END_OF_ANSWER).strip())


def reasoning_before_answer(reply: str) -> str:
    """Return what stands between ``<think>`` and ``</think>``."""
    before = reply.rpartition(_END_OF_THOUGHT)[0].strip()
    return before.removeprefix(_THOUGHT).strip()


_ANSWERS: dict[str, Choice] = {
    **{answer_of("A", shown): "A" for shown in ("Response", "Image", "Video")},
    **{answer_of("B", shown): "B" for shown in ("Response", "Image", "Video")},
    _EQUALLY_GOOD: "tie",
}


def read_ranking(verdict: str, count: int) -> tuple[float, ...] | None:
    """Read an order of all responses such as ``B > A = C``.

    Args:
        verdict: The best first; equally good ones with ``=`` between them.
        count: How many there are.

    Returns:
        The share of the others that each is better than, a tie being half of one; None: a letter
        is missing, comes twice or is none of theirs.
    """
    ranks = [[letter.strip() for letter in rank.split("=")] for rank in verdict.upper().split(">")]
    if sorted(chain.from_iterable(ranks)) != [*LETTERS[:count]]:
        return None
    scores, behind = dict.fromkeys(LETTERS[:count], 0.0), count
    for rank in ranks:
        behind -= len(rank)
        for letter in rank:
            scores[letter] = (behind + (len(rank) - 1) / 2) / (count - 1)
    return tuple(scores.values())
