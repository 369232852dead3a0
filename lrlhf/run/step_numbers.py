"""How steps are numbered, wherever the number of one is shown or written."""

from __future__ import annotations

import lightning as L


def running_step(trainer: L.Trainer) -> int:
    """Return the number of the step that is running; the first one is 1.

    A step is an iteration of a policy, an optimizer step of a reward model. Its number is how many
    steps are finished when it is: what ``trainer.global_step`` is from its end on. The same number
    is on the row of the step in every log, in the records of its responses, in the names of their
    stored tensors and of a dump, on its line and its table in the terminal, on the axis of the
    curves, and on the checkpoint, the export and the evaluation that follow it. An evaluation
    before training is of step 0.

    Seeds are made of the number of steps before, and weights have that number as their version:
    the policy answers in step ``k`` with version ``k - 1``.
    """
    return trainer.global_step + 1
