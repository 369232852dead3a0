"""What ``fit`` would do with a config, in numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jsonargparse import Namespace

from lrlhf.modules import RewardModel, TrainingModule
from lrlhf.modules.policy.batch_plan import BatchPlan, Quantity, table_of
from lrlhf.planning.batch_sizes import has_batch_plan, planned_batches
from lrlhf.planning.config_entries import is_a, options_of
from lrlhf.planning.memory import memory_report
from lrlhf.planning.trainer_sizes import processes, training_steps


def describe_run(config: Namespace) -> Iterator[str]:
    """Say in numbers what a run would do, and what memory it needs, from its config alone.

    Modules that generate ``num_generations`` responses per prompt and have a group of options
    ``update`` get a batch plan, whatever their class; reward models get the size of their steps.

    Yields:
        Paragraphs, as they are known: memory takes up to a minute to work out.

    Raises:
        ValueError: Its sizes do not fit together; names the option and the nearest sizes.
    """
    sections = config.as_dict()
    model, trainer = sections["model"], sections["trainer"]
    data = sections.get("data") or {"class_path": "no data module"}
    options, batch_size = options_of(model), options_of(data).get("batch_size")
    for option in ("gpus", "gpu_memory"):
        if (given := sections.get(option)) is not None and given <= 0:
            raise ValueError(f"--{option.replace('_', '-')} is {given}; it must be above 0")
    gpus, gib = sections.get("gpus"), sections.get("gpu_memory")
    ranks = processes(trainer) if gpus is None else Quantity("processes", gpus, "--gpus")
    device_size = None if gib is None else round(gib * 2**30)
    title = f"{model['class_path']} on {data['class_path']}\n\n"
    if not isinstance(batch_size, int):
        reason = f"{data['class_path']} has no option batch_size"
    elif is_a(model, RewardModel):
        yield title + _pair_tables(batch_size, trainer, ranks)
        yield memory_report(sections, None, ranks.number or 1, device_size)
        return
    elif has_batch_plan(options):
        plan = planned_batches(batch_size, model, ranks)
        yield title + _iteration_tables(plan, trainer, ranks)
        if is_a(model, TrainingModule):
            yield memory_report(sections, plan, ranks.number or 1, device_size)
        return
    else:
        reason = f"it is unknown how {model['class_path']} uses a batch"
    known = [ranks, training_steps(trainer, "training steps")]
    yield f"{title}{table_of('the run', known)}\n\nno batch plan: {reason}"


def _iteration_tables(plan: BatchPlan, trainer: Mapping[str, Any], ranks: Quantity) -> str:
    iterations = training_steps(trainer, "iterations")
    number = iterations.number
    steps = None if number is None else number * plan.steps_per_iteration
    total = Quantity("optimizer steps", steps, "iterations × optimizer steps of one")
    return f"{table_of('the run', [ranks, iterations, total])}\n\n{plan.table()}"


def _pair_tables(batch_size: int, trainer: Mapping[str, Any], ranks: Quantity) -> str:
    batches = trainer["accumulate_grad_batches"]
    of_one = {"data.batch_size": batch_size, "trainer.accumulate_grad_batches": batches}
    for name, value in of_one.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be 1 or more")
    steps = training_steps(trainer, "optimizer steps", batches_per_step=batches)
    pairs, origin = batch_size * batches * (ranks.number or 1), " × ".join([*of_one, "processes"])
    step = [
        Quantity("pairs per batch and process", batch_size, "data.batch_size"),
        Quantity("batches per process", batches, "trainer.accumulate_grad_batches"),
        Quantity("pairs", pairs, origin),
    ]
    return f"{table_of('the run', [ranks, steps])}\n\n{table_of('one optimizer step', step)}"
