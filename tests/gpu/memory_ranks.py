"""`tests.gpu.ranks` with FSDP2's ways to save memory as strategies."""

import runpy
from functools import partial

from lrlhf.strategies import FSDP2
from tests.distributed.strategy_runs import STRATEGIES

VARIANTS = {
    "parts": partial(FSDP2, reduce_each_micro_batch=True),
    "parts of copies": partial(FSDP2, reduce_each_micro_batch=True, shard_group=1),
    "parts on the host": partial(FSDP2, reduce_each_micro_batch=True, cpu_offload=True),
    "background": partial(FSDP2, async_save=True),
}

if __name__ == "__main__":
    STRATEGIES.update(VARIANTS)
    runpy.run_module("tests.gpu.ranks", run_name="__main__")
