"""VAPO: PPO whose λ grows with the length of the response, with a critic of its own λ.

    λ_i = max(0, 1 - 1 / (α l_i))     for the advantages, α = 0.05;     λ = 1 for the critic
    L   = -Σ_i Σ_t min(ρ_it A_it, clip(ρ_it, 1 - 0.2, 1 + 0.28) A_it) / all tokens,   no KL penalty

Its other parts are options of the run: the critic that learns first is ``update.freeze_steps``. The
likelihood of right responses that the paper adds to the loss is not here.

Reference:
    Yue et al. 2025, §4, https://arxiv.org/abs/2504.05118
"""

from __future__ import annotations

from lrlhf.functional.algorithm import Algorithm
from lrlhf.functional.algorithms import dapo, ppo

ALGORITHM = Algorithm(
    name="vapo",
    estimator=ppo.ALGORITHM.estimator._replace(options={"length_alpha": 0.05, "value_lam": 1.0}),
    loss=dapo.ALGORITHM.loss,
    kl_in="reward",
    kl_coef=0.0,
)
