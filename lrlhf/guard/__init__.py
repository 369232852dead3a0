"""Steps that must not be taken: what is looked at, what is kept of them, taking them again."""

from lrlhf.guard.anomalies import Anomaly
from lrlhf.guard.bundle import NotADumpError, StepBundle
from lrlhf.guard.dump_replay import DumpReplay, Replayable, ReplayedStep, replay_dump
from lrlhf.guard.guard_settings import Guard, TrainingDivergedError
from lrlhf.guard.step_guard import StepGuard
from lrlhf.guard.step_watch import StepVerdict, StepWatch

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
