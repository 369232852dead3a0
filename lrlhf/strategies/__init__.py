"""Strategies that split several models over processes, by name beside those of Lightning."""

from lrlhf.strategies.deepspeed import DeepSpeed
from lrlhf.strategies.fsdp import FSDP2
from lrlhf.strategies.registry import register_strategies

__all__ = [
    "FSDP2",
    "DeepSpeed",
]

register_strategies()
