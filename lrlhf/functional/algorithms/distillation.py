"""On-policy distillation without rewards: the teacher's term alone, and no advantage beside it.

    L = -mean over tokens of ρ_t A_t,       A_t = -coef · (log π_old(y_t) - log T(y_t))

with the teacher in the reward, see `lrlhf.functional.distillation.teacher_advantages`, or the mean
over tokens of a divergence in the loss.

Reference:
    Agarwal et al. 2024 (GKD), https://arxiv.org/abs/2306.13649; Lu & Thinking Machines Lab 2025,
    https://thinkingmachines.ai/blog/on-policy-distillation
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lrlhf.functional.algorithm import Algorithm, Estimator, EstimatorInputs
from lrlhf.functional.algorithms.reinforce import POLICY_GRADIENT


def no_advantages(inputs: EstimatorInputs) -> Float[Tensor, "B T"]:
    """Leave scores out: what the teacher says is added afterwards."""
    return torch.zeros_like(inputs.kl)


ALGORITHM = Algorithm(
    name="distillation",
    estimator=Estimator(no_advantages, uses_kl=False),
    loss=POLICY_GRADIENT,
    kl_coef=0.0,
)
