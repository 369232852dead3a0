"""Losses of a language model on given texts and on pairs of answers, by hand.

Against TRL's trainers they are in `tests/modules/test_trl_training.py`.
"""

import math

import pytest
import torch

from lrlhf.functional.preference import PREFERENCE_LOSSES, hinge_loss, implicit_rewards, ipo_loss
from lrlhf.functional.supervised import TOKEN_LOSSES

NAN = float("nan")
MASK = torch.tensor([[False, True, True], [False, True, False]])
LOGPROBS = torch.tensor([[NAN, -1.0, -3.0], [-math.inf, -2.0, NAN]])
REFERENCE = torch.tensor([[-math.inf, -2.0, -2.5], [NAN, -1.0, -math.inf]])


def test_implicit_rewards_are_those_of_the_answers_tokens() -> None:
    # log-ratios 1 - 0.5 and -1
    found = implicit_rewards(LOGPROBS, REFERENCE, MASK, beta=0.2)
    assert found.tolist() == pytest.approx([0.1, -0.2])
    mean = implicit_rewards(LOGPROBS, REFERENCE, MASK, beta=0.2, length_normalized=True)
    assert mean.tolist() == pytest.approx([0.05, -0.2])
    alone = implicit_rewards(LOGPROBS, None, MASK, beta=0.2)
    assert alone.tolist() == pytest.approx([-0.8, -0.4])
    # an answer without tokens has none
    assert (
        implicit_rewards(LOGPROBS, None, ~MASK & False, beta=2.0, length_normalized=True)
        .eq(0)
        .all()
    )


def test_losses_of_implicit_rewards() -> None:
    chosen, rejected = torch.tensor([0.5, 0.25, 2.0]), torch.tensor([0.25, 0.5, 0.0])
    # log-ratios apart by ½, -½ and 4; the aim is 1
    assert ipo_loss(chosen, rejected, beta=0.5).tolist() == [0.25, 2.25, 9.0]
    assert hinge_loss(chosen, rejected).tolist() == [0.75, 1.25, 0.0]


def test_every_preference_loss_is_that_of_its_paper() -> None:
    found = {
        name: (one.reference, one.length_normalized, one.takes_beta, one.beta, one.margin)
        for name, one in PREFERENCE_LOSSES.items()
    }
    assert found == {
        "sigmoid": (True, False, False, 0.1, 0.0),  # Rafailov et al. 2023
        "sigmoid_norm": (True, True, False, 2.0, 0.0),  # of rewards per token
        "ipo": (True, True, True, 0.1, 0.0),  # Azar et al. 2023, over tokens as in TRL
        "hinge": (True, False, False, 0.1, 0.0),  # Zhao et al. 2023
        "simpo": (False, True, False, 2.0, 1.0),  # Meng et al. 2024
        "sppo_hard": (True, False, True, 0.1, 0.0),  # Wu et al. 2024
        **dict.fromkeys(
            ("robust", "exo_pair", "nca_pair", "bco_pair", "apo_zero", "apo_down", "discopop"),
            (True, False, False, 0.1, 0.0),  # as in TRL
        ),
    }


def test_losses_of_tokens_read_nothing_outside_the_mask() -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    nll = TOKEN_LOSSES["nll"](logprobs, MASK)
    assert nll.tolist() == [[0, 1, 3], [0, 2, 0]]
    dft = TOKEN_LOSSES["dft"](logprobs, MASK)
    weights = [math.exp(-1), math.exp(-3), math.exp(-2)]
    assert dft[MASK].tolist() == pytest.approx(
        [weight * loss for weight, loss in zip(weights, (1, 3, 2), strict=True)]
    )
    assert (dft[~MASK] == 0).all()
    # the weights are constants
    (gradient,) = torch.autograd.grad(dft[MASK].sum(), logprobs)
    assert gradient[MASK].tolist() == pytest.approx([-weight for weight in weights])
