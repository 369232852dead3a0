"""The maths: tensors in, tensors out, without state, files or communication."""

from typing import TYPE_CHECKING

from lrlhf.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lrlhf.functional.advantages import (
        AdvantagesAndReturns,
        discounted_returns,
        generalized_advantages,
        group_mean_advantages,
        group_normalized_advantages,
        has_baseline,
        leave_one_out_advantages,
    )
    from lrlhf.functional.algorithm import (
        Algorithm,
        Estimator,
        EstimatorInputs,
        PolicyLoss,
        counted_scores,
        penalized_scores,
        returns_to_go,
        spread_over_tokens,
        token_rewards,
    )
    from lrlhf.functional.algorithms import (
        ALGORITHMS,
        ESTIMATORS,
        POLICY_LOSSES,
        resolve_algorithm,
        resolve_estimator,
        resolve_policy_loss,
    )
    from lrlhf.functional.algorithms.cispo import cispo_policy_loss
    from lrlhf.functional.algorithms.clip_cov import clip_cov_policy_loss
    from lrlhf.functional.algorithms.cpgd import cpgd_policy_loss
    from lrlhf.functional.algorithms.dppo import divergence_masked_policy_loss
    from lrlhf.functional.algorithms.gmpo import geometric_mean_policy_loss
    from lrlhf.functional.algorithms.kl_cov import kl_cov_policy_loss
    from lrlhf.functional.algorithms.luspo import length_scaled_policy_loss
    from lrlhf.functional.algorithms.sapo import soft_gate_policy_loss
    from lrlhf.functional.algorithms.vespo import gamma_weighted_policy_loss
    from lrlhf.functional.distillation import generalized_jsd, teacher_advantages
    from lrlhf.functional.importance import (
        IMPORTANCE_MODES,
        IMPORTANCE_PRESETS,
        REJECTION_CRITERIA,
        ImportanceMode,
        importance_weights,
        rejection_mask,
    )
    from lrlhf.functional.kl import (
        adaptive_kl_coef,
        kl_estimate,
        shape_rewards,
        unbiased_kl_estimate,
    )
    from lrlhf.functional.linear_logprobs import LinearHead
    from lrlhf.functional.logprobs import (
        LogprobsAndEntropy,
        TokenStatistics,
        token_logprobs,
        token_statistics,
    )
    from lrlhf.functional.masking import masked_mean, masked_sum, standardize, whiten
    from lrlhf.functional.policy import (
        ClipFractions,
        PolicyMetrics,
        aggregate,
        clip_fractions,
        clipped_policy_loss,
        high_entropy_mask,
        importance_weighted_policy_loss,
        off_policy_sequence_mask,
        policy_metrics,
        sequence_clipped_policy_loss,
        sequence_ratio,
        token_covariance,
    )
    from lrlhf.functional.preference import (
        PREFERENCE_LOSSES,
        PreferenceLoss,
        hinge_loss,
        implicit_rewards,
        ipo_loss,
    )
    from lrlhf.functional.reward import (
        bradley_terry_loss,
        center_penalty,
        hps_loss,
        log_exp_loss,
        tie_loss,
    )
    from lrlhf.functional.supervised import TOKEN_LOSSES, dft_loss, nll_loss
    from lrlhf.functional.turns import (
        observation_numbers,
        spread_over_turns,
        turn_ends,
        turn_numbers,
        turn_sums,
    )
    from lrlhf.functional.value_loss import clipped_value_loss
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "ALGORITHMS",
    "ESTIMATORS",
    "IMPORTANCE_MODES",
    "IMPORTANCE_PRESETS",
    "POLICY_LOSSES",
    "PREFERENCE_LOSSES",
    "REJECTION_CRITERIA",
    "TOKEN_LOSSES",
    "AdvantagesAndReturns",
    "Algorithm",
    "ClipFractions",
    "Estimator",
    "EstimatorInputs",
    "ImportanceMode",
    "LinearHead",
    "LogprobsAndEntropy",
    "PolicyLoss",
    "PolicyMetrics",
    "PreferenceLoss",
    "TokenStatistics",
    "adaptive_kl_coef",
    "aggregate",
    "bradley_terry_loss",
    "center_penalty",
    "cispo_policy_loss",
    "clip_cov_policy_loss",
    "clip_fractions",
    "clipped_policy_loss",
    "clipped_value_loss",
    "counted_scores",
    "cpgd_policy_loss",
    "dft_loss",
    "discounted_returns",
    "divergence_masked_policy_loss",
    "gamma_weighted_policy_loss",
    "generalized_advantages",
    "generalized_jsd",
    "geometric_mean_policy_loss",
    "group_mean_advantages",
    "group_normalized_advantages",
    "has_baseline",
    "high_entropy_mask",
    "hinge_loss",
    "hps_loss",
    "implicit_rewards",
    "importance_weighted_policy_loss",
    "importance_weights",
    "ipo_loss",
    "kl_cov_policy_loss",
    "kl_estimate",
    "leave_one_out_advantages",
    "length_scaled_policy_loss",
    "log_exp_loss",
    "masked_mean",
    "masked_sum",
    "nll_loss",
    "observation_numbers",
    "off_policy_sequence_mask",
    "penalized_scores",
    "policy_metrics",
    "rejection_mask",
    "resolve_algorithm",
    "resolve_estimator",
    "resolve_policy_loss",
    "returns_to_go",
    "sequence_clipped_policy_loss",
    "sequence_ratio",
    "shape_rewards",
    "soft_gate_policy_loss",
    "spread_over_tokens",
    "spread_over_turns",
    "standardize",
    "teacher_advantages",
    "tie_loss",
    "token_covariance",
    "token_logprobs",
    "token_rewards",
    "token_statistics",
    "turn_ends",
    "turn_numbers",
    "turn_sums",
    "unbiased_kl_estimate",
    "whiten",
]
