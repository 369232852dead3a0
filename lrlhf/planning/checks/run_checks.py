"""All checks of a run, the cheapest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning as L

from lrlhf.planning.checks.data_rows import (
    LookedAt,
    check_reward_columns,
    check_rows,
    check_sources,
)
from lrlhf.planning.checks.folders import check_folders
from lrlhf.planning.checks.logins import check_wandb
from lrlhf.planning.checks.models import check_models
from lrlhf.planning.checks.together import (
    check_batches,
    check_context,
    check_engine,
    check_interval,
    check_rows_per_batch,
    check_sizes,
    check_texts_beside,
)
from lrlhf.planning.checks.trainer_options import (
    check_accelerator,
    check_devices,
    check_length,
    check_loggers,
    check_replaced,
    check_strategy,
)
from lrlhf.planning.config_entries import options_of
from lrlhf.planning.trainer_sizes import processes, training_steps


def check_run(
    sections: dict[str, Any], build_data: Callable[[], L.LightningDataModule], *, trains: bool
) -> Iterator[str]:
    """Check what is known of a run before weights are loaded.

    Of classes that are not this library's nothing is built, and little is said.

    Args:
        sections: The parsed config as plain values: ``model``, ``data`` and ``trainer``.
        build_data: Makes the data module.
        trains: The run trains, rather than validates, tests or predicts.

    Yields:
        What was looked at, in lines of a heading and a finding.

    Raises:
        MistakeError: Something cannot work; names the option.
        ValueError: The data module refuses its options.
    """
    model, data, trainer = sections["model"], sections.get("data"), sections["trainer"]
    check_strategy(trainer)
    check_accelerator(trainer)
    check_devices(trainer)
    check_loggers(trainer)
    check_wandb(trainer)
    check_folders(trainer)
    if trains:
        check_length(trainer)
        check_replaced(trainer, model)
    check_batches(model, data)
    check_texts_beside(model, data)
    check_engine(model)
    check_sources(data)
    ranks = processes(trainer)
    plan = check_sizes(model, data, ranks)
    steps = training_steps(trainer, "steps")
    length = "an unknown number of steps" if steps.number is None else _count(steps.number, "step")
    yield f"run      {length} on {_count(ranks.number or 1, 'process')}: {steps.origin}"
    if plan is not None:
        updates = _count(plan.steps_per_iteration, "optimizer step")
        yield (
            f"batches  {plan.prompts} prompts × {plan.num_generations} responses; {updates} of "
            f"{plan.minibatch_size} responses"
        )
    trained = check_models(model)
    if trained is not None:
        yield (
            f"model    {'.'.join(trained.key)} {trained.spec.source} "
            f"({trained.config.model_type}, {trained.context or 'any number of'} tokens)"
        )
    seen = check_rows(data, model, trained, build_data)
    if seen is not None:
        yield from _of_rows(seen)
        check_rows_per_batch(data, seen.train, ranks.number or 1)
        if trains:
            check_interval(trainer, data, seen.train, ranks.number or 1)
        if "rewards" in options_of(model):
            read = check_reward_columns(model, seen.columns)
            yield f"rewards  read {', '.join(read) or 'no column'}"
    if trained is not None and (lengths := check_context(model, data, trained, seen)):
        yield f"lengths  {lengths}"


def _count(number: int, what: str) -> str:
    ending = "" if number == 1 else "es" if what.endswith("s") else "s"
    return f"{number} {what}{ending}"


def _of_rows(seen: LookedAt) -> Iterator[str]:
    for split in seen.splits:
        first = "all" if split.complete else "the first"
        yield (
            f"data     {split.what}: {first} {split.seen} rows looked at, {len(split.rows)} can be "
            "used" + (f"; columns {', '.join(sorted(seen.columns))}" if seen.columns else "")
        )
