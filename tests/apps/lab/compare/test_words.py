"""The sentences that answer the question."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lrlhf.apps.lab.compare import compare_runs
from lrlhf.apps.lab.compare.sentences import (
    answer,
    cells,
    needs,
    notes,
    power_sentence,
    wins_and_losses,
)
from tests.apps.lab.compare.runs import response, scored, write_run


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def told(a: list[list[float]], b: list[list[float]]):  # type: ignore[no-untyped-def]
    sides = {
        name: [write_run(f"{name}{i}", scored(scores)) for i, scores in enumerate(side)]
        for name, side in (("a", a), ("b", b))
    }
    return compare_runs(sides).comparisons[0]


ZEROS, ONES = [0.0] * 20, [1.0] * 20
HALF = [1.0] * 10 + [0.0] * 10


def test_one_seed_each_speaks_of_two_checkpoints() -> None:
    found = answer(told([HALF], [ONES]))
    assert found.startswith("B is better than A in score by 50.0 points (95 % interval ")
    assert found.endswith(
        " on these 20 prompts; one seed each: this speaks of these two checkpoints, not of the "
        "recipes."
    )


def test_the_interval_of_a_worse_side_has_the_signs_of_the_table() -> None:
    found = told([ONES], [HALF])
    worse = answer(found)
    assert worse.startswith("B is worse than A in score by 50.0 points (B − A: 95 % interval −")
    shown = worse.split("interval ")[1].split(",")[0]
    assert shown == cells(found.main)[3]
    low, high = (float(end.replace("−", "-")) for end in shown.split(" to "))
    assert low < -50 < high < 0


def test_a_side_below_by_chance_has_an_interval_around_zero_with_the_signs_of_the_table() -> None:
    few = [1.0, 1.0, *ZEROS[2:]]
    found = told([few], [ZEROS])
    said = answer(found)
    assert "B is 10.0 points below A (B − A: 95 % interval −" in said
    assert said.split("interval ")[1].split(",")[0] == cells(found.main)[3]


def test_what_is_not_shown_is_not_claimed() -> None:
    few = [1.0, 1.0, *ZEROS[2:]]
    found = answer(told([ZEROS], [few]))
    assert found.startswith("No difference in score is shown between A and B: B is 10.0 points ab")


def test_equal_sides_are_equal_and_what_could_be_unseen_is_said() -> None:
    found = told([HALF], [HALF])
    assert answer(found).startswith("A and B have the same score, one by one, on these 20 prompts")
    # (1 - 0.139)^20 = 0.05
    assert any("up to 14 % of such prompts" in note for note in notes(found))
    assert any("What such an evaluation could find is not known" in note for note in notes(found))
    assert "0.0% wins, 100.0% ties" in wins_and_losses(found)


def test_seeds_are_said() -> None:
    generator = np.random.default_rng(0)
    seeds = [(generator.random(20) < 0.5).astype(float).tolist() for _ in range(5)]
    assert "3 and 2 seeds: this speaks of the recipes" in answer(told(seeds[:3], seeds[3:]))
    one = answer(told(seeds[:1], seeds[1:3]))
    assert "this speaks of the recipe of B against this one checkpoint of A" in one


def test_what_it_takes_is_said() -> None:
    found = told([HALF], [ONES])
    assert found.power is not None
    assert power_sentence(found, found.power).startswith("With 20 prompts a difference of ")
    headings, *rows = needs(found, found.power)
    assert headings == ["to find", "prompts"]
    assert [row[0] for row in rows] == ["1.0 points", "2.0 points", "5.0 points", "10.0 points"]
    counts = [int(row[1].replace(",", "")) for row in rows]
    # as 1/d²; the variance of the differences is 0.25 · 20/19
    assert counts[0] == pytest.approx(7.849 * 0.25 * 20 / 19 / 0.01**2, rel=0.01)
    assert counts[1] == pytest.approx(counts[0] / 4, rel=0.01)


def test_scores_that_are_no_shares_have_no_points() -> None:
    found = answer(told([[0.25 * i for i in range(20)]], [[0.25 * i + 1.5 for i in range(20)]]))
    assert found.startswith(
        "B is better than A in score by 1.5 (95 % interval 1.5 to 1.5, p < 0.001)"
    )


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("length", "B has more length than A by 5 ("),
        ("t0.7/length", "B has less t0.7/length than A by 3 ("),
        ("rewards/length", "B is better than A in rewards/length by 1 ("),
    ],
)
def test_a_longer_response_is_neither_better_nor_worse(metric: str, expected: str) -> None:
    sides = {}
    for name, cold, hot, reward in (("a", 10, 8, 2.0), ("b", 15, 5, 3.0)):
        lines = [
            response(row, 0.5, temperature=temperature, length=length, rewards={"length": reward})
            for temperature, length in ((0.0, cold), (0.7, hot))
            for row in range(20)
        ]
        sides[name] = [write_run(name, lines)]
    assert answer(compare_runs(sides, metric=metric).comparisons[0]).startswith(expected)


def test_pass_at_k_is_told_in_points() -> None:
    sides = {}
    for name, rights in (("a", (True, False)), ("b", (True, True))):
        lines = [
            response(row, 0.5, sample=index, correct=right and (name == "b" or row < 10))
            for row in range(20)
            for index, right in enumerate(rights)
        ]
        sides[name] = [write_run(name, lines)]
    found = compare_runs(sides, metric="pass@2").comparisons[0]
    # A has a right one on 10 of 20 prompts, B on all
    assert answer(found).startswith("B is better than A in pass@2 by 50.0 points (95 % interval ")
    assert any("averaged, or judged together" in note for note in notes(found))


def test_an_untrained_side_is_called_so() -> None:
    lines = [response(row, float(row % 2)) for row in range(20)]
    folders = [write_run(name, lines, step=step) for name, step in (("a", 0), ("b", 0), ("c", 3))]
    both = compare_runs({"a": folders[:1], "b": folders[2:]}).comparisons[0]
    assert "A is untrained: its evaluation was before the first step (step 0)." in notes(both)
    seeds = compare_runs({"a": folders[:1], "b": folders[1:]}).comparisons[0]
    assert "1 of the 2 runs of B is untrained (step 0)." in notes(seeds)
    assert not any("untrained" in note and "C" in note for note in notes(seeds))


def test_a_metric_of_one_side_is_named() -> None:
    lines = [response(row, float(row % 2), rewards={"math": 1.0}) for row in range(20)]
    others = [response(row, float(row % 2), rewards={"style": 0.5}) for row in range(20)]
    sides = {"a": [write_run("a", lines)], "b": [write_run("b", others)]}
    found = list(notes(compare_runs(sides).comparisons[0]))
    for name in ("rewards/math", "rewards/style"):
        assert f"{name}: no prompt has a value in all runs." in found
