"""The sizes of an iteration, from the config alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lrlhf.functional.algorithms import ALGORITHMS, ALIASES, resolve_algorithm
from lrlhf.modules.policy.iteration import BatchPlan, Quantity, plan_batches
from lrlhf.planning.config_entries import class_of, options_of


def has_batch_plan(options: Mapping[str, Any]) -> bool:
    """Tell by a module's options whether an iteration of it has responses and optimizer steps."""
    return "num_generations" in options and "update" in options


def planned_batches(batch_size: int, model: Mapping[str, Any], ranks: Quantity) -> BatchPlan:
    """Work out the sizes of an iteration from what a config says of the module.

    Args:
        batch_size: Prompts per process, ``data.batch_size``.
        model: The config's entry of the module.
        ranks: Processes of the run.

    Raises:
        ValueError: The sizes do not fit; names the option and the nearest sizes that would.
    """
    options, owner = options_of(model), class_of(model)
    default = getattr(owner, "default_minibatches", 1)
    update, dynamic = options_of(options["update"]), options_of(options.get("dynamic_sampling"))
    return plan_batches(
        prompts_per_rank=batch_size,
        num_generations=options["num_generations"],
        world_size=ranks.number or 1,
        minibatch_size=update["minibatch_size"],
        num_iterations=update["num_iterations"],
        num_minibatches=update.get("num_minibatches"),
        default_minibatches=default,
        kept_prompts=dynamic.get("prompts"),
        extra_samples=_extra_samples(options),
    )


def _extra_samples(options: Mapping[str, Any]) -> Iterable[str]:
    algorithm = options.get("algorithm")
    estimator = options_of(options.get("advantage")).get("estimator")
    if algorithm is None and estimator in {*ALGORITHMS, *ALIASES}:
        algorithm = estimator
    return resolve_algorithm(algorithm).extra_samples if isinstance(algorithm, str) else ()
