"""The maths: tensors in, tensors out, without state, files or communication."""

from lrlhf.functional.advantages import (
    AdvantagesAndReturns,
    discounted_returns,
    generalized_advantages,
    group_mean_advantages,
    group_normalized_advantages,
    has_baseline,
    leave_one_out_advantages,
)
from lrlhf.functional.estimators import ESTIMATORS, Estimator, EstimatorInputs, resolve_estimator
from lrlhf.functional.importance import IMPORTANCE_MODES, ImportanceMode, importance_weights
from lrlhf.functional.kl import adaptive_kl_coef, kl_estimate, shape_rewards
from lrlhf.functional.linear_logprobs import LinearHead
from lrlhf.functional.logprobs import LogprobsAndEntropy, token_logprobs
from lrlhf.functional.losses import POLICY_LOSSES, PolicyLoss, resolve_policy_loss
from lrlhf.functional.masking import masked_mean, masked_sum, standardize, whiten
from lrlhf.functional.policy import (
    ClipFractions,
    PolicyMetrics,
    aggregate,
    cispo_policy_loss,
    clip_fractions,
    clipped_policy_loss,
    cpgd_policy_loss,
    high_entropy_mask,
    importance_weighted_policy_loss,
    policy_metrics,
    sequence_clipped_policy_loss,
    sequence_ratio,
)
from lrlhf.functional.reward import (
    bradley_terry_loss,
    center_penalty,
    hps_loss,
    log_exp_loss,
    tie_loss,
)
from lrlhf.functional.value_loss import clipped_value_loss

__all__ = [
    "ESTIMATORS",
    "IMPORTANCE_MODES",
    "POLICY_LOSSES",
    "AdvantagesAndReturns",
    "ClipFractions",
    "Estimator",
    "EstimatorInputs",
    "ImportanceMode",
    "LinearHead",
    "LogprobsAndEntropy",
    "PolicyLoss",
    "PolicyMetrics",
    "adaptive_kl_coef",
    "aggregate",
    "bradley_terry_loss",
    "center_penalty",
    "cispo_policy_loss",
    "clip_fractions",
    "clipped_policy_loss",
    "clipped_value_loss",
    "cpgd_policy_loss",
    "discounted_returns",
    "generalized_advantages",
    "group_mean_advantages",
    "group_normalized_advantages",
    "has_baseline",
    "high_entropy_mask",
    "hps_loss",
    "importance_weighted_policy_loss",
    "importance_weights",
    "kl_estimate",
    "leave_one_out_advantages",
    "log_exp_loss",
    "masked_mean",
    "masked_sum",
    "policy_metrics",
    "resolve_estimator",
    "resolve_policy_loss",
    "sequence_clipped_policy_loss",
    "sequence_ratio",
    "shape_rewards",
    "standardize",
    "tie_loss",
    "token_logprobs",
    "whiten",
]
