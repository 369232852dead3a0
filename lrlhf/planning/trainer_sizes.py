"""How many processes and steps a trainer's options stand for, without building the trainer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator

from lrlhf.modules.policy.batch_plan import Quantity

_DEFAULT_EPOCHS = 1000
"""What Lightning takes where neither epochs nor steps are given."""


class _Devices(NamedTuple):
    number: int
    origin: str


def processes(trainer: Mapping[str, Any]) -> Quantity:
    """Count the processes of a run, one per device.

    Args:
        trainer: Options of ``trainer``. Devices that it leaves to Lightning are those of this
            machine; what cannot be known is taken for 1, and the origin says so.

    Raises:
        ValueError: ``trainer.devices`` is neither a number, a list nor "auto".
    """
    devices = _devices(trainer["accelerator"], trainer["devices"])
    nodes = trainer["num_nodes"]
    origin = devices.origin if nodes == 1 else f"{devices.origin} × trainer.num_nodes ({nodes})"
    return Quantity("processes", devices.number * nodes, origin)


def training_steps(trainer: Mapping[str, Any], what: str, *, batches_per_step: int = 1) -> Quantity:
    """Count the steps of a run, as far as the options alone tell.

    Args:
        trainer: Options of ``trainer``.
        what: Unit of ``trainer.max_steps`` for the module.
        batches_per_step: Batches that are accumulated for each of them.
    """
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


def _devices(accelerator: Any, devices: Any) -> _Devices:
    if isinstance(devices, list):
        return _Devices(len(devices), f"trainer.devices {devices}")
    text = str(devices).strip()
    if text in {"auto", "-1"}:
        return _devices_here(accelerator, text)
    # as for Lightning, "2" are two devices and "0,1" or "3," those with these numbers
    listed = [part for part in text.split(",") if part.strip()]
    if not listed or not all(part.strip().isdigit() for part in listed) or text == "0":
        raise ValueError(
            f"trainer.devices is {devices!r}; give a number above 0, a list of device numbers, or "
            "auto"
        )
    return _Devices(len(listed) if "," in text else int(text), f"trainer.devices {text}")


def _devices_here(accelerator: Any, text: str) -> _Devices:
    asked = f"trainer.devices {text}"
    if accelerator == "cpu":
        return _Devices(1, f"{asked}, 1 on a CPU")
    wants_cuda, wants_mps = accelerator in {"auto", "gpu", "cuda"}, accelerator in {"gpu", "mps"}
    if wants_cuda and CUDAAccelerator.is_available():
        return _Devices(CUDAAccelerator.auto_device_count(), f"{asked}, the GPUs of this machine")
    if (wants_mps or accelerator == "auto") and MPSAccelerator.is_available():
        return _Devices(1, f"{asked}, the GPU of this machine")
    if accelerator == "auto":
        return _Devices(1, f"{asked}, 1 on the CPU of this machine")
    return _Devices(1, f"{asked}, assumed: this machine has no such device")
