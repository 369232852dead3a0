"""Metrics of TRL's RLOO, and its reward-model loss, on recorded inputs.

Its advantages and its loss are in `tests/modules/test_policy_objective.py`, on the same records.
"""

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
    masked_mean,
    sequence_ratio,
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


def test_the_records_hold_every_combination_of_the_options() -> None:
    options = {
        (r["num_generations"], r["beta"], r["reward_clip_range"] is None, r["normalize_advantages"])
        for r in TRL["rloo"]
    }
    assert len(options) == len(TRL["rloo"]) == 24


@RLOO
def test_metrics_equal_trl(record: dict[str, Any]) -> None:
    expected, counts = record["expected"], mask(record["completion_mask"])
    new, old = tensor(record["new_logprobs"]), tensor(record["old_logprobs"])
    kl = masked_mean(kl_estimate(old, tensor(record["ref_logprobs"])), counts)
    if record["beta"]:
        assert_recorded(kl, expected["kl"])
    ratio = sequence_ratio(new, old, counts)
    fractions = clip_fractions(
        ratio,
        tensor(expected["advantages"]),
        torch.ones_like(ratio, dtype=torch.bool),
        clip_low=record["epsilon_low"],
        clip_high=record["epsilon_high"],
    )
    assert_recorded(fractions.low, expected["clip_low_mean"])
    assert_recorded(fractions.high, expected["clip_high_mean"])
    assert_recorded(fractions.low + fractions.high, expected["clip_region_mean"])
    scores, generations = weighted_scores(record), record["num_generations"]
    deviations = group_mean_advantages(scores, num_generations=generations)
    flat = (deviations == 0) & has_baseline(scores, num_generations=generations)
    fraction = flat.view(-1, generations).any(dim=1).float().mean()
    assert_recorded(fraction, expected["frac_reward_zero_std"])


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
