"""Stored rollouts in the place of fresh ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lrlhf.rewards import RewardResult
from lrlhf.rollout import Collected, Sampling, beside_of
from lrlhf.types import StoredRollout


def check_stored(
    stored: StoredRollout,
    *,
    num_generations: int,
    sampling: Sampling,
    allow_truncated_sampling: bool,
    beside: Iterable[str] = (),
    step: int,
    holds_copy: bool,
) -> None:
    """Check that a stored rollout was sampled as this run would have sampled it.

    Args:
        stored: Of an earlier iteration.
        num_generations: Responses per prompt of this run.
        sampling: Of this run.
        allow_truncated_sampling: Whether responses may come from top_p, top_k, min_p
            or min_new_tokens.
        beside: What the algorithm samples beside the responses, whose scores it needs.
        step: The iteration that it is trained on in.
        holds_copy: Whether this run's engine has a copy of the weights.

    Raises:
        ValueError: It was not; says which option differs.
    """
    ids = stored.rollout.group_ids
    whole = len(ids) % num_generations == 0
    groups = ids.view(-1, num_generations) if whole else ids[:, None]
    starts = groups[:, 0]
    if not (whole and (groups == starts[:, None]).all() and (starts[1:] != starts[:-1]).all()):
        sizes = sorted(set(torch.unique_consecutive(ids, return_counts=True)[1].tolist()))
        raise ValueError(
            f"num_generations is {num_generations}, but the stored rollout has groups of "
            f"{' and '.join(map(str, sizes))} responses; set it as in the run that stored them"
        )
    sampled_at = stored.records[0].get("temperature", sampling.temperature)
    if sampled_at != sampling.temperature:
        raise ValueError(
            f"sampling.temperature is {sampling.temperature}, but the stored rollout was sampled "
            f"at {sampled_at}: the log-probabilities do not compare; set it to {sampled_at}"
        )
    if stored.as_recorded:
        _check_recorded(stored, step=step, holds_copy=holds_copy)
    for name in beside:
        if name not in stored.records[0].get("beside", {}):
            raise ValueError(
                f"the algorithm compares with the score of {name!r}, which the stored rollout has "
                "not: store it with the same algorithm, or choose another one"
            )
    if stored.rollout.kept_mass is not None:
        _check_drawn(stored.records[0], sampling, allow_truncated_sampling)


def _check_drawn(
    record: Mapping[str, Any], sampling: Sampling, allow_truncated_sampling: bool
) -> None:
    """Check tokens that were not drawn from the policy alone: what makes up for them is known."""
    hot = record.get("first_temperature"), record.get("first_top_k", 0)
    own = sampling.first_temperature, sampling.first_top_k
    if hot[0] is not None and hot != own:
        raise ValueError(
            f"the stored rollout was sampled with first_temperature {hot[0]} and first_top_k "
            f"{hot[1]}, here they are {own[0]} and {own[1]}, and only as they were the responses "
            "get the weights that make up for them; set both in sampling"
        )
    if hot[0] is None and sampling.starts_hot:  # also where it was not stored yet how
        raise ValueError(
            "the stored rollout does not tell how its first tokens were drawn: if hot, then before "
            "first_temperature was stored: sample and store it anew; if with top_p, top_k, min_p "
            "or min_new_tokens, which no weights make up for: leave first_temperature out of "
            "sampling"
        )
    if hot[0] is None and not allow_truncated_sampling:
        raise ValueError(
            "the stored rollout was sampled with top_p, top_k, min_p or min_new_tokens, whose "
            "distribution is not the policy's; accept the bias with "
            "allow_truncated_sampling: true"
        )


def _check_recorded(stored: StoredRollout, *, step: int, holds_copy: bool) -> None:
    """Check that the update can be the one of the earlier run."""
    if stored.rollout.weight_version is None or not holds_copy:
        raise ValueError(
            "as_recorded replays responses of an engine that has a copy of the weights, and needs "
            "the model.engine of the recorded run (it is not started): set it, or drop as_recorded"
        )
    recorded = stored.records[0]["step"]
    if recorded != step:
        raise ValueError(
            f"iteration {step} was given the responses of iteration {recorded}, and as_recorded "
            "repeats the updates of the recorded run: set shuffle: false, keep all of its files, "
            "and begin with the weights or the checkpoint that it began with"
        )


def as_collected(stored: StoredRollout, *, step: int) -> tuple[Collected, Tensor]:
    """Put a stored rollout into the form of one that was just sampled.

    Args:
        stored: From an earlier iteration, whose number becomes ``stored_step`` in the records.
        step: The iteration that it is trained on in.

    Returns:
        The rollout, and `[B]` the rows that only filled its batch.
    """
    records: list[dict[str, Any]] = [
        {**record, "step": step, "stored_step": record["step"]} for record in stored.records
    ]
    names = tuple(records[0]["rewards"])
    result = RewardResult(
        scores=stored.scores.cpu(),
        per_function=_table(names, [record["rewards"] for record in records]),
        weights=_table(names, [record["weights"] for record in records])
        if all("weights" in record for record in records)
        else None,
        names=names,
        metrics={},
        extras={},
        failures=[],
    )
    filler = torch.tensor(
        [bool(record.get("filler", False)) for record in records],
        device=stored.rollout.truncated.device,
    )
    return Collected(stored.rollout, result, records, beside_of(records)), filler


def _table(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Float[Tensor, "B K"]:
    """Read numbers of records; NaN: null, or none of that name."""
    values = [[row.get(name) for name in names] for row in rows]
    return torch.tensor(
        [[math.nan if value is None else float(value) for value in row] for row in values]
    )
