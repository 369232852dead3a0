"""What scores a response: functions, learned models, and weighted mixtures of them."""

from lrlhf.rewards.dispatch import out_of_time
from lrlhf.rewards.function import (
    Completion,
    PartialValues,
    RewardError,
    RewardFunction,
    RewardValues,
    completion_text,
)
from lrlhf.rewards.isolated import IsolatedReward
from lrlhf.rewards.learned import LearnedReward
from lrlhf.rewards.length_rewards import LengthPenalty, OverlongPenalty, RepetitionPenalty
from lrlhf.rewards.numeric_answer import NumericAnswer
from lrlhf.rewards.remote import RemoteReward
from lrlhf.rewards.result import RewardResult
from lrlhf.rewards.rewards import Rewards
from lrlhf.rewards.task_score import ReasoningGymScore
from lrlhf.rewards.text_rewards import ExactMatch, RegexFormat

__all__ = [
    "Completion",
    "ExactMatch",
    "IsolatedReward",
    "LearnedReward",
    "LengthPenalty",
    "NumericAnswer",
    "OverlongPenalty",
    "PartialValues",
    "ReasoningGymScore",
    "RegexFormat",
    "RemoteReward",
    "RepetitionPenalty",
    "RewardError",
    "RewardFunction",
    "RewardResult",
    "RewardValues",
    "Rewards",
    "completion_text",
    "out_of_time",
]
