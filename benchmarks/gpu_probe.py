"""What runs of `gpu_run.py` load: a reward that costs nothing."""

from __future__ import annotations

from typing import Any


def first_token(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Half of the vocabulary's first tokens are good ones: scores differ within every group."""
    return [float(ids[0] % 2) for ids in completion_ids]
