"""Loggers whose records are those of one run, however often it was interrupted."""

from typing import TYPE_CHECKING

from lrlhf.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lrlhf.loggers.csv import ResumingCSVLogger
    from lrlhf.loggers.tensorboard import ResumingTensorBoardLogger
    from lrlhf.loggers.wandb import ResumingWandbLogger
else:
    __getattr__ = lazy_exports(__name__)

__all__ = [
    "ResumingCSVLogger",
    "ResumingTensorBoardLogger",
    "ResumingWandbLogger",
]
