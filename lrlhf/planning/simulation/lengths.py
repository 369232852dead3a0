"""How long the responses of an iteration are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_SPREAD = 0.7
"""Standard deviation of the logarithm of a response's length."""


class Lengths(NamedTuple):
    """A distribution of response lengths, in tokens.

    Attributes:
        known: Lengths to draw from, one as likely as the other.
        origin: Where they come from, in words.
    """

    known: NDArray[np.int64]
    origin: str

    @property
    def mean(self) -> float:
        """Of a response."""
        return float(self.known.mean())

    def draw(self, groups: int, copies: int, seed: int) -> NDArray[np.int64]:
        """Return lengths of so many responses to so many prompts, `[groups, copies]`."""
        generator = np.random.default_rng(seed)
        return generator.choice(self.known, size=(groups, copies))

    def equal(self) -> Lengths:
        """Return responses that all have the mean length."""
        return self._replace(known=np.array([max(1, round(self.mean))]))


def lognormal_lengths(mean: float, limit: int, *, number: int = 4096) -> Lengths:
    """Return lengths of lognormal distribution, cut at a limit, which then have a mean.

    Raises:
        ValueError: No response of up to ``limit`` tokens has the mean.
    """
    if not 1 <= mean <= limit:
        raise ValueError(
            f"--response-lengths is {mean:g}; the mean lies between 1 and "
            f"model.sampling.max_new_tokens ({limit})"
        )
    normal = np.random.default_rng(0).standard_normal(number)

    def cut(scale: float) -> NDArray[np.float64]:
        return np.clip(scale * np.exp(_SPREAD * normal), 1, limit)

    low, high = 0.0, limit * float(np.exp(_SPREAD * np.abs(normal).max()))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cut(middle).mean() < mean else (low, middle)
    origin = f"lognormal, mean {mean:g}, cut at {limit} tokens, logarithm's deviation {_SPREAD}"
    return Lengths(np.rint(cut(high)).astype(np.int64), origin)


def recorded_lengths(path: Path) -> Lengths:
    """Return the lengths of a run's responses, from its ``rollouts.jsonl``.

    Raises:
        ValueError: The file has no responses.
    """
    with path.open(encoding="utf-8") as lines:
        known = [json.loads(line).get("length") for line in lines]
    known = [max(1, length) for length in known if length is not None]
    if not known:
        raise ValueError(f"--response-lengths: {path} has no lengths of responses")
    origin = f"those of {len(known)} responses in {path}, mean {np.mean(known):.0f}"
    return Lengths(np.array(known), origin)
