"""The miniature of published results: its rule, its choice of rates, and that every run works."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.published.__main__ import FinishedRuns, table, with_rates
from benchmarks.published.policies import (
    OWN,
    LengthRun,
    PolicyRun,
    StaleRun,
    best_of_group,
    inside_clip_range,
)
from benchmarks.published.reward_models import RewardModelRun, hps_scaled, pairs
from benchmarks.published.studies import LIGHTRFT, LORA_RATE, STUDIES, Study
from benchmarks.published.verdicts import Claim, difference, judge, verdict
from lrlhf.functional import EstimatorInputs


@pytest.mark.parametrize(
    ("interval", "bounds", "expected"),
    [
        ((0.1, 0.3), (0.0, math.inf), "seen"),
        ((-0.1, 0.3), (0.0, math.inf), "not seen at this size"),
        ((0.0, 0.3), (0.0, math.inf), "not seen at this size"),  # touches no effect
        ((-0.3, -0.1), (0.0, math.inf), "contradicted"),
        ((-0.04, 0.01), (-0.05, math.inf), "seen"),  # no worse by more than 0.05
        ((-0.06, 0.01), (-0.05, math.inf), "not seen at this size"),
        ((-0.4, -0.06), (-0.05, math.inf), "contradicted"),
        ((0.6, 1.2), (0.5, 1.5), "seen"),
        ((0.6, 1.6), (0.5, 1.5), "not seen at this size"),
        ((1.6, 1.9), (0.5, 1.5), "contradicted"),
        ((math.nan, math.nan), (0.0, math.inf), "not seen at this size"),
    ],
)
def test_the_verdict_follows_from_the_interval(
    interval: tuple[float, float], bounds: tuple[float, float], expected: str
) -> None:
    assert verdict(*interval, *bounds) == expected


def test_effects_are_paired_by_seed() -> None:
    claim = Claim(text="", paper="", effect=difference("new", "old", "score"))
    # the seeds are far apart, and in each of them the variants are 1, 2 and 3 apart
    seeds = [
        {"new": {"score": base + gap}, "old": {"score": base}}
        for base, gap in ((10.0, 1.0), (50.0, 2.0), (90.0, 3.0))
    ]
    found = judge(claim, seeds)
    # Student's t with 2 degrees of freedom is 4.302653, the standard error 1 / sqrt(3)
    assert found.effects == [1.0, 2.0, 3.0]
    assert (found.mean, found.low, found.high) == pytest.approx((2.0, -0.484138, 4.484138))
    assert found.verdict == "not seen at this size"
    assert judge(claim, seeds[:2] * 4).verdict == "seen"  # 1.5 ± 0.45
    assert judge(claim, seeds[:1]).verdict == "not seen at this size"  # one seed has no interval


def test_a_main_effect_is_the_mean_over_the_other_factors() -> None:
    by_level = {"bt": 0.1, "hps": 0.2, "bt_scaled": 0.4, "hps_scaled": 0.6, "attention": 0.05}
    runs = {
        name: {"accuracy": sum(by_level.get(level, 0.0) for level in name.split(", "))}
        for name in LIGHTRFT.variants
    }
    effects = [claim.effect(runs) for claim in LIGHTRFT.claims]
    # scaled: the mean of 0.4 - 0.1 and 0.6 - 0.2
    assert effects == pytest.approx([0.35, 0.2, 0.05, 0.0])


def test_the_rates_compared_are_the_best_of_each() -> None:
    best = {"full": "full, 0.003", "rank 1": "rank 1, 0.03"}
    runs = {name: {"on_the_way": float(name in best.values())} for name in LORA_RATE.variants}
    assert LORA_RATE.claims[0].effect(runs) == pytest.approx(1.0)  # ten times: one decade


@dataclass(frozen=True, kw_only=True)
class CountedRun:
    """A run whose score is largest at a rate of 2, and which counts how often it is made."""

    lr: float = 1.0
    shift: float = 0.0

    def __call__(self, seed: int) -> dict[str, Any]:
        CALLS.append((self.lr, seed))
        return {"score": self.shift - abs(self.lr - 2.0) + seed / 1000}


CALLS: list[tuple[float, int]] = []


def test_rates_are_chosen_on_their_own_seeds_and_no_run_is_made_twice(tmp_path: Path) -> None:
    CALLS.clear()
    study = Study(
        paper="",
        variants={"one": CountedRun(), "other": CountedRun(shift=1.0)},  # type: ignore[dict-item]
        claims=[],
        draw=lambda *_: None,
        rates=(1.0, 2.0, 4.0),
        chosen_by="score",
        rate_of={"other": "one"},
    )
    finished = FinishedRuns(tmp_path / "runs.jsonl")
    chosen = with_rates(study, finished, seeds=(101, 102))
    assert {name: run.lr for name, run in chosen.items()} == {"one": 2.0, "other": 2.0}
    assert chosen["other"].shift == 1.0  # type: ignore[union-attr]
    assert {seed for _, seed in CALLS} == {101, 102}
    assert len(CALLS) == 6
    again = FinishedRuns(tmp_path / "runs.jsonl")
    assert with_rates(study, again, seeds=(101, 102)) == chosen
    assert len(CALLS) == 6
    assert again.measures(CountedRun(lr=3.0), 101)["score"] == pytest.approx(-0.899)  # type: ignore[arg-type]
    assert len(CALLS) == 7  # another setting is another run
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 7


def test_the_best_of_each_group_is_kept() -> None:
    advantages = best_of_group(_inputs(scores=[0.1, 0.9, 0.5, 0.4]))
    assert advantages[:, 1].tolist() == [0.0, 1.0, 1.0, 0.0]


def test_clipped_advantages_give_the_gradient_of_ppos_surrogate() -> None:
    scores = [0.0, 1.0, 1.0, 0.0]
    ratio = torch.tensor([0.5, 0.9, 1.1, 1.5])[:, None].expand(4, 3)
    inputs = _inputs(scores)
    policy = inputs.tokens["old_logprobs"] + ratio.log()
    kept = inside_clip_range(
        inputs._replace(tokens={"old_logprobs": policy, "sampling_logprobs": policy - ratio.log()})
    )
    logprobs = policy.clone().requires_grad_()
    advantages = torch.tensor([-1.0, 1.0, 1.0, -1.0])[:, None]  # of two, minus the other's score
    now = (logprobs - (policy - ratio.log())).exp()
    torch.minimum(now * advantages, now.clamp(0.8, 1.2) * advantages).sum().backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(kept * ratio, logprobs.grad * inputs.response_mask)
    assert OWN["ppo_ratio"].estimator.function is inside_clip_range


def _inputs(scores: list[float]) -> EstimatorInputs:
    mask = torch.tensor([[False, True, True]] * len(scores))
    return EstimatorInputs(
        scores=torch.tensor(scores),
        kl=torch.zeros(mask.shape),
        response_mask=mask,
        num_generations=2,
        kl_coef=0.0,
        baseline_mask=torch.ones(len(scores), dtype=torch.bool),
        tokens={"old_logprobs": torch.full(mask.shape, -1.0)},
    )


def test_losses_of_scores_between_0_and_1() -> None:
    # σ(log 3) - σ(0) = 1/4, divided by 0.07
    loss = hps_scaled(torch.tensor([math.log(3)]), torch.tensor([0.0]))
    assert float(loss) == pytest.approx(math.log1p(math.exp(-0.25 / 0.07)), rel=1e-5)


def test_held_out_pairs_are_labelled_right() -> None:
    for row in pairs(200, seed=3, noisy=False):
        letters = [sum(map(str.isalpha, row[side])) for side in ("chosen", "rejected")]
        assert (letters[0] > letters[1]) == row["prompt"].endswith("+")
        assert letters[0] != letters[1]


def _shortest(run: Any) -> Any:
    if isinstance(run, RewardModelRun):
        return replace(run, steps=1)
    if isinstance(run, StaleRun):
        return replace(run, iterations=1, delay=0.0)
    assert isinstance(run, PolicyRun | LengthRun)
    return replace(run, iterations=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STUDIES])
def test_every_variant_runs(name: str, tmp_path: Path) -> None:
    study = STUDIES[name]
    finished = FinishedRuns(tmp_path / "runs.jsonl")
    runs: Mapping[str, Any] = {
        variant: finished.measures(_shortest(run), 1) for variant, run in study.variants.items()
    }
    findings = [judge(claim, [runs, runs]) for claim in study.claims]
    rows = table({name: findings}, {name: 60.0}).splitlines()
    assert len(rows) == 2 + len(study.claims)
    assert all(row.count("|") == 7 for row in rows)
    for line in (tmp_path / "runs.jsonl").read_text().splitlines():
        assert json.loads(line)["measures"]
