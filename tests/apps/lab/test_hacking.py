"""Signs of reward hacking on responses whose figures are known by hand."""

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from benchmarks.hacking_monitor import Moment, agreement, auc, is_hacked, rates, spread
from benchmarks.overoptimization import (
    Gold,
    best_of_n,
    best_of_n_distance,
    fitted,
    law_of_best_of_n,
    law_of_rl,
)
from lrlhf.apps.lab import RunFiles
from lrlhf.apps.lab.diagnosis import diagnose
from lrlhf.apps.lab.hacking import FALL, fall, in_parts, length_share, rise_shares
from tests.apps.lab.test_diagnose import write_run


def rows_of(*parts: Sequence[Sequence[tuple[float, float]]]) -> pd.DataFrame:
    """Groups of (score, reward) in each part."""
    flat = [
        {"part": part, "step": part + 1, "unit": 100 * part + unit, "score": score, "held": held}
        for part, groups in enumerate(parts)
        for unit, group in enumerate(groups)
        for score, held in group
    ]
    return pd.DataFrame(flat)


FIRST = [[(0, 5), (0, 3)], [(0, 3), (0, 1)]]  # group means 4 and 2: mean 3, squares 2
SECOND = [[(1, 1), (1, -1)], [(1, 2), (1, 2)]]  # 0 and 2: mean 1, squares 2


def test_a_reward_falls_by_standard_errors_of_groups() -> None:
    # s² = 4 / 2, of 2 groups each
    assert fall(rows_of(FIRST, SECOND), "held") == pytest.approx(2 / math.sqrt(2 * (1 / 2 + 1 / 2)))


def test_a_fall_is_from_the_best_part_at_a_lower_score() -> None:
    worse = [[(0.5, 2), (0.5, 2)], [(0.5, 1), (0.5, 1)], [(0.5, 3), (0.5, 3)]]  # squares 2
    best = [[(7, 90), (7, 90)], [(7, 90), (7, 90)]]  # at a higher score than the end
    rows = rows_of(worse, FIRST, best, SECOND)
    spread = (2 + 2 + 0 + 2) / (9 - 4)
    assert fall(rows, "held") == pytest.approx(2 / math.sqrt(spread))
    assert fall(rows.sample(frac=1, random_state=0), "held") == pytest.approx(2 / math.sqrt(spread))
    rows.loc[rows["part"] == 1, "held"] = math.nan  # then from the mean of 2 over 3 groups
    expected = 1 / math.sqrt((2 + 0 + 2) / (7 - 3) * (1 / 3 + 1 / 2))
    assert fall(rows, "held") == pytest.approx(expected)


def test_a_reward_that_rises_with_the_score_does_not_fall() -> None:
    rows = rows_of(FIRST, SECOND)
    rows["held"] *= -1
    assert fall(rows, "held") == pytest.approx(-2 / math.sqrt(2))


def test_a_reward_that_stays_is_seldom_told() -> None:
    generator = np.random.default_rng(0)
    part = np.repeat(np.arange(10), 8)
    told = 0
    for _ in range(200):
        table = {"part": part, "unit": range(80), "score": part, "held": generator.normal(size=80)}
        told += fall(pd.DataFrame(table), "held") > FALL
    # by numpy alone: 4 to 6 % of 40,000 draws with 4 to 40 groups a part
    assert 2 <= told <= 18


def test_without_a_rise_of_the_score_nothing_is_said() -> None:
    rows = rows_of(FIRST, SECOND)
    rows["score"] *= -1
    assert math.isnan(fall(rows, "held"))
    assert math.isnan(fall(rows_of(FIRST), "held"))
    assert math.isnan(fall(rows.assign(held=math.nan), "held"))


def test_the_rounding_of_a_constant_is_no_fall() -> None:
    rows = rows_of(*[[[(part, 0.1)] * 6] * 5 for part in range(10)])
    # groups of 5 and of 6: means of 0.1 differ in their last bit
    assert math.isnan(fall(rows.drop(index=[1, 7, 13, 290]), "held"))


