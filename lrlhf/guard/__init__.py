"""Steps that must not be taken: their detection, their dumps, and replays of these."""

from lrlhf.guard.anomalies import Anomaly, Guard, StepVerdict, StepWatch, TrainingDivergedError
from lrlhf.guard.dump import NotADumpError, StepBundle
from lrlhf.guard.dump_replay import DumpReplay, Replayable, ReplayedStep, replay_dump
from lrlhf.guard.step_guard import StepGuard

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
