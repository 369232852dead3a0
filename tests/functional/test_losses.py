"""The table of policy losses: what every name means."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from lrlhf.functional import POLICY_LOSSES, resolve_policy_loss

MASK = torch.tensor([[False, True, True]])
OLD = torch.tensor([[0.0, math.log(0.5), math.log(0.5)]])


def evaluate(
    name: str, ratios: tuple[float, float], advantage: float, **options: Any
) -> list[float]:
    loss = POLICY_LOSSES[name]
    logprobs = OLD + torch.tensor([[1.0, *ratios]]).log()
    advantages = torch.full((1,), advantage) if loss.level == "sequence" else advantage * MASK
    values: Tensor = loss.function(logprobs, OLD, advantages, MASK, **{**loss.options, **options})
    return values.flatten().tolist()


@pytest.mark.parametrize(
    ("name", "ratios", "advantage", "expected"),
    [
        ("sequence_clip", (1.25, 1.2), 1.0, [-1.2]),  # ratio 1.5
        ("sequence_clip", (0.5, 1.0), -1.0, [0.8]),
        ("token_clip", (1.5, 0.5), 1.0, [0, -1.2, -0.5]),
        ("gspo", (1.0, 1.21), 1.0, [-1.0004]),  # ratio 1.1
        ("gspo", (1.0, 0.81), -1.0, [0.9997]),
        ("gmpo", (1.25, 1.25), 1.0, [-1.25]),  # nothing is clipped
        ("gmpo", (9.0, 1.0), 1.0, [-math.exp(0.2)]),  # √(e^0.4 · 1)
        ("gmpo", (9.0, 1.0), -1.0, [3.0]),  # a bad token may become likelier
        ("gmpo", (0.25, 1.0), -1.0, [math.exp(-0.2)]),
        ("gmpo", (0.25, 1.0), 1.0, [-0.5]),
        ("dapo", (1.5, 0.5), 1.0, [0, -1.28, -0.5]),
        ("dapo", (9.0, 0.5), -1.0, [0, 9, 0.8]),  # no dual clip
        ("dr_grpo", (1.5, 0.5), 1.0, [0, -1.2, -0.5]),
        ("cispo", (8.0, 1.0), 1.0, [0, -5 * math.log(4), math.log(2)]),
        ("cpgd", (1.5, 0.5), 1.0, [0, -math.log(0.6), math.log(4)]),
        ("cpgd", (1.5, 0.5), -1.0, [0, math.log(0.75), math.log(0.4)]),
        ("reinforce", (1.5, 0.5), 1.0, [0, -1.5, -0.5]),
        ("luspo", (1.0, 1.21), 1.0, [-2 * 1.0025]),  # ratio 1.1, two tokens
        ("luspo", (1.0, 0.81), -1.0, [2 * 0.998]),
        # w = 1.2 · 0.5 = 0.6: 0.6² e^(3 · 0.4) = 1.195242, 0.6³ e^(2 · 0.4) = 0.480717
        ("vespo", (1.2, 0.5), 1.0, [0, -1.195242 * math.log(0.6), -1.195242 * math.log(0.25)]),
        ("vespo", (1.2, 0.5), -1.0, [0, 0.480717 * math.log(0.6), 0.480717 * math.log(0.25)]),
        # 4 σ(±½) = 2.4898 and 1.5102; 4/1.05 σ(±0.525) = 2.3936 and 1.4159
        ("sapo", (1.5, 0.5), 1.0, [0, -2.489837, -1.510163]),
        ("sapo", (1.5, 0.5), -1.0, [0, 2.393585, 1.415939]),
        # probabilities 0.75 and 0.25 are 0.25 from ½: those that the advantage moved are out
        ("dppo", (1.5, 0.5), 1.0, [0, 0, math.log(4) / 2]),
        ("dppo", (1.5, 0.5), -1.0, [0, 1.5 * math.log(0.75), 0]),
        ("dppo", (1.2, 0.7), 1.0, [0, -1.2 * math.log(0.6), -0.7 * math.log(0.35)]),
    ],
)
def test_defaults_by_hand(
    name: str, ratios: tuple[float, float], advantage: float, expected: list[float]
) -> None:
    assert evaluate(name, ratios, advantage) == pytest.approx(expected, abs=1e-6)
    assert len(expected) == {"sequence": 1, "token": 3}[POLICY_LOSSES[name].level]


def test_metrics_are_told_which_ratios_a_loss_clips() -> None:
    ranges = {name: POLICY_LOSSES[name].clip_range for name in ("dapo", "cpgd", "gspo")}
    assert ranges == {"dapo": (0.2, 0.28), "cpgd": (0.2, 0.2), "gspo": (3e-4, 4e-4)}
    assert POLICY_LOSSES["cispo"].clip_range == (math.inf, 4.0)  # ratios of at most 5
    assert POLICY_LOSSES["reinforce"].clip_range is None


def test_dapo_takes_a_dual_clip() -> None:
    assert evaluate("dapo", (9.0, 0.5), -1.0, dual_clip=3.0) == pytest.approx([0, 3, 0.8])


def mine(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:  # noqa: ARG001  the shape of a loss
    return -logprobs * advantages * mask


def test_names_and_paths_resolve_and_an_unknown_name_suggests_the_nearest() -> None:
    assert resolve_policy_loss("dapo") is POLICY_LOSSES["dapo"]
    found = resolve_policy_loss(f"{__name__}.mine")
    assert (found.level, found.aggregate, found.options) == ("token", "token_mean", {})
    assert found.function(OLD, OLD, OLD, MASK).shape == (1, 3)
    with pytest.raises(ValueError, match=r"unknown policy loss 'gsp'.*did you mean 'gspo'"):
        resolve_policy_loss("gsp")
