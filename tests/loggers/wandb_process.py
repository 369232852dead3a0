"""A process of its own that trains with W&B, and may be killed with all it has started."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L
import psutil

from lrlhf.loggers import ResumingWandbLogger
from tests.loggers.runs import Toy, train


class Kill(L.Callback):
    """Ends the process and W&B's service, as running out of memory or a lost machine does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            for child in psutil.Process().children(recursive=True):
                child.kill()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    folder, step = Path(sys.argv[1]), int(sys.argv[2])
    module = Toy()
    module.save_hyperparameters({"lr": 0.1})
    logger = ResumingWandbLogger(folder, project="test", offline=True)
    train(folder, [logger], *([Kill(step)] if step else []), module=module)
