"""Short names of the reward functions that come with the library."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lrlhf.rewards.function import RewardFunction
from lrlhf.rewards.learned import LearnedReward
from lrlhf.rewards.length_rewards import LengthPenalty, OverlongPenalty, RepetitionPenalty
from lrlhf.rewards.numeric_answer import NumericAnswer
from lrlhf.rewards.task_score import ReasoningGymScore
from lrlhf.rewards.text_rewards import ExactMatch, RegexFormat

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
