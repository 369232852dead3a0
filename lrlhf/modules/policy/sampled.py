"""What ``module.sample("…")`` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lrlhf.types import Prompt

_LONGEST = 200
"""Characters of a text in the ``repr``."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Sampled:
    """One response; printed, it is its text."""

    prompt: Prompt
    text: str
    """Without special tokens, and without the stop string that ended it."""
    score: float | None = None
    """None: it was not asked for, or no reward could tell."""
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """What each function returned, if the score was asked for."""
    finish_reason: str
    """``stop``, or ``length`` where the limit of tokens came first."""
    token_ids: tuple[int, ...]
    """As the engine returned them, the end-of-sequence token included."""
    tokens: tuple[str, ...]
    """Their texts, which joined are those of all; special tokens are shown."""
    logprobs: tuple[float | None, ...]
    """Of each token at the sampling temperature, in nats; None: the token was not sampled."""

    @property
    def logprob(self) -> float:
        """Log-probability of the response: the sum over its sampled tokens."""
        return sum(value for value in self.logprobs if value is not None)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _LONGEST else self.text[: _LONGEST - 1] + "…"
        score = "" if self.score is None else f"score={self.score:.4g}, "
        return (
            f"Sampled({text!r}, {score}tokens={len(self.token_ids)}, logprob={self.logprob:.4g}, "
            f"finish_reason={self.finish_reason!r})"
        )
