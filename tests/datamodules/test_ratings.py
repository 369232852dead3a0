from collections import Counter
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules import (
    BadDataError,
    PreferenceDataModule,
    RatedFile,
    RatedText,
    pairs_from_ratings,
)
from tests.datamodules.conftest import WriteRows

TEXTS = [RatedText(number / 10, f"text {number}") for number in range(100)]


def texts_of(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(row[side] for row in rows for side in ("chosen", "rejected"))


def test_the_better_rated_text_of_a_pair_is_chosen_and_the_gap_is_kept() -> None:
    ratings = {rated.text: rated.rating for rated in TEXTS}
    rows = pairs_from_ratings(TEXTS, min_gap=2.0, seed=0)
    assert len(rows) > 30
    assert all(ratings[row["chosen"]] - ratings[row["rejected"]] >= 2.0 - 1e-9 for row in rows)
    assert all(row["chosen_rating"] == ratings[row["chosen"]] for row in rows)
    assert all(row["prompt"] == "" and "margin" not in row for row in rows)


def test_pairs_can_be_bounded_scaled_and_are_sampled_by_the_seed() -> None:
    rows = pairs_from_ratings(TEXTS, min_gap=1.0, seed=0, max_pairs=5, margin_scale=0.25)
    assert rows == pairs_from_ratings(TEXTS, min_gap=1.0, seed=0, max_pairs=5, margin_scale=0.25)
    assert rows != pairs_from_ratings(TEXTS, min_gap=1.0, seed=1, max_pairs=5, margin_scale=0.25)
    assert len(rows) == 5
    for row in rows:
        assert row["margin"] == 0.25 * (row["chosen_rating"] - row["rejected_rating"])
    # of equal texts the first counts
    texts = [RatedText(2.0, "same"), RatedText(-2.0, "same"), RatedText(0.0, "other")]
    (row,) = pairs_from_ratings(texts, min_gap=1.0, seed=0, uses_per_text=2)
    assert (row["chosen"], row["rejected"]) == ("same", "other")
    with pytest.raises(ValueError, match="min_gap=0"):
        pairs_from_ratings(TEXTS, min_gap=0.0, seed=0)


@pytest.mark.parametrize("uses", [1, 3])
def test_a_text_is_part_of_a_bounded_number_of_pairs(uses: int) -> None:
    rows = pairs_from_ratings(TEXTS, min_gap=0.5, seed=0, uses_per_text=uses)
    counts = texts_of(rows)
    assert max(counts.values()) == uses
    assert len({(row["chosen"], row["rejected"]) for row in rows}) == len(rows)


def rated_file(write_rows: WriteRows, **options: Any) -> RatedFile:
    rows = [{"text": rated.text, "rating": rated.rating} for rated in TEXTS]
    return RatedFile(write_rows(rows, "rated.jsonl"), **options)


def test_train_and_validation_parts_share_no_text(write_rows: WriteRows) -> None:
    sides = [
        texts_of(
            list(rated_file(write_rows, part=part, validation_fraction=0.3, uses_per_text=3).rows())
        )  # type: ignore[arg-type]
        for part in ("train", "validation")
    ]
    assert sides[0].keys().isdisjoint(sides[1].keys())
    assert len(sides[0]) > 50
    assert 10 < len(sides[1]) <= 30
    with pytest.raises(BadDataError, match=r"rated.jsonl: no two of its 100 texts make a pair"):
        list(rated_file(write_rows, min_gap=50.0).rows())


def test_a_row_without_rating_is_counted(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_rows([{"text": "a", "rating": 1}, {"text": "b", "rating": 3}, {"text": "c"}])
    data = PreferenceDataModule(RatedFile(path), tokenizer=tokenizer)
    with pytest.raises(BadDataError, match=r"1 of 2 rows[\s\S]*no rating"):
        data.setup("fit")
