"""Rewards of turns on their way from a rollout to the advantages."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lrlhf.functional import resolve_algorithm
from lrlhf.modules import Advantage, Update
from lrlhf.modules.policy.experience import (
    UNSCALED,
    ScoreStatistics,
    as_experience,
    compute_advantages,
)
from lrlhf.types import Experience
from tests.modules.policy_runs import one_process
from tests.modules.test_policy_objective import assembled, loss_of, random_experience, rollout_of

NAN = float("nan")
# two responses: turns of two and two tokens, with a token of the environment between, and of two
MASK = torch.tensor([[1, 1, 0, 1, 1], [1, 1, 0, 0, 0]]).bool()
# of scores 5 and 3: 2 for the first turn and 1 for the second, 3 for the only one
TURN_REWARDS = torch.tensor([[9, 0, 2, 9, 0, 1], [9, 0, 3, 9, 9, 9]]).float()
VALUES = torch.tensor([[9, 1, 2, 9, 4, 8], [9, 1, 1, 9, 9, 9]]).float()


def credited(
    *,
    estimator: str = "reinforce",
    update: Update = Update(),  # noqa: B008  frozen
    statistics: ScoreStatistics = UNSCALED,
    scores: tuple[float, float] = (5.0, 3.0),
    rewarded: bool = True,
    **options: Any,
) -> Experience:
    """Both rows with advantages; the first one is truncated."""
    rollout = rollout_of(MASK, torch.tensor([True, False]), 2)
    experience = as_experience(
        replace(rollout, turn_rewards=TURN_REWARDS if rewarded else None),
        scores=torch.tensor(scores),
        values=VALUES if estimator == "gae" else None,
    )
    settings = Advantage(estimator=estimator, **options)
    return compute_advantages(
        experience,
        algorithm=assembled(settings, update),
        settings=settings,
        reward_kl_estimator=None,
        kl_coef=0.0,
        num_generations=2,
        whiten=one_process().whiten,
        statistics=statistics,
    )


@pytest.mark.parametrize(
    ("options", "first", "second"),
    [
        # 5 in all, of which 2 have been earned when the second turn begins
        ({}, [5, 5, 3, 3], 3),
        ({"credit": "response"}, [5, 5, 5, 5], 3),
        ({"rewarded": False}, [5, 5, 5, 5], 3),
        # everything halved
        ({"scale_rewards": "std"}, [2.5, 2.5, 1.5, 1.5], 1.5),
        # the mean, 1, goes off the end: turns earn 1 and ½ of (5 - 1) / 2, and 1½ of (3 - 1) / 2
        ({"scale_rewards": "mean_std"}, [2, 2, 1, 1], 1),
        # a score of 4: the turns have earned what they have, the end of the response pays
        ({"reward_clip_range": (-1.0, 4.0)}, [4, 4, 2, 2], 3),
        ({"reward_clip_range": (-1.0, 1.0)}, [1, 1, -1, -1], 1),
        # an environment that broke
        ({"scores": (NAN, 3.0)}, [0, 0, 0, 0], 3),
    ],
)
def test_turns_are_paid_in_the_unit_of_the_scores(
    options: dict[str, Any], first: list[float], second: float
) -> None:
    advantages = credited(statistics=ScoreStatistics(mean=1.0, std=2.0), **options).advantages
    assert advantages.tolist() == [[0, *first[:2], 0, *first[2:]], [0, second, second, 0, 0, 0]]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    ("truncated", "first", "target"),
    [
        # rewards 0, 2 | 0, 3, and half of what follows a turn
        ("train", [3.5, 3.5, 3, 3], 3),
        # the last value is 8, and half of it follows; the value itself has no other target
        ("bootstrap", [5.5, 5.5, 7, 7], 8),
    ],
)
def test_returns_are_those_of_the_turns_before_advantages_are_whitened(
    truncated: str, first: list[float], target: float, normalize: bool
) -> None:
    options = {"gamma": 0.5, "lam": 1.0, "discount": "turn"}
    found = credited(estimator="gae", options=options, truncated=truncated, normalize=normalize)
    expected = torch.tensor([[0, *first[:2], 0, *first[2:]], [0, 3, 3, 0, 0, 0]])
    targets = expected.clone()
    targets[0, -1] = target
    torch.testing.assert_close(found.returns, targets)
    mask = found.response_mask
    if normalize:
        assert float(found.advantages[mask].mean()) == pytest.approx(0, abs=1e-6)
    else:
        torch.testing.assert_close(found.advantages, (expected - VALUES) * mask)
    # a response that goes on is trained on like any other
    assert torch.equal(found.loss_mask, mask)


def test_one_ratio_per_response_is_refused_where_turns_are_rewarded() -> None:
    update = Update(loss="sequence_clip")
    with pytest.raises(ValueError, match=r"environment rewards turns.*advantage\.credit: response"):
        credited(update=update)
    for allowed in ({"credit": "response"}, {"rewarded": False}, {"estimator": "rloo"}):
        assert credited(update=update, **allowed).advantages.isfinite().all()


def test_an_on_policy_step_over_single_turns_is_that_of_rloo() -> None:
    experience = random_experience()
    per_row = torch.randn(8, 1) * experience.response_mask
    experience = replace(experience, advantages=per_row)
    gradients = []
    for name in ("rloo", "rloo_turn"):
        new = experience.old_logprobs.clone().requires_grad_()
        terms = loss_of(new, experience, resolve_algorithm(name).loss, entropy_coef=0.0)
        gradients.append(torch.autograd.grad(terms.loss, new)[0])
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 0


@pytest.mark.parametrize(
    ("name", "level"), [("rloo_turn", "token"), ("mt_grpo", "token"), ("rloo", "sequence")]
)
def test_advantages_of_turns_are_whitened_token_by_token(name: str, level: str) -> None:
    assert resolve_algorithm(name).estimator.normalize == "none"
    assert assembled(Advantage(estimator=name, normalize=True)).estimator.normalize == level
