"""How much of a policy gradient is signal: its mean over prompts beside its variance."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lrlhf.apps.lab.run_files import RunFiles
from lrlhf.cli.trained_policy import load_trained
from lrlhf.datamodules.rows.collate import Candidate, right_padded
from lrlhf.models import sequence_logprobs
from lrlhf.rollout.engines.engine import pad_token_id


class GradientSignal(NamedTuple):
    """What the gradients of single prompts say of the gradient that they estimate."""

    prompts: int
    signal: float
    """Squared norm of the mean gradient, less what noise adds to it; not above 0: none is seen."""
    noise: float
    """Trace of the covariance of a prompt's gradient."""

    @property
    def noise_scale(self) -> float:
        """Prompts whose mean gradient is as much signal as noise; infinite: no signal is seen.

        Reference:
            McCandlish et al. 2018, eq. 2.9, https://arxiv.org/abs/1812.06162
        """
        return self.noise / self.signal if self.signal > 0 else math.inf

    @classmethod
    def of_sums(cls, prompts: int, mean_square: float, squares: float) -> GradientSignal:
        """Estimate both without bias.

        Args:
            prompts: G, at least 2.
            mean_square: Squared norm of the mean of the G gradients.
            squares: Mean of their squared norms.
        """
        signal = (prompts * mean_square - squares) / (prompts - 1)
        return cls(prompts, signal, (squares - mean_square) * prompts / (prompts - 1))


def gradient_signal(
    run: RunFiles, *, prompts: int = 16, source: str | None = None
) -> dict[str, GradientSignal]:
    """Compute the gradient of each of the last prompts, for the score and for each reward.

    A prompt's gradient is that of the mean over its responses of (reward - mean) · log π(response),
    as of `rloo` without its factor; prompts whose responses agree have one of 0 and count.

    Args:
        run: With ``rollouts.jsonl``.
        prompts: The last of the run, at least 2.
        source: The policy, as `lrlhf.cli.trained_policy.load_trained` finds it; None: the newest
            checkpoint of the run, whose weights sampled the last responses.

    Returns:
        By name of the reward; ``score`` is their weighted sum.

    Raises:
        ConfigError: No policy is there.
        ValueError: There are less than two prompts of text without given tokens, or responses were
            not sampled by a policy with this tokenizer.
    """
    trained = load_trained(source or str(run.folder))
    model, tokenizer = trained.policy.model, trained.policy.tokenizer
    model.requires_grad_(requires_grad=True)
    weights = [weight for weight in model.parameters() if weight.dtype.is_floating_point]
    groups = _last_groups(run, prompts)
    sums: dict[str, list[Tensor]] = {}
    squares: dict[str, list[float]] = {}
    for rows in groups:
        candidates = [_candidate(row, tokenizer) for row in rows]
        rewards = _rewards(rows)
        for name in rewards.keys() - sums.keys():
            sums[name], squares[name] = [torch.zeros_like(weight) for weight in weights], []
        if not any(map(any, rewards.values())):  # responses that agree
            continue
        batch = right_padded(candidates, pad_token_id(tokenizer)).to(model.device)
        temperature = rows[0].get("temperature") or 1.0
        logprobs = sequence_logprobs(model, batch, temperature=temperature).sum(dim=1)
        for name, values in rewards.items():
            loss = logprobs @ torch.tensor(values, dtype=logprobs.dtype, device=model.device)
            gradients = torch.autograd.grad(
                loss / len(rows), weights, retain_graph=True, allow_unused=True
            )
            squares[name].append(_square([own for own in gradients if own is not None]))
            for total, gradient in zip(sums[name], gradients, strict=True):
                if gradient is not None:
                    total.add_(gradient)
    count = len(groups)
    return {
        name: GradientSignal.of_sums(
            count, _square(total) / count**2, math.fsum(squares[name]) / count
        )
        for name, total in sums.items()
    }


def _square(tensors: Sequence[Tensor]) -> float:
    return math.fsum(float(tensor.double().square().sum()) for tensor in tensors)


def _last_groups(run: RunFiles, prompts: int) -> list[list[dict[str, Any]]]:
    groups: deque[list[dict[str, Any]]] = deque(maxlen=prompts)
    for rows in run.groups():
        own = [row for row in rows if row.get("score") is not None and row.get("token_ids")]
        if len(own) > 1 and not any(row.get("given_tokens") or row.get("media") for row in own):
            groups.append(own)
    if len(groups) < 2:
        raise ValueError(
            f"{run.folder}: the gradient's signal takes at least two prompts with two scored "
            "responses each, in text and sampled as a whole"
        )
    return list(groups)


def _candidate(row: Mapping[str, Any], tokenizer: Any) -> Candidate:
    prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
    ids = [*prompt, *row["token_ids"]]
    if max(ids) >= len(tokenizer):
        raise ValueError(f"token {max(ids)} of step {row['step']} is none of this tokenizer's")
    return Candidate(input_ids=np.array(ids), start=len(prompt))


def _rewards(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return the score and each reward less its mean; a missing reward counts as the mean."""
    columns = {"score": [float(row["score"]) for row in rows]}
    for name in rows[0].get("rewards") or {}:
        own = [(row.get("rewards") or {}).get(name) for row in rows]
        if any(value is not None for value in own):
            columns[name] = [math.nan if value is None else value for value in own]
    if len(columns) == 2:
        columns = {"score": columns["score"]}
    return {
        name: np.nan_to_num(np.array(own) - np.nanmean(own)).tolist()
        for name, own in columns.items()
    }
