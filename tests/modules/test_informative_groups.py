"""The algorithm says which groups teach: turns, single rewards, and baselines of its own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lrlhf.functional.algorithm import Algorithm, Estimator, EstimatorInputs
from lrlhf.functional.algorithms import ALGORITHMS
from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.modules.metrics.rollout_metrics import measure_rollout
from lrlhf.modules.policy.sample import Sampler, informative_groups
from lrlhf.modules.settings import Advantage
from lrlhf.rewards import RewardResult
from lrlhf.rollout import Collected, collect_different
from lrlhf.rollout.responses import token_prompts
from lrlhf.types import Rollout

NAN = float("nan")
MASK = torch.tensor([0, 1, 1, 0, 1, 1], dtype=torch.bool)
"""Two turns."""


def collected(
    turns: list[tuple[float, float]],
    rewards: list[tuple[float, ...]] | None = None,
    *,
    truncated: list[int] = [],  # noqa: B006  not changed
    greedy: list[float] | None = None,
) -> Collected:
    """Responses, two to a prompt, with what their two turns have earned."""
    count = len(turns)
    earned = torch.zeros(count, 6)
    earned[:, 2], earned[:, 5] = torch.tensor(turns).T
    each = earned.sum(dim=1)[:, None] if rewards is None else torch.tensor(rewards).float()
    rollout = Rollout(
        input_ids=torch.arange(6).repeat(count, 1),
        attention_mask=torch.ones(count, 6, dtype=torch.bool),
        response_mask=MASK.repeat(count, 1),
        sampling_logprobs=torch.zeros(count, 6),
        group_ids=torch.arange(count) // 2,
        truncated=torch.tensor([row in truncated for row in range(count)]),
        turn_rewards=earned if rewards is None else None,
        prompt_lengths=torch.ones(count, dtype=torch.long),
    )
    result = RewardResult(
        scores=each.sum(dim=1),
        per_function=each,
        names=tuple(f"r{number}" for number in range(each.shape[1])),
        metrics={},
        extras={},
        failures=[],
        weights=torch.ones_like(each, dtype=torch.float64),
    )
    found = Collected(rollout, result, [{"group": row // 2} for row in range(count)])
    return found if greedy is None else found.with_extra_values({"greedy": torch.tensor(greedy)})


def taught(name: str, given: Collected, **options: Any) -> list[bool]:
    settings = Advantage(**options)
    return informative_groups(given, ALGORITHMS[name], settings, num_generations=2).tolist()


TURNS = collected([(1, 0), (0, 1), (1, 1), (1, 1), (0, 1), (1, 1)])
"""Equal sums of different turns, the same, different sums."""


@pytest.mark.parametrize("name", sorted({*ALGORITHMS} - {"remax", "distillation", "pass_at_k"}))
def test_turns_count_for_algorithms_that_look_at_them(name: str) -> None:
    by_turn = name in {
        *("rloo_turn", "mt_grpo", "gigpo", "ppo", "vapo", "reinforce", "reinforce_plus_plus")
    }
    assert taught(name, TURNS) == [by_turn, False, True]
    if by_turn:
        assert taught(name, TURNS, credit="response") == [False, False, True]
    # tenths in another order: what rounding leaves is no difference
    sums = collected([(0.1, 0.2), (0.1, 0.2), (1e6, 0.25), (1e6, 0.5)])
    assert taught(name, sums) == [False, True]


def test_single_rewards_count_where_each_is_normalised() -> None:
    given = collected([(0, 0)] * 4, [(1, -1), (-1, 1), (1, 1), (1, 1)])
    assert taught("gdpo", given) == [True, False]
    assert taught("grpo", given) == [False, False]


def test_a_baseline_of_its_own_decides() -> None:
    given = collected(
        [(0, 0)] * 6, [(1,), (1,), (1,), (1,), (0,), (1,)], greedy=[0, 0, 1, 1, NAN, NAN]
    )
    assert taught("remax", given) == [True, False, False]


def test_rows_that_are_left_out_teach_nothing() -> None:
    scores = [(NAN,), (1,), (0,), (1,), (0,), (1,)]
    given = collected([(0, 0)] * 6, scores, truncated=[2])
    for name in ("rloo", "grpo", "ppo", "rloo_turn"):
        assert taught(name, given, truncated="exclude") == [False, False, True]
        assert taught(name, given) == [False, True, True]
    assert taught("rloo", given, reward_clip_range=(-1.0, 0.0)) == [False, False, False]


def test_an_estimator_of_the_users_is_asked() -> None:
    def first_turn(inputs: EstimatorInputs) -> Tensor:
        """The first turn alone, against its sibling."""
        assert inputs.turn_rewards is not None
        earned = inputs.turn_rewards[:, 2].view(-1, 2)
        return torch.where(inputs.response_mask, (earned - earned.flip(1)).view(-1, 1), 0.0)

    mine = Algorithm(
        name="mine",
        estimator=Estimator(first_turn, groups=True, uses_turn_rewards=True),
        loss=ALGORITHMS["grpo"].loss,
    )
    assert informative_groups(TURNS, mine, Advantage(), num_generations=2).tolist() == [
        True,
        False,
        True,
    ]


def test_sampling_and_the_logged_share_ask_the_same() -> None:
    one = collected([(1, 0), (0, 1)])
    for name, padding_rows in (("grpo", True), ("rloo_turn", False)):
        settings: Any = SimpleNamespace(
            algorithm=ALGORITHMS[name], advantage=Advantage(), num_generations=2
        )
        asks = Sampler._informative.__get__(SimpleNamespace(_settings=settings))
        found = collect_different(
            token_prompts([[1]]),
            lambda *_: one,
            count=1,
            num_generations=2,
            any_rank=bool,
            informative=asks,
        )
        assert found.padding_rows.tolist() == [padding_rows] * 2
        metrics = MetricSums()
        measure_rollout(
            replace(one.rollout, turn_rewards=None),
            one.rewards,
            metrics,
            num_generations=2,
            informative=asks(one),
        )
        assert metrics._read()[0]["rollout/zero_variance_groups"] == (float(padding_rows), 1.0)
