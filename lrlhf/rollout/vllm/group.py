"""The ranks that share one server."""

from __future__ import annotations

from typing import TypeVar

from torch import distributed

T = TypeVar("T")


class RankGroup:
    """Ranks of the running training; a single process is a group of one."""

    @property
    def rank(self) -> int:
        """Index of this process."""
        return distributed.get_rank() if distributed.is_initialized() else 0

    @property
    def size(self) -> int:
        """Number of processes."""
        return distributed.get_world_size() if distributed.is_initialized() else 1

    @property
    def leads(self) -> bool:
        """Whether this process starts, feeds and ends the server."""
        return self.rank == 0

    def share(self, value: T) -> T:
        """Return the leader's value on every rank."""
        if self.size == 1:
            return value
        shared = [value]
        distributed.broadcast_object_list(shared, src=0)
        return shared[0]

    def worst(self, trouble: int) -> int:
        """Return the largest number of all ranks."""
        if self.size == 1:
            return trouble
        troubles = [0] * self.size
        distributed.all_gather_object(troubles, trouble)
        return max(troubles)
