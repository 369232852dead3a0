"""When the gradients of a model that is split over the ranks are added up over them."""

from __future__ import annotations

from typing import Final, Literal

import torch

from lrlhf.models.token_budget import memory_of

_SHARE: Final = 0.25
"""Of a device's memory that whole gradients may take between micro-batches."""


def reduces_each(
    choice: Literal["auto"] | bool, whole_gradients: int, device_size: int | None
) -> bool:
    """Tell whether gradients are added up with each micro-batch, rather than with the last one.

    What is free at a moment plays no part: a run that is resumed has to choose the same again, as
    two orders of a sum round differently.

    Args:
        choice: ``auto``: by the sizes.
        whole_gradients: Bytes of those of one model, on one rank.
        device_size: Bytes of memory of a rank's device; None: a CPU, or not known.
    """
    if choice != "auto":
        return choice
    return device_size is not None and whole_gradients > _SHARE * device_size


def device_memory(device: torch.device) -> int | None:
    """Return the bytes of memory that a GPU has in all; None: it is no GPU of CUDA."""
    memory = memory_of(device)
    return None if memory is None else memory.size()
