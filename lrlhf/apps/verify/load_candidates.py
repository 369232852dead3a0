"""Candidates by the names that the command line has for them."""

from __future__ import annotations

import torch

from lrlhf.apps.verify.candidate_weights import Candidate
from lrlhf.apps.verify.rollout_rows import Padding
from lrlhf.cli.trained_policy import load_trained


def load_candidate(
    name: str, source: str, engine_dtype: str | None, device: str, trusted: bool
) -> Candidate:
    """Load weights to compute with in float32.

    Args:
        name: What reports call them.
        source: See `lrlhf.cli.trained_policy.load_trained`.
        engine_dtype: That the engine computed in; None: that of the stored weights.
        device: ``auto``: a GPU where there is one.
        trusted: Run code that comes with the model.

    Raises:
        ConfigError: Nothing that generates is there.
    """
    policy = load_trained(source, device=device, trust_remote_code=trusted).policy
    stored = next(policy.model.parameters()).dtype
    dtype = stored if engine_dtype is None else getattr(torch, engine_dtype)
    return Candidate(name, policy.model.float(), policy.tokenizer, dtype)


def padding_of(candidate: Candidate) -> Padding:
    """Return what a trainer pads with that has the tokenizer of a candidate."""
    pad = candidate.tokenizer.pad_token_id
    return Padding(pad, pad in candidate.end_ids)
