"""From prompts to experience: engines, sampling, records, minibatches."""

from typing import TYPE_CHECKING

from lrlhf.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lrlhf.rollout.collector import Collected, Collector, extra_values_of
    from lrlhf.rollout.dynamic_sampling import collect_different, groups_differ
    from lrlhf.rollout.engines.engine import Capabilities, EngineWrapper, ProbeGap, RolloutEngine
    from lrlhf.rollout.engines.policy_weights import PolicyWeights, WeightSyncError
    from lrlhf.rollout.engines.synced_engine import EngineFailure, SyncedEngine
    from lrlhf.rollout.engines.transformers_engine import TransformersEngine
    from lrlhf.rollout.generative_reward import GenerativeReward
    from lrlhf.rollout.listener import RolloutListener
    from lrlhf.rollout.minibatches import MicroBatch, micro_batch_rows, plan_micro_batches, trim
    from lrlhf.rollout.responses import (
        Response,
        Segment,
        assemble_rollout,
        continued_prompts,
        response_ids,
        responses_of,
    )
    from lrlhf.rollout.rollout_queue import RolloutQueue
    from lrlhf.rollout.sampling import Sampling
    from lrlhf.rollout.storage import load_rollout, save_rollout
    from lrlhf.rollout.vllm import VLLMEngine, VLLMServerEngine
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "Capabilities",
    "Collected",
    "Collector",
    "EngineFailure",
    "EngineWrapper",
    "GenerativeReward",
    "MicroBatch",
    "PolicyWeights",
    "ProbeGap",
    "Response",
    "RolloutEngine",
    "RolloutListener",
    "RolloutQueue",
    "Sampling",
    "Segment",
    "SyncedEngine",
    "TransformersEngine",
    "VLLMEngine",
    "VLLMServerEngine",
    "WeightSyncError",
    "assemble_rollout",
    "collect_different",
    "continued_prompts",
    "extra_values_of",
    "groups_differ",
    "load_rollout",
    "micro_batch_rows",
    "plan_micro_batches",
    "response_ids",
    "responses_of",
    "save_rollout",
    "trim",
]
