"""A connection for weights that may end in the middle of a push."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from lrlhf.rollout.engines.synced_engine import EngineFailure
from lrlhf.vllm_worker.gloo import GlooGroup

_LOCK_SECONDS = 5.0


class BreakableGroup:
    """A group that does nothing any more once something went wrong, so that ranks stay in step.

    Args:
        group: `GlooGroup`, or vLLM's communicator for NCCL.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._lock = threading.Lock()
        self.failure: Exception | None = None

    def broadcast(self, tensor: Tensor, src: int = 0, **options: Any) -> None:
        """Send a tensor, unless the group is broken."""
        with self._lock:
            if self.failure is not None:
                return
            try:
                self._group.broadcast(tensor, src=src, **options)
            except RuntimeError as error:
                if self.failure is None:
                    self.failure = error
                    self._group.destroy()

    def break_off(self, reason: Exception) -> None:
        """Have the other members fail, and whoever waits for them here; from any thread."""
        first, self.failure = self.failure is None, self.failure or reason
        # NCCL must not be called while its communicator is given up, but one that waits inside a
        # broadcast is only freed by that; gloo can be left at any time
        held = not isinstance(self._group, GlooGroup) and self._lock.acquire(timeout=_LOCK_SECONDS)
        if first:
            self._group.destroy()
        if held:
            self._lock.release()

    def destroy(self) -> None:
        """Leave the group."""
        self.break_off(EngineFailure("the connection for weights was closed"))
