"""What is said of judged pairs: expected values by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lrlhf.apps.lab.inspector.inspector import LabelledMargin, Texts, head_statistics, page_of
from tests.apps.lab.inspector.runs import write_lines


def odds(probability: float) -> float:
    return math.log(probability / (1 - probability))


def test_calibration_compares_predicted_and_true_shares() -> None:
    sure, unsure = odds(0.92), odds(0.62)
    pairs = [
        *[LabelledMargin(sure, 1, None)] * 3,
        LabelledMargin(-sure, 1, None),  # sure, and wrong
        LabelledMargin(-unsure, -1, None),
        LabelledMargin(unsure, -1, None),
    ]
    told = head_statistics(pairs)
    assert told["accuracy"] == pytest.approx(4 / 6)
    low, high = told["calibration"]
    assert (low["pairs"], low["predicted"], low["right"]) == (2, pytest.approx(0.62), 0.5)
    assert (high["pairs"], high["predicted"], high["right"]) == (4, pytest.approx(0.92), 0.75)
    # two pairs are off by 0.12, four by 0.17
    assert told["calibration_error"] == pytest.approx(0.92 / 6)
    assert told["length"] is None


def test_equal_and_very_different_scores_have_a_place() -> None:
    told = head_statistics(
        [LabelledMargin(0.0, 1, None), LabelledMargin(1e9, 1, None), LabelledMargin(-1e9, -1, None)]
    )
    assert [part["pairs"] for part in told["calibration"]] == [1, 2]
    assert told["accuracy"] == pytest.approx(2.5 / 3)  # equal scores are right half of the time
    assert told["calibration"][0]["right"] == 0.5
    assert told["calibration_error"] == 0.0


def test_length_bias_counts_who_prefers_the_longer_text() -> None:
    pairs = [
        LabelledMargin(2.0, -1, 10),
        LabelledMargin(1.0, 1, 5),
        LabelledMargin(-3.0, 1, -15),
        LabelledMargin(1.0, -1, -5),
    ]
    told = head_statistics([*pairs, LabelledMargin(9.0, 1, 0)])[
        "length"
    ]  # equal lengths say nothing
    assert head_statistics([LabelledMargin(0.0, 1, 4)])["length"]["model_prefers_longer"] == 0.5
    assert told["pairs"] == 4
    assert told["model_prefers_longer"] == 0.75
    assert told["people_prefer_longer"] == 0.5
    # margins and lengths less their means, 0.25 and -1.25
    x, y = [1.75, 0.75, -3.25, 0.75], [11.25, 6.25, -13.75, -3.75]
    over = sum(a * b for a, b in zip(x, y, strict=True))
    under = math.sqrt(sum(a * a for a in x) * sum(b * b for b in y))
    assert told["correlation"] == pytest.approx(over / under)
    assert head_statistics([LabelledMargin(1.0, 1, 3)])["length"]["correlation"] is None


def line(margin: float | None, label: float | None, **more: Any) -> dict[str, Any]:
    return {"margins": {"h": margin}, "labels": {"h": label}, **more}


def test_the_worst_mistakes_are_kept_and_statistics_are_of_all(tmp_path: Path) -> None:
    path = tmp_path / "eval_scores_1.jsonl"
    write_lines(path, [line(float(at - 50), 1, row=at, source="s") for at in range(100)])
    (told,) = page_of(path, 20, Texts())
    assert (told["set"], told["total"]) == ("", 100)
    assert told["heads"]["h"]["pairs"] == 100
    assert told["heads"]["h"]["accuracy"] == 0.495  # 49 right, one with equal scores
    margins = [pair["margins"]["h"] for pair in told["pairs"]]
    assert len(margins) == 20
    assert margins[:10] == list(range(-50, -40))
    assert min(margins[10:]) == -40
    assert max(margins) > 40


def test_validation_sets_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "eval_scores_1.jsonl"
    ours = [line(1.0, 1, set="ours", row=at) for at in range(10)]
    theirs = [line(-1.0 - at, 1, set="theirs", row=at) for at in range(4)]
    write_lines(path, [*ours[:5], *theirs, *ours[5:]])

    first, second = page_of(path, 6, Texts())

    assert [(one["set"], one["total"], len(one["pairs"])) for one in (first, second)] == [
        ("ours", 10, 3),
        ("theirs", 4, 3),
    ]
    assert (first["heads"]["h"]["accuracy"], second["heads"]["h"]["accuracy"]) == (1.0, 0.0)
    assert [pair["margins"]["h"] for pair in second["pairs"]][-1] == -4.0  # its worst mistake
    write_lines(path, [line(1.0, 1, dataloader=0), line(1.0, 1, dataloader=1)])
    assert [one["set"] for one in page_of(path, 6, Texts())] == ["0", "1"]


def test_unlabelled_equal_and_unscored_pairs_are_shown_and_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "eval_scores_1.jsonl"
    write_lines(path, [line(1.0, None), line(1.0, 0), line(None, 1), line(2.0, 1)])
    (told,) = page_of(path, 10, Texts())
    assert len(told["pairs"]) == 4
    assert told["heads"]["h"]["pairs"] == 1


def test_a_line_that_is_no_pair_is_named(tmp_path: Path) -> None:
    path = tmp_path / "eval_scores_1.jsonl"
    path.write_text(json.dumps(line(1.0, 1)) + "\n{}\n")
    with pytest.raises(ValueError, match=r"eval_scores_1\.jsonl, line 2: a pair needs margins"):
        page_of(path, 10, Texts())
