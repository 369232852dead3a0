"""Loggers whose records are those of one run, however often it was interrupted."""

from lrlhf.loggers.csv import ResumingCSVLogger
from lrlhf.loggers.tensorboard import ResumingTensorBoardLogger
from lrlhf.loggers.trackio import ResumingTrackioLogger
from lrlhf.loggers.wandb import ResumingWandbLogger

__all__ = [
    "ResumingCSVLogger",
    "ResumingTensorBoardLogger",
    "ResumingTrackioLogger",
    "ResumingWandbLogger",
]
