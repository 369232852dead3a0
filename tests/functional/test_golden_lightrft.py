"""LightRFT's losses, KL estimates and advantages on recorded inputs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lrlhf.functional import (
    adaptive_kl_coef,
    aggregate,
    bradley_terry_loss,
    clipped_policy_loss,
    clipped_value_loss,
    cpgd_policy_loss,
    discounted_returns,
    generalized_advantages,
    group_mean_advantages,
    group_normalized_advantages,
    hps_loss,
    kl_estimate,
    leave_one_out_advantages,
    log_exp_loss,
    shape_rewards,
)

from .recorded import LIGHTRFT, assert_recorded, mask, tensor


def every(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("record", LIGHTRFT[name], ids=range(len(LIGHTRFT[name])))


def sequence_mean(loss: Tensor, record: dict[str, Any]) -> Tensor:
    return aggregate(loss, mask(record["mask"]), mode="sequence_mean")


def inputs(record: dict[str, Any], *names: str) -> list[Tensor]:
    return [tensor(record[name]) for name in names]


@every("pair_losses")
def test_pair_losses_equal_lightrft(record: dict[str, Any]) -> None:
    pair = inputs(record, "chosen", "rejected")
    assert_recorded(bradley_terry_loss(*pair, margin=record["margin"]).mean(), record["sigmoid"])
    assert_recorded(log_exp_loss(*pair).mean(), record["logexp"])
    assert_recorded(hps_loss(*pair).mean(), record["hps"])


@every("policy_losses")
def test_policy_losses_equal_lightrft(record: dict[str, Any]) -> None:
    given = *inputs(record, "logprobs", "old_logprobs", "advantages"), mask(record["mask"])
    clip = record["clip_range"]
    ppo = clipped_policy_loss(*given, clip_low=clip, clip_high=clip)
    assert_recorded(sequence_mean(ppo, record), record["ppo"])
    cpgd = cpgd_policy_loss(*given, clip_range=clip)
    assert_recorded(sequence_mean(cpgd, record), record["cpgd"])


@every("value_losses")
def test_value_losses_equal_lightrft(record: dict[str, Any]) -> None:
    given = *inputs(record, "values", "old_values", "returns"), mask(record["mask"])
    clipped = clipped_value_loss(*given, value_clip_range=record["value_clip_range"])
    assert_recorded(sequence_mean(clipped, record), record["clipped"])
    assert_recorded(sequence_mean(clipped_value_loss(*given), record), record["unclipped"])


@every("kl")
def test_kl_estimates_equal_lightrft(record: dict[str, Any]) -> None:
    pair = inputs(record, "logprobs", "ref_logprobs")
    kl = kl_estimate(*pair, estimator=record["estimator"])
    assert_recorded(kl * mask(record["mask"]), record["kl"])


@every("token_rewards")
def test_token_rewards_equal_lightrft(record: dict[str, Any]) -> None:
    given = *inputs(record, "scores", "kl"), mask(record["mask"])
    assert_recorded(shape_rewards(*given, kl_coef=record["kl_coef"]), record["rewards"])


@every("gae")
@pytest.mark.parametrize("outside", [0.0, float("nan")])
def test_generalized_advantages_equal_lightrft(record: dict[str, Any], outside: float) -> None:
    # it counts values and rewards outside the mask as zero: here they are not even read
    counts = mask(record["mask"])
    result = generalized_advantages(
        torch.where(counts, tensor(record["rewards"]), outside),
        torch.where(counts, tensor(record["values"]), outside),
        counts,
        gamma=record["gamma"],
        lam=record["lam"],
    )
    assert_recorded(result.advantages, record["advantages"])
    assert_recorded(result.returns, record["returns"])


@every("discounted_returns")
def test_discounted_returns_equal_lightrft(record: dict[str, Any]) -> None:
    given = tensor(record["rewards"]), mask(record["mask"])
    assert_recorded(discounted_returns(*given, gamma=record["gamma"]), record["returns"])


@every("group_scores")
def test_group_advantages_equal_lightrft(record: dict[str, Any]) -> None:
    scores, size = tensor(record["scores"]), {"num_generations": record["num_generations"]}
    assert_recorded(leave_one_out_advantages(scores, **size), record["rloo"])
    assert_recorded(group_mean_advantages(scores, **size), record["reinforce_baseline"])
    normalized = group_normalized_advantages(scores, eps=1e-9, **size)
    assert_recorded(normalized, record["group_norm"])


def test_the_adaptive_kl_coefficient_equals_lightrft() -> None:
    record = LIGHTRFT["adaptive_kl"]
    coef = record["init"]
    for step in record["steps"]:
        coef = adaptive_kl_coef(
            coef,
            step["current"],
            target=record["target"],
            horizon=record["horizon"],
            num_samples=step["n_steps"],
        )
        assert coef == pytest.approx(step["value"], rel=1e-12)
