"""Settings that cannot work, said before they cost an iteration."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lrlhf.rollout import nearest_divisors


def refuse_pure_low_precision(trainer: L.Trainer) -> None:
    """Refuse 16-bit weights without a 32-bit master copy.

    At the learning rates of reinforcement learning most updates are smaller than half a unit in
    the last place of a bfloat16 weight and vanish: at 1e-6, 98 of 100 weights never change.

    Raises:
        ValueError: The trainer keeps its only copy of the weights in 16 bits.
    """
    plain = isinstance(trainer.strategy, DDPStrategy | SingleDeviceStrategy)
    if plain and trainer.precision in ("bf16-true", "16-true"):
        raise ValueError(
            f"trainer.precision is {trainer.precision}: updates at the learning rates of "
            "reinforcement learning would be rounded away; use bf16-mixed, which computes in "
            "bfloat16 and keeps the weights in float32"
        )


def check_batch_algebra(rows: int, minibatch_size: int | None, world_size: int) -> None:
    """Check that the responses of an iteration split into equal optimizer steps.

    Args:
        rows: Responses of this rank.
        minibatch_size: Responses of all ranks per optimizer step; None: all.
        world_size: Number of ranks.

    Raises:
        ValueError: They do not split; names the nearest sizes that do.
    """
    if minibatch_size is None:
        return
    total = rows * world_size
    if minibatch_size % world_size or total % minibatch_size:
        sizes = [
            int(size) * world_size
            for size in nearest_divisors(rows, max(1, minibatch_size // world_size)).split(" and ")
        ]
        raise ValueError(
            f"update.minibatch_size is {minibatch_size}, but an iteration has {total} responses "
            f"on {world_size} process(es); the nearest sizes that divide it are "
            f"{' and '.join(map(str, sizes))}"
        )
