"""Ranks of the trainer that compute as one engine, each with a part of the model."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import distributed

T = TypeVar("T")


def check_group_size(size: int, ranks: int) -> None:
    """Refuse a split that does not go into the ranks.

    Args:
        size: Ranks of each group, consecutive ones.
        ranks: All of them.

    Raises:
        ValueError: Their number is no multiple of it.
    """
    if ranks % size:
        raise ValueError(
            f"engine.tensor_parallel_size is {size}, and the number of training processes is "
            f"{ranks}: inside of them a model is split over as many as divide their number. Change "
            "either, or take lrlhf.rollout.VLLMServerEngine, which starts processes of its own"
        )


class RankGroup:
    """The group that this rank is in: the very one that vLLM has split the model over."""

    def __init__(self) -> None:
        state: Any = importlib.import_module("vllm.distributed.parallel_state")
        self._group = state.get_tp_group()

    @property
    def place(self) -> int:
        """Number of this rank in its group."""
        place: int = self._group.rank_in_group
        return place

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank of the group, in order; all of them call."""
        values: list[Any] = [value] * self._group.world_size
        # through main memory: what is asked for is no tensor of a GPU
        distributed.all_gather_object(values, value, group=self._group.cpu_group)
        return values

    def agrees(self, token_ids: Sequence[Sequence[int]]) -> bool:
        """Whether all ranks of the group, which all call, have these same responses."""
        told = repr([list(row) for row in token_ids]).encode()
        return len(set(self.gather(hashlib.blake2b(told, digest_size=16).digest()))) == 1
