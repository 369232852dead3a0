"""Optional companions of a run: what it writes, shows, averages, steers and saves."""

from typing import TYPE_CHECKING

from lrlhf.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lrlhf.callbacks.ema import EMA
    from lrlhf.callbacks.entropy_control import EntropyControl
    from lrlhf.callbacks.eval_jsonl import EvalJSONL, PredictionJSONL
    from lrlhf.callbacks.hf_export import HFExport
    from lrlhf.callbacks.kl_control import KLControl
    from lrlhf.callbacks.output_files import atomic_folder, atomic_write, output_folder
    from lrlhf.callbacks.reports.progress import PhaseProgress
    from lrlhf.callbacks.reports.run_report import RunReport
    from lrlhf.callbacks.rl_checkpoint import RLCheckpoint
    from lrlhf.callbacks.rollout_log import RolloutLog
    from lrlhf.callbacks.vllm_weight_sync import VLLMWeightSync
    from lrlhf.run import AtomicCheckpointIO
    from lrlhf.run.supervision.watch import Deadlines
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "EMA",
    "AtomicCheckpointIO",
    "Deadlines",
    "EntropyControl",
    "EvalJSONL",
    "HFExport",
    "KLControl",
    "PhaseProgress",
    "PredictionJSONL",
    "RLCheckpoint",
    "RolloutLog",
    "RunReport",
    "VLLMWeightSync",
    "atomic_folder",
    "atomic_write",
    "output_folder",
]
