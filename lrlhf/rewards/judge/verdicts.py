"""What a judge's reply says, read strictly: anything else than one clear verdict is none."""

from __future__ import annotations

import re
from itertools import chain

_LINE = re.compile(r"verdict\s*:(.*)", re.IGNORECASE)
_MARKUP = "*_` \t"
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_END_OF_THOUGHT = "</think>"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def verdict_of(reply: str) -> str | None:
    """Return what stands behind ``Verdict:`` in the last line; None: it is not so.

    What a model has thought before ``</think>`` does not count. A reply with two lines of verdicts
    has none.
    """
    lines = [line.strip(_MARKUP) for line in reply.rpartition(_END_OF_THOUGHT)[2].splitlines()]
    lines = [line for line in lines if line]
    found = [match for line in lines if (match := _LINE.fullmatch(line))]
    if len(found) != 1 or found[0].string != lines[-1]:
        return None
    return found[0].group(1).strip(_MARKUP)


def read_rating(verdict: str, low: float, high: float) -> tuple[float, ...] | None:
    """Read a number of a scale.

    Returns:
        Where it lies between the ends, from 0 to 1; None: it is no number of the scale.
    """
    if not _NUMBER.fullmatch(verdict) or not low <= float(verdict) <= high:
        return None
    return ((float(verdict) - low) / (high - low),)


def read_choice(verdict: str) -> tuple[float, ...] | None:
    """Read which of two responses is better: ``A``, ``B`` or ``tie``.

    Returns:
        1 for the better and 0 for the other, 0.5 each for a tie; None: it is none of these words.
    """
    return {"a": (1.0, 0.0), "b": (0.0, 1.0), "tie": (0.5, 0.5)}.get(verdict.casefold())


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
