"""Pairs that were trained on since the last logged row, across a resume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics.utilities import dim_zero_cat

from lrlhf.modules.metrics.reward_metrics import RewardMetrics


def pending_pairs(metrics: RewardMetrics) -> list[dict[str, Tensor]]:
    """Collect what a metric holds, of each rank; all ranks must call it.

    Returns:
        Of each rank its scores, labels and losses [N, H, 4] and lengths [N, 2]; empty where it has
        seen no pair.
    """
    own: dict[str, Tensor] = {}
    if metrics.pairs:
        states = {"pairs": metrics.pairs, "lengths": metrics.lengths}
        own = {name: dim_zero_cat(state).cpu() for name, state in states.items()}
    if not _distributed():
        return [own]
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, own)
    return parts


def take_up_pairs(metrics: RewardMetrics, parts: Sequence[dict[str, Tensor]]) -> None:
    """Put back what `pending_pairs` has collected: to its rank, or all to the first of others."""
    rank = torch.distributed.get_rank() if _distributed() else 0
    ranks = torch.distributed.get_world_size() if _distributed() else 1
    mine = [parts[rank]] if ranks == len(parts) else list(parts if rank == 0 else ())
    metrics.reset()
    for part in filter(None, mine):
        pairs, lengths = (part[name].to(metrics.device) for name in ("pairs", "lengths"))
        scores0, scores1, labels, losses = pairs.unbind(dim=-1)
        metrics.update(scores0, scores1, losses, labels, lengths)


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
