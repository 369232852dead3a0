"""Held-out prompts, answered and scored: means over all ranks, and a readable line each."""

from __future__ import annotations

import lightning as L
import torch
from torch import nn
from torchmetrics import MeanMetric

from lrlhf.rollout import Collected


class ResponseMeans(nn.Module):
    """Mean score, length and truncation of the responses of an evaluation.

    Args:
        reward_names: Of the reward functions, each logged by itself too.
    """

    def __init__(self, reward_names: tuple[str, ...]) -> None:
        super().__init__()
        self._names = ["eval/score", *(f"eval/{name}" for name in reward_names)]
        self._names += ["eval/response_length", "eval/truncated_fraction"]
        self.means = nn.ModuleList(MeanMetric(nan_strategy="ignore") for _ in self._names)

    def log(self, module: L.LightningModule, collected: Collected) -> None:
        """Count the responses of one batch, and have their means logged when all are counted."""
        rollout, rewards = collected.rollout, collected.rewards
        values = torch.cat(
            [
                rewards.scores[:, None].to(module.device),
                rewards.per_function.to(module.device),
                rollout.response_mask.sum(dim=1, keepdim=True),
                rollout.truncated[:, None],
            ],
            dim=1,
        )
        for name, metric, column in zip(self._names, self.means, values.T, strict=True):
            metric(column)
            module.log(name, metric, prog_bar=name == "eval/score", batch_size=len(rollout))  # type: ignore[arg-type]
