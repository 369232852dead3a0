"""Whether a policy that is split over ranks fits into the memory of each, whole."""

from __future__ import annotations

import psutil
import torch
from torch import nn

from lrlhf.models.sharding import device_of, gathered_bytes
from lrlhf.models.token_budget import memory_of

_SHARE_OF_FREE = 0.8
"""Of the memory that is free, what gathered weights may take; keys and values are beside them."""


def check_room_to_gather(policy: nn.Module) -> None:
    """Refuse to gather a split policy that leaves too little memory for generating with it.

    Raises:
        ValueError: Its weights take more than `_SHARE_OF_FREE` of what is free.
    """
    needed = gathered_bytes(policy)
    if not needed:
        return
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    memory = memory_of(device_of(policy))
    if memory is not None:
        place, free = "GPU", memory.room()
    else:
        place = "main memory for each process"
        free = psutil.virtual_memory().available // ranks
    if ranks > 1:  # all go on, or none
        rooms = [free] * ranks
        torch.distributed.all_gather_object(rooms, free)
        free = min(rooms)
    if needed > _SHARE_OF_FREE * free:
        raise ValueError(
            f"TransformersEngine gathers the whole policy on every process to generate, "
            f"{needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of the {place} are free: "
            "take engine: VLLMServerEngine, which gets the weights one at a time"
        )
