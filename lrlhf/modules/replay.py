"""Stored rollouts in the place of fresh ones."""

from __future__ import annotations

from typing import Any

import torch

from lrlhf.rewards import RewardResult
from lrlhf.rollout import Collected
from lrlhf.types import StoredRollout


def as_collected(stored: StoredRollout, *, step: int) -> Collected:
    """Put a stored rollout into the form of one that was just drawn.

    Args:
        stored: From an earlier iteration, whose number becomes ``stored_step`` in the records.
        step: The iteration that it is trained on in.
    """
    records: list[dict[str, Any]] = [
        {**record, "step": step, "stored_step": record["step"]} for record in stored.records
    ]
    names = tuple(records[0]["rewards"])
    values = [[record["rewards"].get(name) for name in names] for record in records]
    result = RewardResult(
        scores=stored.scores.cpu(),
        per_function=torch.tensor(
            [[float("nan") if value is None else float(value) for value in row] for row in values]
        ),
        names=names,
        metrics={},
        extras={},
        failures=[],
    )
    return Collected(stored.rollout, result, records)
