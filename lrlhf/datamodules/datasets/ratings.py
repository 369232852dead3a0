"""Graded texts: pairs made of texts that people rated one by one."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lrlhf.datamodules.loading.sources import Row, Source, resolve_source
from lrlhf.datamodules.loading.splits import hold_out
from lrlhf.datamodules.rows.bad_rows import BadDataError, BadRow
from lrlhf.datamodules.rows.columns import number_of, text_of

Part = Literal["all", "train", "validation"]


@dataclass(frozen=True, order=True)
class RatedText:
    """A text and the mean of its ratings."""

    rating: float
    text: str


def pairs_from_ratings(
    texts: Sequence[RatedText],
    *,
    min_gap: float,
    seed: int,
    max_pairs: int | None = None,
    margin_scale: float | None = None,
    uses_per_text: int = 1,
) -> list[dict[str, Any]]:
    """Pair texts whose ratings differ clearly; which one meets which is random.

    Args:
        texts: Rated texts; of equal texts the first counts.
        min_gap: Least difference of the two ratings.
        seed: Another seed gives other pairs.
        max_pairs: Stop at this number of pairs.
        margin_scale: Give each pair the margin ``margin_scale * difference``; None: no margin.
        uses_per_text: Number of pairs that a text may be part of.

    Returns:
        Rows with ``prompt`` (empty), ``chosen``, ``rejected``, both ratings and perhaps
        ``margin``.
    """
    if min_gap <= 0:
        raise ValueError(f"min_gap={min_gap}: give a number above 0, else ties become pairs")
    unique = list({rated.text: rated for rated in reversed(texts)}.values())[::-1]
    rng = np.random.default_rng(seed)
    pairs: dict[tuple[str, str], dict[str, Any]] = {}
    for _ in range(uses_per_text):
        for better, worse in _match(
            [unique[i] for i in rng.permutation(len(unique))], min_gap, rng
        ):
            row = _pair_row(better, worse, margin_scale)
            pairs.setdefault((better.text, worse.text), row)
    rows = list(pairs.values())
    return rows if max_pairs is None else rows[:max_pairs]


def _match(
    texts: Iterable[RatedText], min_gap: float, rng: np.random.Generator
) -> Iterable[tuple[RatedText, RatedText]]:
    """Let each text meet one that waits and is far enough from it, else wait itself."""
    waiting: list[RatedText] = []
    for text in texts:
        below = bisect_right(waiting, text.rating - min_gap, key=lambda rated: rated.rating)
        above = bisect_left(waiting, text.rating + min_gap, key=lambda rated: rated.rating)
        partners = below + len(waiting) - above
        if not partners:
            insort(waiting, text)
            continue
        chosen = int(rng.integers(partners))
        other = waiting.pop(chosen if chosen < below else above + chosen - below)
        yield (text, other) if text.rating > other.rating else (other, text)


def _pair_row(better: RatedText, worse: RatedText, margin_scale: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "prompt": "",
        "chosen": better.text,
        "rejected": worse.text,
        "chosen_rating": better.rating,
        "rejected_rating": worse.rating,
    }
    if margin_scale is not None:
        row["margin"] = margin_scale * (better.rating - worse.rating)
    return row


class RatedPairs(Source):
    """Pairs from rated texts, which are split into train and validation before they are paired.

    Args:
        part: Which texts to pair. Two sources with the same data, seed and
            ``validation_fraction``, one ``train`` and one ``validation``, share no text.
        validation_fraction: Share of the texts that ``validation`` gets.
        min_gap: Least difference of the two ratings of a pair.
        seed: Of the split and the pairing.
        max_pairs: Largest number of pairs.
        margin_scale: Margin of a pair per point of rating; None: no margins.
        uses_per_text: Number of pairs that a text may be part of.
    """

    def __init__(
        self,
        *,
        part: Part = "all",
        validation_fraction: float = 0.1,
        min_gap: float = 1.0,
        seed: int = 0,
        max_pairs: int | None = None,
        margin_scale: float | None = None,
        uses_per_text: int = 1,
    ) -> None:
        self._part = part
        self._fraction = validation_fraction
        self._seed = seed
        self._pairing: Mapping[str, Any] = {
            "min_gap": min_gap,
            "max_pairs": max_pairs,
            "margin_scale": margin_scale,
            "uses_per_text": uses_per_text,
        }

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
        pairs = pairs_from_ratings(self._of_part(good), seed=self._seed, **self._pairing)
        if not pairs:
            raise BadDataError(
                f"{self.name}: no two of its {len(good)} texts make a pair whose ratings differ by "
                f"{self._pairing['min_gap']}: give a smaller min_gap or more texts"
            )
        yield from pairs

    def _of_part(self, texts: Sequence[RatedText]) -> Sequence[RatedText]:
        if self._part == "all":
            return texts
        train, validation = hold_out(
            [(rated.text,) for rated in texts], fraction=self._fraction, seed=self._seed
        )
        return [texts[row] for row in (train if self._part == "train" else validation)]


class RatedFile(RatedPairs):
    """Pairs from files of rated texts.

    Args:
        path: File, folder, pattern or hub id.
        text_column: Column with the text.
        rating_column: Column with its mean rating.
        pairing: See `RatedPairs`.
    """

    def __init__(
        self, path: str, *, text_column: str = "text", rating_column: str = "rating", **pairing: Any
    ) -> None:
        super().__init__(**pairing)
        self._path = path
        self._columns = (text_column, rating_column)

    @property
    def name(self) -> str:
        return self._path

    def texts(self) -> Iterable[RatedText | BadRow]:
        for source in resolve_source(self._path):
            for row in source.rows():
                yield row if isinstance(row, BadRow) else self._read(row)

    def _read(self, row: Row) -> RatedText | BadRow:
        text_column, rating_column = self._columns
        try:
            text = text_of(row, text_column, setting="text_column")
            rating = number_of(row, rating_column)
        except BadRow as problem:
            return problem
        if rating is None:
            return BadRow("no rating", f"column {rating_column!r} is missing or empty")
        return RatedText(rating, text)
