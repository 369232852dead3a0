"""REINFORCE leave-one-out and its siblings, for any causal language model."""

from __future__ import annotations

from lrlhf.modules.policy.policy_module import PolicyModule


class RLOO(PolicyModule):
    """Trains a policy with REINFORCE and a leave-one-out baseline, or one of its siblings.

    The defaults are those of TRL's ``RLOOTrainer``: clip the raw score, subtract beta times the
    summed KL, leave one out, one clipped ratio per sequence. The arguments are those of
    `PolicyModule`.

    Reference:
        Ahmadian et al. 2024, "Back to Basics", eq. 8, https://arxiv.org/abs/2402.14740
    """
