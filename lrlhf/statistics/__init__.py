"""Statistics of evaluations: intervals, paired comparisons, and metrics over several samples."""

from lrlhf.statistics.estimate import Estimate
from lrlhf.statistics.holm import holm
from lrlhf.statistics.paired import Variances, Wins, paired_difference, variances, wins
from lrlhf.statistics.power import detectable_difference, power, prompts_needed, seeds_needed
from lrlhf.statistics.sign_flips import mean_by_sign_flips

__all__ = [
    "Estimate",
    "Variances",
    "Wins",
    "detectable_difference",
    "holm",
    "mean_by_sign_flips",
    "paired_difference",
    "power",
    "prompts_needed",
    "seeds_needed",
    "variances",
    "wins",
]
