"""Reads what a config says of a class and of the sizes of a run, without building anything."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pydoc import locate as import_by_path
from typing import Any, TypeVar

from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator

from lrlhf.functional.algorithms import ALGORITHMS, ALIASES, resolve_algorithm
from lrlhf.models import LoRA, PretrainedSpec
from lrlhf.modules.policy.iteration import BatchPlan, Quantity, plan_batches

SpecT = TypeVar("SpecT", bound=PretrainedSpec)


def options_of(entry: Any) -> Mapping[str, Any]:
    """Return the options of a class or a dataclass, however the config spells it."""
    if not isinstance(entry, Mapping):
        return {}
    return (entry.get("init_args") or {}) if "class_path" in entry else entry


def reward_entries(rewards: Any) -> dict[Any, Any]:
    """Return the reward functions that a config lists, by name or by number."""
    functions = options_of(rewards).get("functions") or []
    return dict(functions.items() if isinstance(functions, Mapping) else enumerate(functions))


def class_of(entry: Any) -> type | None:
    """Return the class that an entry with a ``class_path``, or such a path, stands for."""
    path = entry.get("class_path") if isinstance(entry, Mapping) else entry
    kind = import_by_path(path) if isinstance(path, str) else None
    return kind if isinstance(kind, type) else None


def is_a(entry: Any, base: type) -> bool:
    """Whether an entry stands for a class below ``base``."""
    kind = class_of(entry)
    return kind is not None and issubclass(kind, base)


def is_lrlhf(entry: Any) -> bool:
    """Whether an entry stands for a class of this library, whose constructor is known."""
    kind = class_of(entry)
    return kind is not None and kind.__module__.startswith("lrlhf.")


def spec_of(entry: str | Mapping[str, Any], cls: type[SpecT], **defaults: Any) -> SpecT:
    """Build the description of a model that a config gives: a source, or options.

    ``defaults`` are the options that a plain source is used with.
    """
    if isinstance(entry, str):
        return cls(source=entry, **defaults)
    options = dict(options_of(entry))
    if options.get("lora") is not None:
        options["lora"] = LoRA(**options_of(options["lora"]))
    return cls(**options)


_DEFAULT_EPOCHS = 1000
"""What Lightning takes where neither epochs nor steps are given."""


def processes(trainer: Mapping[str, Any]) -> Quantity:
    """Count the processes of a run, one per device, from the options of ``trainer``.

    Devices that they leave to Lightning are those of this machine; what cannot be known is taken
    for 1, and the origin says so.

    Raises:
        ValueError: ``trainer.devices`` is neither a number, a list nor "auto".
    """
    devices, origin = _devices(trainer["accelerator"], trainer["devices"])
    if (nodes := trainer["num_nodes"]) != 1:
        origin = f"{origin} × trainer.num_nodes ({nodes})"
    return Quantity("processes", devices * nodes, origin)


def training_steps(trainer: Mapping[str, Any], what: str, *, batches_per_step: int = 1) -> Quantity:
    """Count the steps of a run, called ``what``, as far as the trainer's options alone tell."""
    if trainer["fast_dev_run"]:
        batches = int(trainer["fast_dev_run"])
        return Quantity(what, math.ceil(batches / batches_per_step), "trainer.fast_dev_run")
    steps, epochs = trainer["max_steps"], trainer["max_epochs"]
    if epochs is None:
        epochs = _DEFAULT_EPOCHS if steps == -1 else -1
    batches = trainer["overfit_batches"] or trainer["limit_train_batches"]
    limit = "overfit_batches" if trainer["overfit_batches"] else "limit_train_batches"
    if epochs != -1 and isinstance(batches, int):
        of_epochs = math.ceil(batches / batches_per_step) * epochs
        if steps == -1 or of_epochs <= steps:
            origin = f"trainer.{limit} over {epochs} epoch(s), fewer if the data is smaller"
            return Quantity(what, of_epochs, origin)
        return Quantity(what, steps, "trainer.max_steps, fewer if the data is smaller")
    if steps != -1:
        sooner = "" if epochs == -1 else f", fewer if {epochs} epoch(s) end sooner"
        return Quantity(what, steps, f"trainer.max_steps{sooner}")
    endless = "no limit: trainer.max_steps and trainer.max_epochs are -1"
    return Quantity(what, None, endless if epochs == -1 else f"{epochs} epoch(s) over the data")


def _devices(accelerator: Any, devices: Any) -> tuple[int, str]:
    """Count the devices of a node, and say where the number comes from."""
    setting = f"trainer.devices {devices}"
    if isinstance(devices, list) and devices:
        return len(devices), setting
    text = str(devices).strip()
    if text in {"auto", "-1"}:
        return _devices_here(accelerator, setting)
    # as for Lightning, "2" are two devices and "0,1" or "3," those with these numbers
    listed = [part for part in text.split(",") if part.strip()]
    if not listed or not all(part.strip().isdigit() for part in listed) or text == "0":
        raise ValueError(
            f"trainer.devices is {devices!r}; give a number above 0, a list of device numbers, or "
            "auto"
        )
    return len(listed) if "," in text else int(text), setting


def _devices_here(accelerator: Any, setting: str) -> tuple[int, str]:
    if accelerator in ("auto", "gpu", "cuda") and CUDAAccelerator.is_available():
        return CUDAAccelerator.auto_device_count(), f"{setting}, the GPUs of this machine"
    if accelerator in ("auto", "gpu", "mps") and MPSAccelerator.is_available():
        return 1, f"{setting}, the GPU of this machine"
    if accelerator in ("auto", "cpu"):
        return 1, f"{setting}, 1 on a CPU"
    return 1, f"{setting}, assumed: this machine has no such device"


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
