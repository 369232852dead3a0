"""What a step is; beside `resumed_loop` the one place that leans on Lightning's private loops.

Under manual optimization Lightning counts every ``optimizer.step()`` as a global step, so with
several optimizers, epochs or minibatches a step count means nothing to the user, ``max_steps``
overshoots and checkpoint intervals are missed. Here one ``training_step`` is one step.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import lightning as L
from lightning.pytorch.loops.optimization.manual import _ManualOptimization


class _StepPerIteration(_ManualOptimization):
    def on_run_start(self) -> None:
        """Leave the optimizers uncounted."""

    def advance(self, kwargs: OrderedDict[str, Any]) -> None:
        self.optim_step_progress.increment_ready()
        super().advance(kwargs)
        self.optim_step_progress.increment_completed()


def count_iterations_as_steps(trainer: L.Trainer) -> None:
    """Make ``trainer.global_step`` the number of finished training steps.

    Call it from ``setup("fit")``, which runs before the state of the loops is restored, so that
    a resumed run counts on.
    """
    trainer.fit_loop.epoch_loop.manual_optimization = _StepPerIteration(trainer)
