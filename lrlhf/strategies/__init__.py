"""Strategies that split several models over processes, by name beside those of Lightning."""

from lightning.pytorch.strategies import StrategyRegistry

from lrlhf.strategies.deepspeed import DeepSpeed
from lrlhf.strategies.fsdp import FSDP2

__all__ = [
    "FSDP2",
    "DeepSpeed",
]

StrategyRegistry.register("fsdp2", FSDP2, override=True)
for _stage in (1, 2, 3):
    StrategyRegistry.register(f"deepspeed_zero{_stage}", DeepSpeed, override=True, stage=_stage)
