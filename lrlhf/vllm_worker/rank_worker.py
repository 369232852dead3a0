"""vLLM's CPU worker for tensor parallelism over the ranks of a trainer."""

from __future__ import annotations

import os

from vllm.v1.worker.cpu_worker import CPUWorker


class RankWorker(CPUWorker):  # type: ignore[misc]
    """Communicates with the workers of other ranks over gloo.

    vLLM would use shared memory on one machine, with one name for all runs, so that concurrent runs
    would mix their data, and a killed run would leave it. It also waits forever, with a busy core,
    for a rank that is gone, where gloo fails at once (0.32).
    """

    def init_device(self) -> None:
        # the name of the shared memory, which is used only if it is equal on all ranks
        self.distributed_init_method = f"env://{os.getpid()}"
        super().init_device()
