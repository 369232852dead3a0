"""Runs of a tiny reward model with LightRFT's losses, poolings and layers."""

from __future__ import annotations

import math
import random
import string
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.sensitivity import PROMPTS, as_asked
from benchmarks.staleness import TOKENIZER, TOKENS, fit_quietly
from lrlhf.datamodules import PreferenceDataModule
from lrlhf.models import HeadConfig, HeadedBackbone, RewardNetwork
from lrlhf.modules import OptimizerConfig, RewardModel
from tests.conftest import build_language_model

PAIRS_PER_STEP, HELD_OUT = 32, 256
TEMPERATURE = 0.07
"""LightRFT divides scores by it in training; there it is learnt, here it stays."""
MARGIN = 0.1
_OTHERS = string.digits + string.punctuation


def bt(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log σ(s_c - s_r - 0.1), with scores s between 0 and 1."""
    return F.softplus(MARGIN - _lead(chosen, rejected))


def hps(chosen: Tensor, rejected: Tensor) -> Tensor:
    """The cross-entropy of the two scores, which is that of Bradley-Terry without a margin."""
    return F.softplus(-_lead(chosen, rejected))


def bt_scaled(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log σ((s_c - s_r) / 0.07 - 0.1)."""
    return F.softplus(MARGIN - _lead(chosen, rejected) / TEMPERATURE)


def hps_scaled(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log σ((s_c - s_r) / 0.07)."""
    return F.softplus(-_lead(chosen, rejected) / TEMPERATURE)


def _lead(chosen: Tensor, rejected: Tensor) -> Tensor:
    return chosen.sigmoid() - rejected.sigmoid()


LOSSES = ("bt", "hps", "bt_scaled", "hps_scaled")


@dataclass(frozen=True, kw_only=True)
class RewardModelRun:
    """A run on pairs of responses to the prompts of `benchmarks/sensitivity.py`.

    The better response follows its prompt in more of its bytes. A label of the training pairs is
    right with probability σ(5 · gap of the shares), those of the held-out pairs always.

    Args:
        loss: A name of `LOSSES`.
        pooling: What the head reads.
        layer: Of which layer; -1 is the last one.
        lr: Learning rate.
        steps: In all.
    """

    loss: str
    pooling: Literal["attention", "last"] = "attention"
    layer: int = -1
    lr: float = 3e-3
    steps: int = 60

    def __call__(self, seed: int) -> dict[str, Any]:
        """Train once: accuracy on held-out pairs, and the distribution of their scores."""
        L.seed_everything(seed, verbose=False)
        body = build_language_model(TOKENIZER).base_model
        heads = HeadConfig(pooling=self.pooling, layer=self.layer, head="mlp")
        module = RewardModel(
            RewardNetwork(HeadedBackbone(body, heads)),
            tokenizer=TOKENIZER,
            loss=f"{__name__}.{self.loss}",
            optimizer=OptimizerConfig(lr=self.lr),
            seed=seed,
        )
        data = PreferenceDataModule(
            pairs(PAIRS_PER_STEP * self.steps, seed, noisy=True),
            batch_size=PAIRS_PER_STEP,
            seed=seed,
        )
        fit_quietly(module, steps=self.steps, data=data)
        held_out = pairs(HELD_OUT, 1000 + seed, noisy=False)
        prompts = [row["prompt"] for row in held_out]
        chosen, rejected = (
            torch.tensor(
                module.score(prompts, [row[side] for row in held_out], batch_size=256)
            ).sigmoid()
            for side in ("chosen", "rejected")
        )
        return {
            "accuracy": float((chosen > rejected).double().mean()),
            "gap": float((chosen - rejected).double().mean()),
            "chosen": _quantiles(chosen),
            "rejected": _quantiles(rejected),
        }


def _quantiles(scores: Tensor) -> list[float]:
    """Return the 5, 25, 50, 75 and 95 % quantiles."""
    return torch.quantile(scores, torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])).tolist()


def pairs(count: int, seed: int, *, noisy: bool) -> list[dict[str, str]]:
    """Return pairs of responses that follow their prompt in different shares of their bytes."""
    draw = random.Random(seed)
    rows = []
    while len(rows) < count:
        prompt = draw.choice(PROMPTS)
        answers = [_response(draw) for _ in range(2)]
        shares = as_asked([prompt] * 2, answers)
        gap = abs(shares[0] - shares[1])
        if not gap:
            continue
        if shares[0] < shares[1]:
            answers.reverse()
        if noisy and draw.random() > 1 / (1 + math.exp(-5 * gap)):
            answers.reverse()
        rows.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
    return rows


def _response(draw: random.Random) -> str:
    count = draw.randint(0, TOKENS)
    kinds = [string.ascii_letters] * count + [_OTHERS] * (TOKENS - count)
    draw.shuffle(kinds)
    return "".join(map(draw.choice, kinds))