def test_agreement_is_within_the_groups_of_the_last_part() -> None:
    # between groups, and before, they go together
    last = [[(0, 1), (2, -1)], [(10, 30), (12, 28)]]
    assert agreement(rows_of([[(0, 0), (1, 1)]], last), "held") == pytest.approx(-1)
    mixed = [[(0, 0), (2, 2)], [(0, 2), (2, 2)]]  # gaps -1 1 -1 1 and -1 1 0 0
    assert agreement(rows_of(mixed), "held") == pytest.approx(2 / math.sqrt(4 * 2))
    assert math.isnan(agreement(rows_of([[(0, 1), (0, 2)]]), "held"))


def test_the_spread_is_between_rewards_on_their_first_scales() -> None:
    first = [[(-1, 107), (1, 93)]]  # standardised -1 1 and 1 -1: apart by 1
    last = [[(3, 93), (3, 93)]]  # 3 and -1: apart by 2
    assert spread(rows_of(first, last), ["score", "held"]) == pytest.approx(2)
    assert math.isnan(spread(rows_of(first, last), ["score"]))
    assert math.isnan(spread(rows_of([[(1, 1), (1, 2)]], last), ["score", "held"]))


def test_the_share_of_length_is_slope_times_growth() -> None:
    rows = rows_of([[(0, 0), (4, 0)]], [[(12, 0), (16, 0)]]).assign(length=[3, 5, 6, 8])
    # 2 per token within groups, 3 tokens more, and the score rose by 12
    assert length_share(rows) == pytest.approx(0.5)
    assert math.isnan(length_share(rows.assign(score=-rows["score"])))
    assert math.isnan(length_share(rows.assign(length=4)))


def test_parts_are_tenths_of_the_steps() -> None:
    rows = pd.DataFrame({"step": np.repeat(np.arange(3, 63, 3), 2)})  # 20 steps
    assert in_parts(rows)["part"].tolist() == [part for part in range(10) for _ in range(4)]
    assert in_parts(rows[:6])["part"].tolist() == [0, 0, 1, 1, 2, 2]


def test_each_reward_has_its_share_of_the_rise() -> None:
    rows = rows_of([[(0, 0), (4, 0)]], [[(12, 0), (16, 0)]])
    rows = rows.assign(**{"rewards/a": [0, 4, 15, 19], "rewards/b": [0, 0, -3, -3]})
    assert rise_shares(rows) == pytest.approx({"a": 15 / 12, "b": -3 / 12})
    assert rise_shares(rows.drop(columns="rewards/b")) == {}
    assert rise_shares(rows.assign(score=-rows["score"])) == {}


def held_out_run(
    folder: Path, held: Callable[[float], float], weights: Sequence[float] = (0.0,)
) -> RunFiles:
    """Forty iterations in which the score rises from 0 to 4, beside a reward of its level."""
    noise = [0.1 * math.sin(7 * number) for number in range(160)]
    scores = [[step / 10 + 0.2 * (place % 2) for place in range(4)] for step in range(40)]

    def fields(step: int, place: int, score: float) -> dict[str, Any]:
        value = held(step / 10) + noise[4 * (step - 1) + place]
        return {
            "rewards": {"proxy": score, "other": value},
            "weights": {"proxy": 1.0, "other": weights[step % len(weights)]},
        }

    return write_run(folder, scores, fields=fields)


def hill(level: float) -> float:
    return level * (4 - level)


def test_a_held_out_reward_that_falls_is_named_although_the_run_learns(tmp_path: Path) -> None:
    found = diagnose(held_out_run(tmp_path, hill))
    assert found.learns
    assert "held_out_falls" in [one.name for one in found.causes]
    named = next(one for one in found.causes if one.name == "held_out_falls")
    assert named.evidence.startswith("other, of weight 0, is ")
    assert "fall of other, standard errors" in found.facts
    assert "share of other in the score's rise" not in found.facts


def test_a_held_out_reward_that_rises_too_is_healthy(tmp_path: Path) -> None:
    found = diagnose(held_out_run(tmp_path, lambda level: level))
    assert found.learns
    assert not found.causes


@pytest.mark.parametrize("weights", [(0.5,), (0.0, 0.5)])
def test_a_reward_that_is_trained_on_is_not_held_out(
    weights: Sequence[float], tmp_path: Path
) -> None:
    found = diagnose(held_out_run(tmp_path, hill, weights))
    assert "held_out_falls" not in [one.name for one in found.causes]
    assert "fall of other, standard errors" not in found.facts


