"""What ``fit`` would do with a config, in numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pydoc import locate as import_by_path
from typing import Any

from jsonargparse import Namespace

from lrlhf.modules import RewardModel, TrainingModule
from lrlhf.modules.policy.batch_plan import BatchPlan, Quantity, plan_batches, table_of
from lrlhf.planning.memory import Device, policy_memory, reward_model_memory
from lrlhf.planning.memory_phases import options_of
from lrlhf.planning.trainer_sizes import processes, training_steps


def describe_run(config: Namespace) -> Iterator[str]:
    """Say in numbers what a run would do, and what memory it needs, from its config alone.

    Modules that draw ``num_generations`` responses per prompt and have a group of options
    ``update`` get a batch plan, whatever their class; reward models get the size of their steps.

    Args:
        config: Parsed config of ``fit``.

    Yields:
        Paragraphs, as they are known: memory takes up to a minute to work out.

    Raises:
        ValueError: Its sizes do not fit together; names the option and the nearest sizes.
    """
    sections = config.as_dict()
    model, trainer = sections["model"], sections["trainer"]
    data = sections.get("data") or {"class_path": "no data module"}
    options, size = options_of(model), options_of(data).get("batch_size")
    ranks = _ranks(sections)
    title = f"{model['class_path']} on {data['class_path']}"
    if not isinstance(size, int):
        reason = f"{data['class_path']} has no option batch_size"
    elif _is_reward_model(model["class_path"]):
        yield f"{title}\n\n{_pair_tables(size, trainer, ranks)}"
        yield reward_model_memory(sections, _device(sections))
        return
    elif "num_generations" in options and "update" in options:
        plan, tables = _group_policy_tables(size, options, trainer, ranks, model["class_path"])
        yield f"{title}\n\n{tables}"
        if _is_policy_module(model["class_path"]):
            yield policy_memory(sections, plan, _device(sections))
        return
    else:
        reason = f"it is unknown how {model['class_path']} uses a batch"
    known = [ranks, training_steps(trainer, "training steps")]
    yield f"{title}\n\n{table_of('the run', known)}\n\nno batch plan: {reason}"


def _group_policy_tables(
    batch_size: int,
    options: Mapping[str, Any],
    trainer: Mapping[str, Any],
    ranks: Quantity,
    class_path: str,
) -> tuple[BatchPlan, str]:
    update, dynamic = options_of(options["update"]), options_of(options.get("dynamic_sampling"))
    iterations = training_steps(trainer, "iterations")
    assert ranks.number is not None
    plan = plan_batches(
        prompts_per_rank=batch_size,
        num_generations=options["num_generations"],
        world_size=ranks.number,
        minibatch_size=update["minibatch_size"],
        num_iterations=update["num_iterations"],
        num_minibatches=update.get("num_minibatches"),
        default_minibatches=_default_minibatches(class_path),
        kept_prompts=dynamic.get("prompts"),
    )
    number = iterations.number
    steps = None if number is None else number * plan.steps_per_iteration
    total = Quantity("optimizer steps", steps, "iterations × optimizer steps of one")
    return plan, f"{table_of('the run', [ranks, iterations, total])}\n\n{plan.table()}"


def _pair_tables(batch_size: int, trainer: Mapping[str, Any], ranks: Quantity) -> str:
    accumulated = trainer["accumulate_grad_batches"]
    for name, value in (
        ("data.batch_size", batch_size),
        ("trainer.accumulate_grad_batches", accumulated),
    ):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be 1 or more")
    assert ranks.number is not None
    steps = training_steps(trainer, "optimizer steps", batches_per_step=accumulated)
    step = [
        Quantity("pairs per batch and process", batch_size, "data.batch_size"),
        Quantity("batches per process", accumulated, "trainer.accumulate_grad_batches"),
        Quantity(
            "pairs",
            batch_size * accumulated * ranks.number,
            "data.batch_size × trainer.accumulate_grad_batches × processes",
        ),
    ]
    return f"{table_of('the run', [ranks, steps])}\n\n{table_of('one optimizer step', step)}"


def _ranks(sections: Mapping[str, Any]) -> Quantity:
    given = sections.get("gpus")
    if given is None:
        return processes(sections["trainer"])
    if given < 1:
        raise ValueError(f"--gpus is {given}; it must be 1 or more")
    return Quantity("processes", given, "--gpus")


def _device(sections: Mapping[str, Any]) -> Device:
    ranks, gib = _ranks(sections).number, sections.get("gpu_memory")
    assert ranks is not None
    if gib is not None and gib <= 0:
        raise ValueError(f"--gpu-memory is {gib}; it must be above 0")
    return Device(ranks, None if gib is None else round(gib * 2**30))


def _is_reward_model(class_path: str) -> bool:
    cls = import_by_path(class_path)
    return isinstance(cls, type) and issubclass(cls, RewardModel)


def _is_policy_module(class_path: str) -> bool:
    return _policy_class(class_path) is not None


def _default_minibatches(class_path: str) -> int:
    cls = _policy_class(class_path)
    return 1 if cls is None else int(getattr(cls, "default_minibatches", 1))


def _policy_class(class_path: str) -> type[TrainingModule] | None:
    cls = import_by_path(class_path)
    if not (isinstance(cls, type) and issubclass(cls, TrainingModule)):
        return None
    return cls if hasattr(cls, "default_minibatches") else None
