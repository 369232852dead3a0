"""From prompts to experience: engines, sampling, records, minibatches."""

from lrlhf.rollout.ahead import RolloutAhead
from lrlhf.rollout.batching.micro_batches import Pass, plan_passes
from lrlhf.rollout.batching.minibatches import (
    micro_batch_rows,
    minibatches,
    trim,
)
from lrlhf.rollout.collector import Collected, Collector
from lrlhf.rollout.dynamic_sampling import (
    Filtered,
    collect_different,
    groups_differ,
    merge_collected,
    select_collected,
)
from lrlhf.rollout.engines.engine import Response, RolloutEngine, assemble_rollout
from lrlhf.rollout.engines.policy_weights import PolicyWeights, WeightSyncError
from lrlhf.rollout.engines.synced_engine import EngineFailure, ProbeGap, SyncedEngine, SyncReport
from lrlhf.rollout.engines.transformers_engine import TransformersEngine
from lrlhf.rollout.listener import RolloutListener
from lrlhf.rollout.records import (
    completions_for_rewards,
    plain_json,
    response_ids,
    rollout_records,
)
from lrlhf.rollout.sampling import Sampling
from lrlhf.rollout.storage import load_rollout, save_rollout
from lrlhf.rollout.vllm import VLLMEngine, VLLMServerEngine

__all__ = [
    "Collected",
    "Collector",
    "EngineFailure",
    "Filtered",
    "Pass",
    "PolicyWeights",
    "ProbeGap",
    "Response",
    "RolloutAhead",
    "RolloutEngine",
    "RolloutListener",
    "Sampling",
    "SyncReport",
    "SyncedEngine",
    "TransformersEngine",
    "VLLMEngine",
    "VLLMServerEngine",
    "WeightSyncError",
    "assemble_rollout",
    "collect_different",
    "completions_for_rewards",
    "groups_differ",
    "load_rollout",
    "merge_collected",
    "micro_batch_rows",
    "minibatches",
    "plain_json",
    "plan_passes",
    "response_ids",
    "rollout_records",
    "save_rollout",
    "select_collected",
    "trim",
]
