"""What a check concluded, and with which evidence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

ITEMS = {
    "weights": "which weights sampled the tokens",
    "mask": "is the loss mask on the sampled tokens",
    "tokens": "are separators and ends there, and the ids those that were sampled",
    "ratio": "is a factor of the sampling in the ratio",
    "advantages": "are rewards and advantages those of the algorithm",
    "kl": "does the KL have its form",
    "truncated": "are truncated responses treated as named",
    "loss": "is the loss divided by the count of the whole batch",
}
"""The questions, in the order of reports."""
Verdict: TypeAlias = Literal["sound", "fault", "unknown"]


class Answer(NamedTuple):
    """One conclusion about one question; a question may have several."""

    item: str
    """A key of `ITEMS`."""
    verdict: Verdict
    text: str
    """The conclusion and its figures, in a sentence or two."""
    figures: Mapping[str, Any] = {}
    rows: Sequence[str] = ()
    """Places of the rows that show it."""


def faults_or(sound: Answer, wrong: Mapping[str, Sequence[str]], total: int) -> list[Answer]:
    """Return a fault for each sentence of ``wrong`` with its places, else the sound answer."""
    return [
        Answer(sound.item, "fault", f"{text}: {len({*places}):,} of {total:,}", {}, places)
        for text, places in wrong.items()
    ] or [sound]
