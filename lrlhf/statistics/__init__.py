"""Statistics of evaluations: intervals, paired comparisons, and metrics over several samples."""

from lrlhf.statistics.corrected_tests import holm
from lrlhf.statistics.estimate import Estimate
from lrlhf.statistics.intervals import MeanInterval, mean_interval
from lrlhf.statistics.paired import Variances, Wins, paired_difference, variances, wins
from lrlhf.statistics.repeated_samples import pass_at_k
from lrlhf.statistics.sample_sizes import detectable_difference, power, prompts_needed, seeds_needed
from lrlhf.statistics.sign_flips import mean_by_sign_flips

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
