"""What scores a response: functions, learned models, and the runner that calls them all."""

from lrlhf.rewards.builtin import (
    BUILTIN_REWARDS,
    ExactMatch,
    LengthShaping,
    NumericAnswer,
    OverlongPenalty,
    ReasoningGymScore,
    RegexFormat,
    RepetitionPenalty,
)
from lrlhf.rewards.completions import Completion, completion_text
from lrlhf.rewards.functions import RewardFunction
from lrlhf.rewards.result import RewardError, RewardResult
from lrlhf.rewards.runner import Rewards

__all__ = [
    "BUILTIN_REWARDS",
    "Completion",
    "ExactMatch",
    "LengthShaping",
    "NumericAnswer",
    "OverlongPenalty",
    "ReasoningGymScore",
    "RegexFormat",
    "RepetitionPenalty",
    "RewardError",
    "RewardFunction",
    "RewardResult",
    "Rewards",
    "completion_text",
]
