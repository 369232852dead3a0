"""Dynamic sampling: zero-variance groups, which teach nothing, are replaced before an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from lrlhf.rewards import RewardResult
from lrlhf.rollout.collector import Collected
from lrlhf.types import ROLLOUT_TENSORS, PromptBatch, Rollout, SamplingMask, joined_media


class Filtered(NamedTuple):
    """The responses to train on, and the course of the sampling."""

    collected: Collected
    padding_rows: Bool[Tensor, " B"]
    """Padding rows: groups without a learning signal that complete the batch."""
    everything: Collected
    """All generated responses."""
    rounds: int
    used: int
    """Number of prompts sampled for."""


def collect_different(
    prompts: PromptBatch,
    sample: Callable[[PromptBatch, int], Collected],
    *,
    count: int,
    num_generations: int,
    any_rank: Callable[[bool], bool],
    scores_of: Callable[[Collected], Tensor] = lambda collected: collected.rewards.scores,
    informative: Callable[[Collected], Bool[Tensor, " P"]] | None = None,
) -> Filtered:
    """Sample in rounds until enough groups have a learning signal (DAPO, Yu et al. 2025).

    Args:
        prompts: The candidates; their number is the budget.
        sample: Generates and scores responses to some of them, with the index of the first.
        count: Number of groups to return.
        num_generations: Responses per prompt.
        scores_of: `[B]`, the scores that are trained on, or `[B, K]`, several of each response;
            NaN: the response is not trained on.
        informative: Whether each group has a learning signal; None: whether its scores differ.
        any_rank: Whether a condition holds on any rank. All ranks sample the same number of
            rounds, as an engine may need them together.

    Returns:
        Exactly ``count`` groups in the order of sampling: those with a signal, then padding.

    Reference:
        Yu et al. 2025, DAPO, https://arxiv.org/abs/2503.14476
    """
    rounds: list[Collected] = []
    different: list[bool] = []
    used = 0
    while used < len(prompts) and any_rank(sum(different) < count):
        size = min(count, len(prompts) - used)
        part = sample(prompts.select(torch.arange(used, used + size)), used)
        rounds.append(part)
        if informative:
            signal = informative(part)
        else:
            signal = groups_differ(scores_of(part), num_generations)
        different += signal.tolist()
        used += size
    first = [group for group, differs in enumerate(different) if differs][:count]
    padding = [group for group, differs in enumerate(different) if not differs]
    chosen = first + padding[: count - len(first)]
    rows = torch.tensor([g * num_generations + i for g in chosen for i in range(num_generations)])
    device = rounds[0].rollout.input_ids.device
    padding_rows = (
        torch.arange(count * num_generations, device=device) >= len(first) * num_generations
    )
    everything = merge_collected(rounds)
    return Filtered(_selected(everything, rows), padding_rows, everything, len(rounds), used)


def groups_differ(scores: Float[Tensor, "B ..."], num_generations: int) -> Bool[Tensor, " P"]:
    """Tell which groups are not zero-variance: their scores, or any of K scores, differ.

    NaN is no score.
    """
    groups = scores.unsqueeze(-1).reshape(-1, num_generations, *scores.shape[1:], 1)
    highest = groups.nan_to_num(nan=-torch.inf).amax(dim=1)
    lowest = groups.nan_to_num(nan=torch.inf).amin(dim=1)
    return (highest > lowest).flatten(1).any(dim=1)


def merge_collected(parts: Sequence[Collected]) -> Collected:
    """Concatenate the rounds of an iteration, with consecutive group numbers."""
    if len(parts) == 1:
        return parts[0]
    rollouts = _with_equal_fields([part.rollout for part in parts])
    offsets = [0, *accumulate(int(rollout.group_ids.max()) + 1 for rollout in rollouts)][:-1]
    width = max(rollout.input_ids.shape[1] for rollout in rollouts)
    merged: dict[str, Any] = {"media": joined_media(rollouts)}
    if rollouts[0].episodes is not None:
        merged["episodes"] = tuple(each for rollout in rollouts for each in rollout.episodes or ())
    masks = [rollout.sampling_mask for rollout in rollouts if rollout.sampling_mask is not None]
    if masks:
        sizes = [F.pad(mask.sizes, (0, width - mask.sizes.shape[1])) for mask in masks]
        ids = torch.cat([mask.ids for mask in masks])
        merged["sampling_mask"] = SamplingMask(sizes=torch.cat(sizes), ids=ids)
    for name in ROLLOUT_TENSORS:
        columns = [getattr(rollout, name) for rollout in rollouts]
        if name == "group_ids":
            columns = [ids + offset for ids, offset in zip(columns, offsets, strict=True)]
        if columns[0] is not None and columns[0].dim() > 1:
            # padding is masked, so its value does not matter
            after = (0, 0) * (columns[0].dim() - 2)
            columns = [F.pad(column, (*after, 0, width - column.shape[1])) for column in columns]
        merged[name] = None if columns[0] is None else torch.cat(columns)
    return Collected(
        Rollout(**merged),
        _merge_rewards([part.rewards for part in parts]),
        [
            {**record, "group": record["group"] + offset}
            for part, offset in zip(parts, offsets, strict=True)
            for record in part.records
        ],
        {
            name: torch.cat([part.extra_values[name] for part in parts])
            for name in parts[0].extra_values
        },
    )


def _with_equal_fields(rollouts: list[Rollout]) -> list[Rollout]:
    """Add zeros to rounds without rewards of turns, or without forks, where others have them."""
    for name in ("turn_rewards", "forks"):
        known = [getattr(rollout, name) for rollout in rollouts]
        dtype = next((column.dtype for column in known if column is not None), None)
        if dtype is None:
            continue
        rollouts = [
            replace(rollout, **cast(Any, {name: torch.zeros_like(rollout.input_ids, dtype=dtype)}))
            if own is None
            else rollout
            for rollout, own in zip(rollouts, known, strict=True)
        ]
    return rollouts


def _selected(collected: Collected, rows: Tensor) -> Collected:
    rewards, chosen = collected.rewards, rows.tolist()
    return Collected(
        collected.rollout.select(rows),
        replace(
            rewards,
            scores=rewards.scores[rows],
            per_function=rewards.per_function[rows],
            weights=None if rewards.weights is None else rewards.weights[rows],
            extras={
                name: [values[row] for row in chosen] for name, values in rewards.extras.items()
            },
        ),
        [collected.records[row] for row in chosen],
        {name: values[rows.to(values.device)] for name, values in collected.extra_values.items()},
    )


def _merge_rewards(results: Sequence[RewardResult]) -> RewardResult:
    rows = [len(result.scores) for result in results]
    weights = [result.weights for result in results if result.weights is not None]
    metrics: dict[str, float] = {}
    for name in {name: None for result in results for name in result.metrics}:
        having = [(r, n) for r, n in zip(results, rows, strict=True) if name in r.metrics]
        metrics[name] = sum(r.metrics[name] * n for r, n in having) / sum(n for _, n in having)
    extras: dict[str, list[Any]] = {}
    for name in {name: None for result in results for name in result.extras}:
        extras[name] = [
            value
            for result, count in zip(results, rows, strict=True)
            for value in result.extras.get(name, [None] * count)
        ]
    return RewardResult(
        scores=torch.cat([result.scores for result in results]),
        per_function=torch.cat([result.per_function for result in results]),
        weights=torch.cat(weights) if len(weights) == len(results) else None,
        names=results[0].names,
        metrics=metrics,
        extras=extras,
        failures=[failure for result in results for failure in result.failures],
    )
