"""Names of this library's strategies, beside those of Lightning."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lrlhf.strategies.deepspeed import DeepSpeed
from lrlhf.strategies.fsdp import FSDP2


def register_strategies() -> None:
    """Make ``trainer.strategy: fsdp2`` and the like known; done twice it is done once."""
    StrategyRegistry.register("fsdp2", FSDP2, description=_first_line(FSDP2), override=True)
    for stage in (1, 2, 3):
        StrategyRegistry.register(
            f"deepspeed_zero{stage}",
            DeepSpeed,
            description=_first_line(DeepSpeed),
            override=True,
            stage=stage,
        )


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").splitlines()[0]
