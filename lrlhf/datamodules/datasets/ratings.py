"""Graded texts: pairs made of texts that people rated one by one."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lrlhf.datamodules.loading.sources import Row, Source
from lrlhf.datamodules.loading.splits import hold_out
from lrlhf.datamodules.rows.bad_rows import BadDataError, BadRow


@dataclass(frozen=True, order=True)
class RatedText:
    """A text and the mean of its ratings."""

    rating: float
    text: str


class RatedPairs(Source):
    """Pairs from rated texts, which are split into train and validation before they are paired.

    Rows have ``prompt`` (empty), ``chosen``, ``rejected``, both ratings and perhaps ``margin``. A
    text is part of one pair at most; of equal texts the first counts.

    Args:
        part: Which texts to pair. Two sources with the same data, seed and
            ``validation_fraction``, one ``train`` and one ``validation``, share no text.
        validation_fraction: Share of the texts that ``validation`` gets.
        min_gap: Least difference of the two ratings of a pair.
        seed: Of the split and the pairing.
        margin_scale: Margin of a pair per point of rating; None: no margins.
    """

    def __init__(
        self,
        *,
        part: Literal["all", "train", "validation"] = "all",
        validation_fraction: float = 0.1,
        min_gap: float = 1.0,
        seed: int = 0,
        margin_scale: float | None = None,
    ) -> None:
        if min_gap <= 0:
            raise ValueError(f"min_gap={min_gap}: give a number above 0, else ties become pairs")
        self._part = part
        self._fraction = validation_fraction
        self._min_gap = min_gap
        self._seed = seed
        self._margin_scale = margin_scale

    @abstractmethod
    def texts(self) -> Iterable[RatedText | BadRow]:
        """Go through the rated texts."""

    def rows(self) -> Iterable[Row | BadRow]:
        good: list[RatedText] = []
        for rated in self.texts():
            if isinstance(rated, BadRow):
                yield rated
            else:
                good.append(rated)
        pairs = list(self._pairs(self._of_part(good)))
        if not pairs:
            raise BadDataError(
                f"{self.name}: no two of its {len(good)} texts make a pair whose ratings differ by "
                f"{self._min_gap}: give a smaller min_gap or more texts"
            )
        for better, worse in pairs:
            row: dict[str, Any] = {
                "prompt": "",
                "chosen": better.text,
                "rejected": worse.text,
                "chosen_rating": better.rating,
                "rejected_rating": worse.rating,
            }
            if self._margin_scale is not None:
                row["margin"] = self._margin_scale * (better.rating - worse.rating)
            yield row

    def _of_part(self, texts: Sequence[RatedText]) -> Sequence[RatedText]:
        if self._part == "all":
            return texts
        train, validation = hold_out(
            [(rated.text,) for rated in texts], fraction=self._fraction, seed=self._seed
        )
        return [texts[row] for row in (train if self._part == "train" else validation)]

    def _pairs(self, texts: Sequence[RatedText]) -> Iterable[tuple[RatedText, RatedText]]:
        """Let each text meet one that waits and is far enough from it, else wait itself."""
        unique = list({rated.text: rated for rated in reversed(texts)}.values())[::-1]
        rng = np.random.default_rng(self._seed)
        waiting: list[RatedText] = []
        for text in (unique[index] for index in rng.permutation(len(unique))):
            lowest, highest = text.rating - self._min_gap, text.rating + self._min_gap
            below = bisect_right(waiting, lowest, key=lambda rated: rated.rating)
            above = bisect_left(waiting, highest, key=lambda rated: rated.rating)
            partners = below + len(waiting) - above
            if not partners:
                insort(waiting, text)
                continue
            chosen = int(rng.integers(partners))
            other = waiting.pop(chosen if chosen < below else above + chosen - below)
            yield (text, other) if text.rating > other.rating else (other, text)
