"""Statistics of evaluations: intervals, paired comparisons, and metrics over several samples."""

from typing import TYPE_CHECKING

from lrlhf.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lrlhf.statistics.intervals import Estimate, MeanInterval, mean_interval
    from lrlhf.statistics.paired import (
        Variances,
        Wins,
        detectable_difference,
        holm,
        mean_by_sign_flips,
        paired_difference,
        power,
        prompts_needed,
        seeds_needed,
        variances,
        wins,
    )
    from lrlhf.statistics.repeated_samples import pass_at_k
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "Estimate",
    "MeanInterval",
    "Variances",
    "Wins",
    "detectable_difference",
    "holm",
    "mean_by_sign_flips",
    "mean_interval",
    "paired_difference",
    "pass_at_k",
    "power",
    "prompts_needed",
    "seeds_needed",
    "variances",
    "wins",
]
