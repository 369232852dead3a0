"""Lightning's hooks of an evaluation, the same for every module with a policy."""

from __future__ import annotations

from typing import Any, Protocol, cast

import lightning as L

from lrlhf.modules.base import TrainingModule
from lrlhf.modules.metrics.measurement import Measurement, logged_values
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.modules.policy.policy_parts import PolicyParts
from lrlhf.modules.validation_sets import set_names
from lrlhf.run import Collectives
from lrlhf.types import PromptBatch


class Evaluates(Protocol):
    """What these hooks need of a module."""

    parts: PolicyParts
    measurements: list[Measurement]
    eval_metric: str
    log: Any

    @property
    def trainer(self) -> L.Trainer: ...


def validation_step(
    module: Evaluates, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0
) -> dict[str, Any]:
    """Answer the prompts of a batch; returns a readable line for each response."""
    name = set_names(module.trainer)[dataloader_idx]
    evaluator, teaching = module.parts.evaluator, module.parts.teaching
    if teaching is not None:
        teaching.check_prompts(batch, "eval_sampling")
    return {"records": evaluator.evaluate(batch, batch_idx, _iteration(module), name=name)}


def predict_step(
    module: Evaluates, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0
) -> list[dict[str, Any]]:
    """Answer each prompt once; returns a readable line for each response."""
    del dataloader_idx
    return module.parts.evaluator.answer(batch, batch_idx, _iteration(module)).records


def evaluation_names(module: Evaluates) -> set[str]:
    """Return the names of all metrics that evaluations log."""
    return module.parts.evaluator.metric_names(set_names(module.trainer))


def start(module: Evaluates) -> None:
    """Forget what is left of an evaluation that was broken off, and have a teacher ready."""
    module.parts.shard_teacher(cast(TrainingModule, module))  # no training may have come before
    module.parts.evaluator.reset()


def end(module: Evaluates) -> None:
    """Log what the responses of all ranks say."""
    module.measurements = module.parts.evaluator.measure(Collectives(module.trainer))
    for name, value in logged_values(module.measurements).items():
        # equal on all ranks already; sync_dist says so to Lightning
        module.log(name, value, prog_bar=name == module.eval_metric, batch_size=1, sync_dist=True)


def _iteration(module: Evaluates) -> Iteration:
    return Iteration(cast(TrainingModule, module))
