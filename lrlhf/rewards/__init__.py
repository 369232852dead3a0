"""What scores a response: functions, learned models, and weighted mixtures of them."""

from lrlhf.rewards.function import (
    Completion,
    RewardError,
    RewardFunction,
    RewardValues,
    completion_text,
)
from lrlhf.rewards.learned import LearnedReward
from lrlhf.rewards.length_rewards import LengthPenalty, OverlongPenalty, RepetitionPenalty
from lrlhf.rewards.numeric_answer import NumericAnswer
from lrlhf.rewards.result import RewardResult
from lrlhf.rewards.rewards import Rewards
from lrlhf.rewards.task_score import ReasoningGymScore
from lrlhf.rewards.text_rewards import ExactMatch, RegexFormat

__all__ = [
    "Completion",
    "ExactMatch",
    "LearnedReward",
    "LengthPenalty",
    "NumericAnswer",
    "OverlongPenalty",
    "ReasoningGymScore",
    "RegexFormat",
    "RepetitionPenalty",
    "RewardError",
    "RewardFunction",
    "RewardResult",
    "RewardValues",
    "Rewards",
    "completion_text",
]
