"""Short names of the reward functions that come with the library."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lrlhf.rewards.function import RewardFunction
from lrlhf.rewards.functions.length_rewards import LengthPenalty, OverlongPenalty, RepetitionPenalty
from lrlhf.rewards.functions.numeric_answer import NumericAnswer
from lrlhf.rewards.functions.task_score import ReasoningGymScore
from lrlhf.rewards.functions.text_rewards import ExactMatch, RegexFormat
from lrlhf.rewards.learned import LearnedReward

BUILTINS: Mapping[str, type[RewardFunction]] = MappingProxyType(
    {
        "exact_match": ExactMatch,
        "learned_reward": LearnedReward,
        "length_penalty": LengthPenalty,
        "numeric_answer": NumericAnswer,
        "overlong_penalty": OverlongPenalty,
        "reasoning_gym_score": ReasoningGymScore,
        "regex_format": RegexFormat,
        "repetition_penalty": RepetitionPenalty,
    }
)
