"""What ``fit`` would do with a config, in numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import PositiveInt
from lightning.pytorch.cli import LightningArgumentParser

from lrlhf.apps.plan.memory import memory_report
from lrlhf.apps.plan.times import GPUS, time_report
from lrlhf.cli.application import Reader, check_checkpoint
from lrlhf.cli.checks.trainer_options import check_strategy
from lrlhf.cli.config_entries import (
    has_batch_plan,
    is_a,
    options_of,
    planned_batches,
    processes,
    training_steps,
)
from lrlhf.modules import DPO, KTO, SFT, RewardModel, TrainingModule
from lrlhf.modules.policy.iteration import BatchPlan, Quantity, table_of
from lrlhf.options.errors import RefusedError


def add_plan_options(parser: ArgumentParser) -> None:
    """Add what ``plan`` takes beside the options of ``fit``."""
    parser.add_argument("--gpus", type=int | None, help="processes, whatever the trainer has")
    parser.add_argument(
        "--gpu", choices=list(GPUS), help="which GPU; adds the time of an iteration"
    )
    parser.add_argument(
        "--gpu-memory", type=float | None, help="GiB of each GPU; marks what does not fit"
    )
    parser.add_argument(
        "--response-tokens",
        type=PositiveInt | None,
        help="mean tokens of a response, for times; half of model.sampling.max_new_tokens unless "
        "given",
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
    gpus, device_size = sections.get("gpus"), _device_size(sections)
    if gpus is not None and gpus < 1:
        raise ValueError(f"--gpus is {gpus}; it must be above 0")
    generates = isinstance(batch_size, int) and has_batch_plan(options)
    timed = sections.get("gpu") is not None and generates and is_a(model, TrainingModule)
    if sections.get("response_tokens") is not None and not timed:
        raise ValueError(
            "--response-tokens is for the time of an iteration, which needs --gpu and a policy "
            "that generates"
        )
    ranks = processes(trainer) if gpus is None else Quantity("processes", gpus, "--gpus")
    title = f"{model['class_path']} on {data['class_path']}\n\n"
    if not isinstance(batch_size, int):
        reason = f"{data['class_path']} has no option batch_size"
    elif any(is_a(model, kind) for kind in (RewardModel, DPO, KTO, SFT)):
        tables = _text_tables if is_a(model, SFT) or is_a(model, KTO) else _pair_tables
        yield title + tables(batch_size, trainer, ranks)
        yield memory_report(sections, None, ranks.number or 1, device_size)
        return
    elif generates:
        plan = planned_batches(batch_size, model, ranks)
        yield title + _iteration_tables(plan, trainer, ranks)
        if is_a(model, TrainingModule):
            yield (memory := memory_report(sections, plan, ranks.number or 1, device_size))
            if timed and device_size is not None:
                gpu = GPUS[sections["gpu"]]._replace(memory=float(device_size))
                times = time_report(sections, plan, gpu)
                why = memory.replace("no memory table", "no table of times", 1)
                yield times if times != why else "no table of times either"
        return
    else:
        reason = f"it is unknown how {model['class_path']} uses a batch"
    known = [ranks, training_steps(trainer, "training steps")]
    yield f"{title}{table_of('the run', known)}\n\nno batch plan: {reason}"


def _device_size(sections: Mapping[str, Any]) -> int | None:
    """Return the bytes of each GPU, as far as the arguments tell."""
    gib, name = sections.get("gpu_memory"), sections.get("gpu")
    if gib is not None and gib <= 0:
        raise ValueError(f"--gpu-memory is {gib}; it must be above 0")
    if gib is None and name is None:
        return None
    size: float = GPUS[str(name)].memory if gib is None else gib * 2**30
    return round(size)


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


class Planner(Reader):
    """Reads the config of ``fit`` and prints what it would do; builds and writes nothing.

    Args:
        arguments: Those of ``fit``, the command included.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.usage = "lrlhf plan [--gpus N] [--gpu NAME] [the options of lrlhf fit]"
        parser.description = (
            "Print the batch sizes, the steps and the memory of fit, without training."
        )
        add_plan_options(parser)

    def before_instantiate_classes(self) -> None:
        # the run may be meant for another machine, with other devices and data
        options = self.config[self.subcommand]
        check_checkpoint(options.ckpt_path)
        check_strategy(options.trainer)

    def run_command(self, subcommand: str) -> None:
        try:
            for number, paragraph in enumerate(describe_run(self.config[subcommand])):
                sys.stdout.write(f"\n{paragraph}\n" if number else f"{paragraph}\n")
                sys.stdout.flush()
        except ValueError as error:
            raise RefusedError from error
