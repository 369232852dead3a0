"""All checks of a run, the cheapest first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

import lightning as L

from lrlhf.modules.policy.iteration import BatchPlan, Quantity
from lrlhf.modules.policy.settings import PolicySettings
from lrlhf.planning.checks.data_rows import (
    LookedAt,
    check_environment_columns,
    check_reward_columns,
    check_rows,
    check_sources,
)
from lrlhf.planning.checks.folders import check_folders
from lrlhf.planning.checks.logins import check_hub, check_wandb
from lrlhf.planning.checks.mistake import MistakeError, RefusedError
from lrlhf.planning.checks.models import check_built, check_main_memory, check_models
from lrlhf.planning.checks.reward_templates import check_reward_templates
from lrlhf.planning.checks.together import (
    check_batches,
    check_context,
    check_engine,
    check_evaluations,
    check_interval,
    check_kl_control,
    check_rows_per_batch,
    check_siblings,
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
from lrlhf.planning.trainer_sizes import processes, training_steps
from lrlhf.rewards import Rewards

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")


class Parts(Protocol):
    """Makes the parts of a run that load nothing; raises `RefusedError` where one refuses."""

    def data(self) -> L.LightningDataModule:
        """Make the data module."""

    def of_trainer(self) -> None:
        """Make callbacks and loggers."""

    def rewards(self) -> Rewards | None:
        """Make the rewards where that costs nothing."""

    def settings(self) -> PolicySettings | None:
        """Make the groups of options of the module, and complete those of a policy."""


def check_run(sections: dict[str, Any], parts: Parts, *, trains: bool) -> Iterator[str]:
    """Check what is known of a run before weights are loaded.

    Of classes that are not this library's nothing is built but the data module that holds them,
    and little is said. A check that fails itself says nothing: the run will tell.

    Args:
        sections: The parsed config as plain values: ``model``, ``data`` and ``trainer``.
        parts: Of the run.
        trains: The run trains, rather than validates, tests or predicts.

    Yields:
        What was looked at, in lines of a heading and a finding.

    Raises:
        MistakeError: Something cannot work; names the option.
        RefusedError: A class refuses its options.
    """
    model, data, trainer = sections["model"], sections.get("data"), sections["trainer"]
    for check in (check_strategy, check_accelerator, check_devices, check_loggers, check_wandb):
        _tried(check, trainer)
    _tried(check_folders, trainer)
    if trains:
        _tried(check_hub, trainer)
        _tried(check_length, trainer)
        _tried(check_replaced, trainer, model)
        _tried(check_texts_beside, model, data)
    _tried(check_batches, model, data)
    ranks = _tried(processes, trainer)
    _tried(check_engine, model, ranks)
    _tried(check_sources, data)
    plan = _tried(check_sizes, model, data, ranks) if trains and ranks else None
    yield from _tried(_of_length, trainer, ranks) or ()
    yield from _of_batches(plan)
    _tried(parts.of_trainer)
    settings = _tried(parts.settings)
    if trains:
        _tried(check_kl_control, trainer, settings)
    rewards = _tried(parts.rewards)
    _tried(check_siblings, settings, rewards)
    if trains:
        _tried(check_evaluations, settings, rewards, trainer, data)
    trained = _tried(check_models, model)
    _tried(check_main_memory, trainer, trained)
    if trained is not None:
        yield (
            f"model    {'.'.join(trained.key)} {trained.spec.source} "
            f"({trained.config.model_type}, {trained.context or 'any number of'} tokens)"
        )
    vocabulary = _tried(check_built, trained)
    seen = _tried(check_rows, data, model, trained, vocabulary, parts.data)
    if seen is not None:
        yield from _of_rows(seen)
        if trains and ranks:
            _tried(check_rows_per_batch, data, seen.train, ranks.number or 1)
            _tried(check_interval, trainer, data, seen.train, ranks.number or 1)
        _tried(check_environment_columns, model, seen.columns)
        read = _tried(check_reward_columns, model, seen.columns)
        if read is not None:
            yield f"rewards  read {', '.join(read) or 'no column'}"
        _tried(check_reward_templates, model, seen)
    if lengths := trained and _tried(check_context, settings, data, trained, seen):
        yield f"lengths  {lengths}"


def _tried(check: Callable[..., ResultT], *arguments: Any) -> ResultT | None:
    """Run a check; None where it fails itself, which must not end a run."""
    try:
        return check(*arguments)
    except (MistakeError, RefusedError):
        raise
    except Exception:  # what it did not expect in a config may well be in order
        name = getattr(check, "__name__", check)
        logger.debug("%s could not look at the config", name, exc_info=True)
        return None


def _of_length(trainer: Mapping[str, Any], ranks: Quantity | None) -> list[str]:
    steps = training_steps(trainer, "steps")
    length = "an unknown number of steps" if steps.number is None else _count(steps.number, "step")
    on = _count(ranks.number or 1, "process") if ranks else "an unknown number of processes"
    return [f"run      {length} on {on}: {steps.origin}"]


def _of_batches(plan: BatchPlan | None) -> Iterator[str]:
    if plan is None:
        return
    updates = _count(plan.steps_per_iteration, "optimizer step")
    yield (
        f"batches  {plan.prompts} prompts × {plan.num_generations} responses; {updates} of "
        f"{plan.minibatch_size} responses"
    )


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
        for note in split.notes:
            yield f"data     {split.what}: {note}"
