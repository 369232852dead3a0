"""Tensor parallelism of an engine over ranks of the trainer."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Sequence
from typing import Any, TypeVar

from torch import distributed

T = TypeVar("T")


def check_group_size(size: int, ranks: int) -> None:
    """Raise ``ValueError`` unless ``size`` divides the number of ranks."""
    if ranks % size:
        raise ValueError(
            f"engine.tensor_parallel_size is {size}, and the number of training processes is "
            f"{ranks}: inside of them a model is split over as many as divide their number. Change "
            "either, or take lrlhf.rollout.VLLMServerEngine, which starts processes of its own"
        )


class RankGroup:
    """vLLM's tensor parallel group of this rank."""

    def __init__(self) -> None:
        state: Any = importlib.import_module("vllm.distributed.parallel_state")
        self._group = state.get_tp_group()

    @property
    def rank(self) -> int:
        rank: int = self._group.rank_in_group
        return rank

    def gather(self, value: T) -> list[T]:
        """Return the value of every rank of the group, in order; collective."""
        values: list[Any] = [value] * self._group.world_size
        # on the CPU group, as values are no tensors of a GPU
        distributed.all_gather_object(values, value, group=self._group.cpu_group)
        return values

    def agrees(self, token_ids: Sequence[Sequence[int]]) -> bool:
        """Whether all ranks of the group have the same responses; collective."""
        text = repr([list(row) for row in token_ids]).encode()
        return len(set(self.gather(hashlib.blake2b(text, digest_size=16).digest()))) == 1
