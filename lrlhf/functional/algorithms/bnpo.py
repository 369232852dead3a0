"""BNPO as TRL has it: GRPO with every token counting alike.

    L = -Σ_i Σ_t [min(ρ_it A_i, clip(ρ_it, 1 - ε, 1 + ε) A_i) - kl_coef · k3_it] / tokens

TRL divides by the tokens of one micro-batch of one process, here they are those of the optimizer
step, so that no split changes the loss. The paper of this name (Xiao et al. 2025) is about
something else, a normalisation of rewards by a Beta distribution, which TRL does not have either.

Reference:
    ``loss_type="bnpo"`` of TRL 1.16; the name: Xiao et al. 2025, https://arxiv.org/abs/2506.02864
"""

from __future__ import annotations

from lrlhf.functional.algorithm import Algorithm
from lrlhf.functional.algorithms.grpo import GROUP_Z_SCORE
from lrlhf.functional.algorithms.ppo import PPO_CLIP

ALGORITHM = Algorithm(name="bnpo", estimator=GROUP_Z_SCORE, loss=PPO_CLIP)