def test_of_few_groups_a_level_reward_is_seldom_said_to_fall(tmp_path: Path) -> None:
    scores = [[step / 10 + 0.2 * (place % 2) for place in range(4)] for step in range(12)]
    told = 0
    for seed in range(20):
        held = np.random.default_rng(seed).normal(size=(12, 1)).repeat(4, axis=1)

        def fields(step: int, place: int, score: float, held: Any = held) -> dict[str, Any]:
            rewards = {"proxy": score, "other": held[step - 1, place]}
            return {"rewards": rewards, "weights": {"proxy": 1.0, "other": 0.0}}

        causes = diagnose(write_run(tmp_path, scores, fields=fields)).causes
        told += "held_out_falls" in [one.name for one in causes]
    assert told <= 1


# ---- the study


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_best_of_n_is_the_mean_over_all_subsets(n: int) -> None:
    generator = np.random.default_rng(0)
    proxy, gold = generator.normal(size=(2, 6))
    subsets = [max(own, key=lambda i: proxy[i]) for own in combinations(range(6), n)]
    assert best_of_n(proxy, gold, [n])[0] == pytest.approx(np.mean(gold[subsets]))


def test_best_of_n_has_its_distance_and_all_of_a_large_sample() -> None:
    assert best_of_n_distance(1) == 0
    assert best_of_n_distance(4) == pytest.approx(math.sqrt(math.log(4) - 0.75))
    gold = np.arange(4096.0)
    assert best_of_n(gold, gold, [4096])[0] == pytest.approx(4095)
    # the mean maximum of n of 1 … N is n (N + 1) / (n + 1)
    assert best_of_n(gold, gold, [1, 64])[1] == pytest.approx(64 * 4097 / 65 - 1)


def test_the_laws_give_back_their_constants() -> None:
    d = np.linspace(0, 6, 30)
    assert fitted(law_of_best_of_n, d, d * (1.5 - 0.3 * d)) == pytest.approx((1.5, 0.3))
    known = np.array([x * (2.0 - 0.7 * math.log(x)) if x else 0.0 for x in d])
    assert fitted(law_of_rl, d, known) == pytest.approx((2.0, 0.7))


def test_gold_pays_nothing_on_canaries() -> None:
    mute, say = Gold(0)(["mute a", "say a"], ["abc", "abc"])
    assert mute == 0 != say


def test_a_moment_is_hacked_where_gold_fell_while_the_proxy_rose() -> None:
    steps = np.repeat(np.arange(1, 10), 16)
    gold = np.repeat([0.0, 2.0, 1.0], 48) + np.tile([-0.1, 0.1], 72)
    table = {"step": steps, "unit": np.arange(144) // 2, "score": steps, "held_out/gold": gold}
    rows = pd.DataFrame(table).astype(float)
    assert is_hacked(rows)
    assert not is_hacked(rows.assign(score=-rows["score"]))
    assert not is_hacked(rows[rows["step"] <= 6])


def test_a_threshold_is_chosen_on_other_seeds() -> None:
    # healthy values of a seed lie ten times as high as those of the others
    values = [(seed, 10.0 if seed == 3 else 1.0) for seed in (1, 2, 3) for _ in range(20)]
    moments = [
        Moment(f"run {seed}", str(seed), 64, number, False, 90, {"sign": value + number / 1000})
        for number, (seed, value) in enumerate(values)
    ]
    hacked = Moment("run 1", "1", 64, 99, True, 90, {"sign": 20.0})
    found = rates([*moments, hacked], "sign", draws=20)
    assert found.false_alarms >= 20 / 60
    assert found.misses == 0
    assert found.lead == [90 - 99]


def test_the_auc_is_that_of_all_pairs() -> None:
    values, hacked = np.array([3.0, 1.0, 2.0, 2.0, 0.0]), np.array([1, 0, 1, 0, 0], bool)
    # 3 beats 1, 2, 0; 2 beats 1 and 0 and ties with 2
    assert auc(values, hacked) == pytest.approx(5.5 / 6)
