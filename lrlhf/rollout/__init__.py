"""From prompts to experience: engines, sampling, records, minibatches."""

from lrlhf.rollout.batching.micro_batches import MicroBatch, plan_micro_batches
from lrlhf.rollout.batching.minibatches import (
    micro_batch_rows,
    minibatches,
    trim,
)
from lrlhf.rollout.collector import Collected, Collector, beside_of
from lrlhf.rollout.dynamic_sampling import (
    Filtered,
    collect_different,
    groups_differ,
    merge_collected,
    select_collected,
)
from lrlhf.rollout.engines.engine import (
    Capabilities,
    EngineWrapper,
    ProbeGap,
    RolloutEngine,
    SyncReport,
)
from lrlhf.rollout.engines.policy_weights import PolicyWeights, WeightSyncError
from lrlhf.rollout.engines.synced_engine import EngineFailure, SyncedEngine
from lrlhf.rollout.engines.transformers_engine import TransformersEngine
from lrlhf.rollout.listener import RolloutListener
from lrlhf.rollout.records import completions_for_rewards, plain_json, rollout_records
from lrlhf.rollout.responses import (
    Response,
    Segment,
    assemble_rollout,
    continued_prompts,
    response_ids,
    responses_of,
)
from lrlhf.rollout.rollout_ahead import RolloutAhead
from lrlhf.rollout.sampling import Sampling
from lrlhf.rollout.storage import load_rollout, save_rollout
from lrlhf.rollout.vllm import VLLMEngine, VLLMServerEngine

__all__ = [
    "Capabilities",
    "Collected",
    "Collector",
    "EngineFailure",
    "EngineWrapper",
    "Filtered",
    "MicroBatch",
    "PolicyWeights",
    "ProbeGap",
    "Response",
    "RolloutAhead",
    "RolloutEngine",
    "RolloutListener",
    "Sampling",
    "Segment",
    "SyncReport",
    "SyncedEngine",
    "TransformersEngine",
    "VLLMEngine",
    "VLLMServerEngine",
    "WeightSyncError",
    "assemble_rollout",
    "beside_of",
    "collect_different",
    "completions_for_rewards",
    "continued_prompts",
    "groups_differ",
    "load_rollout",
    "merge_collected",
    "micro_batch_rows",
    "minibatches",
    "plain_json",
    "plan_micro_batches",
    "response_ids",
    "responses_of",
    "rollout_records",
    "save_rollout",
    "select_collected",
    "trim",
]
