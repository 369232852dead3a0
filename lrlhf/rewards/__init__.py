"""What scores a response: functions, learned models, and weighted mixtures of them."""

from typing import TYPE_CHECKING

from lrlhf.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lrlhf.rewards.dispatch import out_of_time
    from lrlhf.rewards.function import (
        Completion,
        CompletionText,
        CompletionTurns,
        PartialValues,
        RewardError,
        RewardFunction,
        RewardValues,
        StepReward,
        StepValues,
        TextSegment,
        completion_segments,
        completion_text,
    )
    from lrlhf.rewards.functions.numeric_answer import NumericAnswer
    from lrlhf.rewards.functions.task_score import ReasoningGymScore
    from lrlhf.rewards.functions.text_rewards import (
        ExactMatch,
        LengthPenalty,
        OverlongPenalty,
        RegexFormat,
        RepetitionPenalty,
    )
    from lrlhf.rewards.functions.verdict_rewards import VerdictCorrect, VerdictFormat
    from lrlhf.rewards.isolation.isolated import IsolatedReward
    from lrlhf.rewards.judge.judge_reward import JudgeReward
    from lrlhf.rewards.learned import LearnedReward
    from lrlhf.rewards.process import ProcessReward
    from lrlhf.rewards.remote.remote_reward import RemoteReward
    from lrlhf.rewards.remote.service_client import ServiceReward
    from lrlhf.rewards.remote.vllm_reward import VLLMReward
    from lrlhf.rewards.reward_values import RewardResult
    from lrlhf.rewards.rewards import Rewards
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "Completion",
    "CompletionText",
    "CompletionTurns",
    "ExactMatch",
    "IsolatedReward",
    "JudgeReward",
    "LearnedReward",
    "LengthPenalty",
    "NumericAnswer",
    "OverlongPenalty",
    "PartialValues",
    "ProcessReward",
    "ReasoningGymScore",
    "RegexFormat",
    "RemoteReward",
    "RepetitionPenalty",
    "RewardError",
    "RewardFunction",
    "RewardResult",
    "RewardValues",
    "Rewards",
    "ServiceReward",
    "StepReward",
    "StepValues",
    "TextSegment",
    "VLLMReward",
    "VerdictCorrect",
    "VerdictFormat",
    "completion_segments",
    "completion_text",
    "out_of_time",
]
