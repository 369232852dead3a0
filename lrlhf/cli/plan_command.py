"""What ``fit`` would do with a config, in numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeFloat, PositiveInt

from lrlhf.modules import DPO, SFT, RewardModel, TrainingModule
from lrlhf.modules.policy.iteration import BatchPlan, Quantity, table_of
from lrlhf.planning.batch_sizes import has_batch_plan, planned_batches
from lrlhf.planning.config_entries import is_a, options_of
from lrlhf.planning.memory import memory_report
from lrlhf.planning.simulation.hardware import GPUS
from lrlhf.planning.simulation.report import time_report
from lrlhf.planning.simulation.workload import Question
from lrlhf.planning.strategy_shares import strategy_of
from lrlhf.planning.trainer_sizes import processes, training_steps
from lrlhf.trainer import GPU_PRECISION


def add_plan_options(parser: ArgumentParser) -> None:
    """Add what ``plan`` takes beside the options of ``fit``."""
    parser.add_argument(
        "--gpus",
        type=str | None,
        help="processes, whatever the trainer has, and what is simulated; 8,64,512: several",
    )
    parser.add_argument("--gpu", choices=list(GPUS), help="which GPU; simulated: h100 unless given")
    parser.add_argument(
        "--gpu-memory", type=float | None, help="GiB of each GPU; marks what does not fit"
    )
    parser.add_argument(
        "--prompts",
        type=PositiveInt | None,
        help="simulated: prompts of an iteration, of all GPUs together; data.batch_size times the "
        "largest number of --gpus unless given",
    )
    parser.add_argument(
        "--response-lengths",
        type=str | None,
        help="simulated: mean tokens of a response, or the rollouts.jsonl of a run; half of "
        "model.sampling.max_new_tokens unless given",
    )
    parser.add_argument(
        "--reward-seconds",
        type=NonNegativeFloat,
        default=0.0,
        help="simulated: seconds of an iteration's rewards, reward models left out",
    )


def describe_run(config: Namespace) -> Iterator[str]:
    """Say in numbers what a run would do, and what memory it needs, from its config alone.

    Modules that generate ``num_generations`` responses per prompt and have a group of options
    ``update`` get a batch plan, whatever their class; those that are trained on given texts or
    pairs get the size of their steps.

    Yields:
        Paragraphs, as they are known: memory takes up to a minute to work out.

    Raises:
        ValueError: Its sizes do not fit together; names the option and the nearest sizes.
    """
    sections = config.as_dict()
    model, trainer = sections["model"], sections["trainer"]
    data = sections.get("data") or {"class_path": "no data module"}
    options, batch_size = options_of(model), options_of(data).get("batch_size")
    gpus, device_size = _numbers_of_gpus(sections.get("gpus")), _device_size(sections)
    planned = isinstance(batch_size, int) and has_batch_plan(options)
    _refuse_unused(sections, gpus, simulates=planned and is_a(model, TrainingModule))
    ranks = Quantity("processes", gpus[-1], "--gpus") if gpus else processes(trainer)
    title = f"{model['class_path']} on {data['class_path']}\n\n"
    if not isinstance(batch_size, int):
        reason = f"{data['class_path']} has no option batch_size"
    elif is_a(model, RewardModel) or is_a(model, DPO) or is_a(model, SFT):
        tables = _text_tables if is_a(model, SFT) else _pair_tables
        yield title + tables(batch_size, trainer, ranks)
        yield memory_report(sections, None, ranks.number or 1, device_size)
        return
    elif has_batch_plan(options):
        plan = planned_batches(batch_size, model, ranks)
        memory = ""
        if len(gpus) < 2:
            yield title + _iteration_tables(plan, trainer, ranks)
            if is_a(model, TrainingModule):
                yield (memory := memory_report(sections, plan, ranks.number or 1, device_size))
        if gpus and is_a(model, TrainingModule):
            told = memory.replace("no memory table", "no table of times", 1)
            for paragraph in _times(sections, plan, gpus):
                yield paragraph if paragraph != told else "no table of times either"
        return
    else:
        reason = f"it is unknown how {model['class_path']} uses a batch"
    known = [ranks, training_steps(trainer, "training steps")]
    yield f"{title}{table_of('the run', known)}\n\nno batch plan: {reason}"


def _numbers_of_gpus(given: str | None) -> list[int]:
    parts = [] if given is None else [part.strip() for part in given.split(",")]
    if not all(part.isdigit() for part in parts):
        raise ValueError(f"--gpus is {given}; give a number, or several as in 8,64")
    if "0" in parts:
        raise ValueError("--gpus is 0; it must be above 0")
    return sorted(map(int, parts))


def _refuse_unused(sections: Mapping[str, Any], gpus: list[int], *, simulates: bool) -> None:
    """Refuse options of a simulation where there is none."""
    name = sections["model"]["class_path"]
    if len(gpus) > 1 and not simulates:
        raise ValueError(
            f"--gpus has several numbers, but no time of {name} is simulated; give one"
        )
    for option in ("prompts", "response_lengths", "reward_seconds"):
        if sections.get(option) and not (gpus and simulates):
            why = f"no time of {name} is simulated" if gpus else "that needs --gpus"
            raise ValueError(f"--{option.replace('_', '-')} is for a simulation, and {why}")


def _device_size(sections: Mapping[str, Any]) -> int | None:
    """Return the bytes of each GPU, as far as the arguments tell."""
    gib, name = sections.get("gpu_memory"), sections.get("gpu")
    if gib is not None and gib <= 0:
        raise ValueError(f"--gpu-memory is {gib}; it must be above 0")
    if gib is None and name is None:
        return None
    size: float = GPUS[str(name)].memory if gib is None else gib * 2**30
    return round(size)


def _times(sections: Mapping[str, Any], plan: BatchPlan, gpus: list[int]) -> Iterator[str]:
    """Simulate an iteration of the plan, or of so many prompts, on each number of GPUs."""
    trainer, model, name = sections["trainer"], sections["model"], sections["gpu"] or "h100"
    if (prompts := sections["prompts"]) is not None:
        if options_of(model).get("dynamic_sampling") is not None:
            raise ValueError(
                "--prompts counts those of all GPUs, and dynamic_sampling.prompts those of each: "
                "set data.batch_size and leave --prompts out"
            )
        plan = planned_batches(prompts, model, Quantity("processes", 1, "--prompts"))
    trainer = {**trainer, "precision": trainer["precision"] or GPU_PRECISION}
    size = _device_size(sections)
    gpu = GPUS[name] if size is None else GPUS[name]._replace(memory=float(size))
    strategy = strategy_of(trainer, gpus[-1], round(gpu.memory))
    if strategy is None:
        yield f"no table of times: it is unknown how {trainer['strategy']!r} shares the work"
        return
    reward_s, lengths = sections["reward_seconds"], sections["response_lengths"]
    group = options_of(trainer["strategy"]).get("shard_group") or 1
    question = Question(plan, gpu, strategy, group, lengths, reward_s)
    yield from time_report(sections, question, gpus, name)


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


def _text_tables(batch_size: int, trainer: Mapping[str, Any], ranks: Quantity) -> str:
    if batch_size < 1:
        raise ValueError(f"data.batch_size is {batch_size}; it must be 1 or more")
    steps = training_steps(trainer, "optimizer steps")
    rows = batch_size * (ranks.number or 1)
    step = [
        Quantity("rows per process", batch_size, "data.batch_size"),
        Quantity("rows", rows, "data.batch_size × processes"),
    ]
    return f"{table_of('the run', [ranks, steps])}\n\n{table_of('one optimizer step', step)}"
