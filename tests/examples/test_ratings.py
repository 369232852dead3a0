from collections.abc import Iterable
from typing import Any

import pytest
from sentiment_ratings import RatedPairs, RatedText

from lrlhf.datamodules import BadDataError, BadRow

TEXTS = [RatedText(number / 10, f"text {number}") for number in range(100)]


class Rated(RatedPairs):
    name = "rated"

    def __init__(self, texts: Iterable[RatedText | BadRow] = TEXTS, **options: Any) -> None:
        super().__init__(**options)
        self._texts = texts

    def texts(self) -> Iterable[RatedText | BadRow]:
        return self._texts


def texts_of(rows: Iterable[Any]) -> list[str]:
    return [row[side] for row in rows for side in ("chosen", "rejected")]


def test_clearly_better_texts_are_chosen_each_once_and_by_the_seed() -> None:
    ratings = {rated.text: rated.rating for rated in TEXTS}
    rows: list[Any] = list(Rated(min_gap=2.0, margin_scale=0.25).rows())
    assert len(rows) > 30
    for row in rows:
        gap = ratings[row["chosen"]] - ratings[row["rejected"]]
        assert gap >= 2.0 - 1e-9
        assert row["chosen_rating"] == ratings[row["chosen"]]
        assert row["prompt"] == ""
        assert row["margin"] == 0.25 * (row["chosen_rating"] - row["rejected_rating"])
    assert len(set(texts_of(rows))) == 2 * len(rows)
    assert "margin" not in next(iter(Rated().rows()))
    assert rows == list(Rated(min_gap=2.0, margin_scale=0.25).rows())
    assert texts_of(rows) != texts_of(Rated(min_gap=2.0, seed=1).rows())
    # of equal texts the first counts; what cannot be read is passed on
    bad = BadRow("no rating", "")
    texts = [RatedText(2.0, "same"), RatedText(-2.0, "same"), bad, RatedText(0.0, "other")]
    first, row = Rated(texts).rows()
    assert first is bad
    assert texts_of([row]) == ["same", "other"]


def test_train_and_validation_parts_share_no_text() -> None:
    train, held = (
        set(texts_of(Rated(part=part, validation_fraction=0.3).rows()))
        for part in ("train", "validation")
    )
    assert train.isdisjoint(held)
    assert len(train) > 50
    assert 10 < len(held) <= 30
    with pytest.raises(BadDataError, match=r"rated: no two of its 100 texts make a pair"):
        list(Rated(min_gap=50.0).rows())
    with pytest.raises(ValueError, match="min_gap=0"):
        Rated(min_gap=0.0)
