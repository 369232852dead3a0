"""A run of `strategy_runs` as a program, whose launcher starts the other ranks."""

import sys
from pathlib import Path

import torch

from tests.distributed.strategy_runs import checkpoint, run

if __name__ == "__main__":
    name, strategy, accelerator, devices, model, folder, resumed = sys.argv[1:]
    torch.set_float32_matmul_precision("highest")
    run(
        name,
        Path(model),
        Path(folder),
        strategy=strategy,
        start_method="popen",
        accelerator=accelerator,
        devices=int(devices),
        ckpt_path=checkpoint(Path(resumed), 2) if resumed else None,
    )
