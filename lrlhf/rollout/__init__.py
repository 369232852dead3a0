"""From prompts to experience: engines, sampling, records, minibatches."""

from lrlhf.rollout.collector import Collected, Collector
from lrlhf.rollout.engine import Response, RolloutEngine, assemble_rollout
from lrlhf.rollout.listener import RolloutListener
from lrlhf.rollout.minibatches import (
    micro_batch_rows,
    micro_batches,
    minibatches,
    nearest_divisors,
    trim,
)
from lrlhf.rollout.records import (
    completions_for_rewards,
    plain_json,
    response_ids,
    rollout_records,
)
from lrlhf.rollout.sampling import Sampling
from lrlhf.rollout.transformers_engine import TransformersEngine

__all__ = [
    "Collected",
    "Collector",
    "Response",
    "RolloutEngine",
    "RolloutListener",
    "Sampling",
    "TransformersEngine",
    "assemble_rollout",
    "completions_for_rewards",
    "micro_batch_rows",
    "micro_batches",
    "minibatches",
    "nearest_divisors",
    "plain_json",
    "response_ids",
    "rollout_records",
    "trim",
]
