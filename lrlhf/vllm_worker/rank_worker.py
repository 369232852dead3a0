"""vLLM's CPU worker where ranks of a trainer, and no processes of vLLM's, share a model."""

from __future__ import annotations

import os

from vllm.v1.worker.cpu_worker import CPUWorker


class RankWorker(CPUWorker):  # type: ignore[misc]
    """Talks to the workers of the other ranks over gloo.

    On one machine vLLM would go through shared memory, whose name is the same for all runs, so that
    two would mix up their numbers, and stays behind if a run is killed. It also waits for a rank
    that is gone for ever, with all of a core, where gloo fails at once (0.32).
    """

    def init_device(self) -> None:
        # the shared memory is named by it, and is taken only if all ranks name it alike
        self.distributed_init_method = f"env://{os.getpid()}"
        super().init_device()
