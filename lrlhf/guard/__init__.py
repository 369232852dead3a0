"""Steps that must not be taken: their detection, their dumps, and replays of these."""

from typing import TYPE_CHECKING

from lrlhf.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lrlhf.guard.anomalies import Anomaly, Guard, StepVerdict, StepWatch, TrainingDivergedError
    from lrlhf.guard.dump import NotADumpError, StepBundle
    from lrlhf.guard.dump_replay import DumpReplay, Replayable, ReplayedStep, replay_dump
    from lrlhf.guard.step_guard import StepGuard
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "Anomaly",
    "DumpReplay",
    "Guard",
    "NotADumpError",
    "Replayable",
    "ReplayedStep",
    "StepBundle",
    "StepGuard",
    "StepVerdict",
    "StepWatch",
    "TrainingDivergedError",
    "replay_dump",
]
