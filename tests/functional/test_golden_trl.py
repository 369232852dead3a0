"""TRL's RLOO from rewards to loss, and its reward-model loss, on recorded inputs."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lrlhf.functional import (
    bradley_terry_loss,
    center_penalty,
    clip_fractions,
    group_mean_advantages,
    has_baseline,
    kl_estimate,
    leave_one_out_advantages,
    masked_mean,
    masked_sum,
    sequence_clipped_policy_loss,
    sequence_ratio,
    standardize,
)

from .recorded import TRL, assert_recorded, mask, tensor

RLOO = pytest.mark.parametrize("record", TRL["rloo"], ids=range(len(TRL["rloo"])))


def weighted_scores(record: dict[str, Any]) -> Tensor:
    """None counts as nothing; a row of nothing but None is unscorable."""
    nan = float("nan")
    table = tensor(
        [[nan if r is None else r for r in row] for row in record["rewards_per_function"]]
    )
    total = (table * tensor(record["reward_weights"])).nansum(dim=1)
    return torch.where(table.isnan().all(dim=1), nan, total)


def advantages_of(record: dict[str, Any]) -> Tensor:
    scores, counts = weighted_scores(record), mask(record["completion_mask"])
    if record["reward_clip_range"] is not None:
        scores = scores.clamp(*record["reward_clip_range"])
    if record["beta"]:
        kl = kl_estimate(tensor(record["old_logprobs"]), tensor(record["ref_logprobs"]))
        scores = scores - record["beta"] * masked_sum(kl, counts, dim=1)
    generations = record["num_generations"]
    advantages = leave_one_out_advantages(scores, num_generations=generations)
    if record["normalize_advantages"]:
        compared = has_baseline(scores, num_generations=generations)
        advantages = standardize(advantages, compared, eps=1e-4)
    return advantages


def test_the_records_hold_every_combination_of_the_options() -> None:
    options = {
        (r["num_generations"], r["beta"], r["reward_clip_range"] is None, r["normalize_advantages"])
        for r in TRL["rloo"]
    }
    assert len(options) == len(TRL["rloo"]) == 24


@RLOO
def test_advantages_equal_trl(record: dict[str, Any]) -> None:
    assert_recorded(advantages_of(record), record["expected"]["advantages"])


@RLOO
def test_the_whole_pipeline_equals_trl(record: dict[str, Any]) -> None:
    loss = sequence_clipped_policy_loss(
        tensor(record["new_logprobs"]),
        tensor(record["old_logprobs"]),
        advantages_of(record),
        mask(record["completion_mask"]),
        clip_low=record["epsilon_low"],
        clip_high=record["epsilon_high"],
    )
    assert_recorded(loss.mean(), record["expected"]["loss"])


@RLOO
def test_kl_equals_trl_as_a_mean_over_tokens(record: dict[str, Any]) -> None:
    kl = kl_estimate(tensor(record["old_logprobs"]), tensor(record["ref_logprobs"]))
    if record["expected"]["kl"] is None:
        assert record["beta"] == 0
        return
    assert_recorded(masked_mean(kl, mask(record["completion_mask"])), record["expected"]["kl"])


@RLOO
def test_clip_fractions_equal_trl(record: dict[str, Any]) -> None:
    ratio = sequence_ratio(
        tensor(record["new_logprobs"]),
        tensor(record["old_logprobs"]),
        mask(record["completion_mask"]),
    )
    fractions = clip_fractions(
        ratio,
        tensor(record["expected"]["advantages"]),
        torch.ones_like(ratio, dtype=torch.bool),
        clip_low=record["epsilon_low"],
        clip_high=record["epsilon_high"],
    )
    assert_recorded(fractions.low, record["expected"]["clip_low_mean"])
    assert_recorded(fractions.high, record["expected"]["clip_high_mean"])
    assert_recorded(fractions.low + fractions.high, record["expected"]["clip_region_mean"])


@RLOO
def test_groups_without_variance_equal_trl(record: dict[str, Any]) -> None:
    scores, generations = weighted_scores(record), record["num_generations"]
    deviations = group_mean_advantages(scores, num_generations=generations)
    compared = has_baseline(scores, num_generations=generations)
    flat = (deviations == 0) & compared
    fraction = flat.view(-1, generations).any(dim=1).float().mean()
    assert_recorded(fraction, record["expected"]["frac_reward_zero_std"])


@pytest.mark.parametrize("record", TRL["reward"], ids=range(len(TRL["reward"])))
def test_the_reward_model_loss_equals_trl(record: dict[str, Any]) -> None:
    chosen, rejected = tensor(record["chosen"]), tensor(record["rejected"])
    margin = 0.0 if record["margin"] is None else tensor(record["margin"])
    loss = bradley_terry_loss(chosen, rejected, margin=margin).mean()
    if record["center_rewards_coefficient"] is not None:
        penalty = center_penalty(chosen, rejected).mean()
        loss = loss + record["center_rewards_coefficient"] * penalty
    assert_recorded(loss, record["expected"]["loss"])
    assert_recorded((chosen > rejected).float().mean(), record["expected"]["accuracy"])
    assert_recorded((chosen - rejected).mean(), record["expected"]["mean_margin"])
