"""Random numbers as a function of (run seed, rank, step, sample), never of call order.

A run that resumes needs no generator state, and a validation pass in between changes nothing.
"""

from __future__ import annotations

import os
import random

import numpy as np
import torch


def run_seed(seed: int | None) -> int:
    """Seed of the run: the given one, else that of ``seed_everything``, else 0."""
    return seed if seed is not None else int(os.environ.get("PL_GLOBAL_SEED", "0"))


def seed_everything_for(seed: int, *where: int) -> None:
    """Seed torch, NumPy and Python for coordinates such as step and rank, each with its stream."""
    words = np.random.SeedSequence([seed, *where]).generate_state(3)
    torch.manual_seed(int(words[0]))
    np.random.seed(int(words[1]))
    random.seed(int(words[2]))


def sample_seeds(seed: int, *where: int, count: int) -> list[int]:
    """Return ``count`` seeds of 32 bits, one per response to the prompt at ``where``."""
    return [int(word) for word in np.random.SeedSequence([seed, *where]).generate_state(count)]
