"""Are rewards, advantages, KL and loss those of the formula that a run names?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lrlhf.apps.verify.answers import Answer
from lrlhf.apps.verify.rollout_rows import Row
from lrlhf.functional import EstimatorInputs, aggregate, kl_estimate
from lrlhf.functional.algorithms import ESTIMATORS
from lrlhf.functional.masking import masked_mean, masked_sum, whiten

_COPIES = 4
_SAFETY = 4.0
"""Rounding errors of the measured size that a sound difference may have."""
_UNKNOWN = ("ppo", "gae", "distillation", "remax", "mt_grpo", "rloo_turn", "gdpo")
"""Estimators that need a critic, a teacher, further samples or the rewards of turns."""


class Batch(NamedTuple):
    """The complete groups of one step, one after the other."""

    rows: list[Row]
    inputs: EstimatorInputs
    advantages: Tensor
    """`[B, T]` as recorded, 0 where there is none."""
    seen: Tensor
    """`[B, T]` bool: the tokens whose advantage was recorded."""


Formula = Callable[[EstimatorInputs], Tensor]


def _grouped(values: Tensor, size: int) -> Tensor:
    return values.view(-1, size)


def _spread(values: Tensor, inputs: EstimatorInputs) -> Tensor:
    return torch.where(inputs.response_mask, values.nan_to_num(0.0)[:, None], 0.0)


def _penalized(inputs: EstimatorInputs) -> Tensor:
    return inputs.scores - inputs.kl_coef * masked_sum(inputs.kl, inputs.response_mask, dim=1)


def _with_deviation(*, whole: bool, biased: bool, eps: float) -> Formula:
    """Return the z-score in which libraries differ: of which scores, with which deviation."""

    def formula(inputs: EstimatorInputs) -> Tensor:
        rewards = _penalized(inputs)
        groups = _grouped(rewards, inputs.num_generations)
        centred = groups - groups.nanmean(dim=1, keepdim=True)
        known = rewards[~rewards.isnan()] if whole else None
        if known is not None:
            deviation = known.std(correction=0 if biased else 1)
        else:
            count = (~groups.isnan()).sum(dim=1, keepdim=True)
            squares = centred.square().nansum(dim=1, keepdim=True)
            deviation = (squares / (count - (0 if biased else 1)).clamp(min=1)).sqrt()
        return _spread((centred / (deviation + eps)).flatten(), inputs)

    return formula


def _opo(inputs: EstimatorInputs) -> Tensor:
    rewards = _grouped(_penalized(inputs), inputs.num_generations)
    lengths = _grouped(inputs.response_mask.sum(dim=1).double(), inputs.num_generations)
    baseline = (rewards * lengths).sum(dim=1, keepdim=True) / lengths.sum(dim=1, keepdim=True)
    return _spread((rewards - baseline).flatten(), inputs)


def _across_batch(inputs: EstimatorInputs) -> Tensor:
    """Z-score over the batch, as REINFORCE++ has it for one reward per response."""
    rewards = _penalized(inputs)
    known = rewards[~rewards.isnan()]
    return _spread((rewards - known.mean()) / (known.std() + 1e-8), inputs)


def _other_groups(inputs: EstimatorInputs) -> Tensor:
    """Leave-one-out over rows that stand far apart, as where a batch was read in another order."""
    size = inputs.num_generations
    moved = inputs.scores.view(size, -1).T.flatten()
    found = ESTIMATORS["rloo"](inputs._replace(scores=moved, kl=torch.zeros_like(inputs.kl)))
    per_row = found.sum(dim=1) / inputs.response_mask.sum(dim=1).clamp(min=1)
    return _spread(per_row.view(-1, size).T.flatten(), inputs)


def _whitened(name: str) -> Formula:
    estimator = ESTIMATORS[name]

    def formula(inputs: EstimatorInputs) -> Tensor:
        found = estimator(inputs)
        mask = inputs.response_mask & ~inputs.scores.isnan()[:, None]
        if estimator.normalize == "token":
            return whiten(found, mask) * mask
        if estimator.normalize == "sequence":
            per_row, rows = masked_mean(found, mask, dim=1), mask.any(dim=1)
            return found + (whiten(per_row, rows, eps=1e-4) - per_row)[:, None] * mask
        return found

    return formula


FORMULAS: dict[str, Formula] = {
    **{
        name: _whitened(name)
        for name in ESTIMATORS
        if name not in _UNKNOWN and not ESTIMATORS[name].uses_values
    },
    "GRPO with ε = 1e-6 (verl)": _with_deviation(whole=False, biased=False, eps=1e-6),
    "GRPO with ε = 1e-9 (OpenRLHF)": _with_deviation(whole=False, biased=False, eps=1e-9),
    "GRPO with the deviation of the population": _with_deviation(
        whole=False, biased=True, eps=1e-4
    ),
    "GRPO with the deviation of the population and ε = 1e-6": _with_deviation(
        whole=False, biased=True, eps=1e-6
    ),
    "group mean and the deviation of the batch (TRL: scale_rewards='batch')": _with_deviation(
        whole=True, biased=False, eps=1e-4
    ),
    "z-score over the batch": _across_batch,
    "OPO, a mean weighted by length": _opo,
    "the plain score, without a baseline": lambda inputs: _spread(_penalized(inputs), inputs),
    "leave-one-out over the rows of other groups": _other_groups,
}
"""Advantages by name: those of lrlhf, and what else libraries compute."""


def batches(rows: Sequence[Row], masks: Sequence[Tensor | None], kl_coef: float) -> Iterator[Batch]:
    """Group rows into the batches of their steps; rows without a score or group are left out."""
    steps: dict[int, list[tuple[Row, Tensor | None]]] = defaultdict(list)
    for row, mask in zip(rows, masks, strict=True):
        advantages = row.tokens.get("advantages")
        if advantages is not None or not math.isnan(row.advantage):
            steps[row.step].append((row, mask))
    for step in sorted(steps):
        groups: dict[Hashable, list[tuple[Row, Tensor | None]]] = defaultdict(list)
        for row, mask in steps[step]:
            groups[_group_key(row)].append((row, mask))
        sizes = {len(members) for members in groups.values()}
        if len(sizes) != 1:
            most = max(sizes, key=lambda size: sum(len(m) == size for m in groups.values()))
            groups = {key: members for key, members in groups.items() if len(members) == most}
        ordered = [pair for members in groups.values() for pair in members]
        if ordered:
            yield _batch(ordered, len(next(iter(groups.values()))), kl_coef)


def _group_key(row: Row) -> Hashable:
    if row.group is not None:
        return row.group
    if row.prompt is not None:
        return repr(row.prompt)
    return () if row.ids is None else tuple(row.ids[: row.start].tolist())


def _batch(pairs: Sequence[tuple[Row, Tensor | None]], size: int, kl_coef: float) -> Batch:
    length = max((int(mask.sum()) for _, mask in pairs if mask is not None), default=1) or 1
    shape = (len(pairs), length)
    mask, seen = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    kl, advantages = (
        torch.zeros(shape, dtype=torch.float64),
        torch.zeros(shape, dtype=torch.float64),
    )
    for index, (row, own) in enumerate(pairs):
        if own is None or row.ids is None:
            mask[index, 0] = seen[index, 0] = True
            advantages[index, 0] = row.advantage
            continue
        count = int(own.sum())
        mask[index, :count] = True
        recorded = row.tokens["advantages"][own]
        advantages[index, :count] = recorded.nan_to_num(0.0)
        trained = (
            row.loss_mask[own] if row.loss_mask is not None else torch.ones_like(recorded).bool()
        )
        seen[index, :count] = recorded.isfinite() & trained
        if "ref" in row.tokens and ("old" in row.tokens or "sampling" in row.tokens):
            policy = row.tokens.get("old", row.tokens.get("sampling"))
            assert policy is not None, "one of the two"
            gap = (policy - row.tokens["ref"])[own]
            kl[index, :count] = gap.nan_to_num(0.0)
    inputs = EstimatorInputs(
        scores=torch.tensor([row.score for row, _ in pairs], dtype=torch.float64),
        kl=kl,
        response_mask=mask,
        num_generations=size,
        kl_coef=kl_coef,
        baseline_mask=torch.ones(len(pairs), dtype=torch.bool),
    )
    return Batch([row for row, _ in pairs], inputs, advantages, seen)


def _tolerance(formula: Formula, batch: Batch) -> Tensor:
    """Return `[B, 1]`: how far rounding of scores and advantages to float32 moves an advantage."""
    exact = formula(batch.inputs)
    moved = torch.zeros_like(exact)
    generator = torch.Generator().manual_seed(0)
    for _ in range(_COPIES):
        noise = torch.rand(exact.shape[0], generator=generator, dtype=torch.float64) * 2 - 1
        size = float(batch.inputs.scores.abs().nan_to_num(0.0).max())
        scores = batch.inputs.scores + size * 2.0**-23 * noise
        # log-probabilities in float32 lose their last bits in the sums behind them
        jitter = torch.rand(exact.shape, generator=generator, dtype=torch.float64) * 2 - 1
        kl = batch.inputs.kl + 2.0**-19 * jitter
        inputs = batch.inputs._replace(scores=scores, kl=kl)
        moved = torch.maximum(moved, (formula(inputs) - exact).abs())
    written = 2.0**-23 * exact.abs().clamp(min=1e-3) + 1e-5 * exact.abs()
    return _SAFETY * (moved + written).amax(dim=1, keepdim=True)


def _misses(formula: Formula, batch: Batch) -> Tensor:
    """Return `[B]` bool: the rows that differ from a formula by more than rounding."""
    gap = (formula(batch.inputs) - batch.advantages).abs()
    return ((gap > _tolerance(formula, batch)) & batch.seen).any(dim=1)


def check_advantages(
    found: Sequence[Batch], algorithm: str | None, kl_in: str | None
) -> list[Answer]:
    """Compare advantages with the algorithm that is named, and look for the one that they are.

    Args:
        found: Of each step.
        algorithm: A key of `FORMULAS`; None: it is looked for.
        kl_in: ``reward``: the k1 penalty is part of the scores; else it is not.
    """
    if not found:
        return [Answer("advantages", "unknown", "the file has no advantages")]
    if all(batch.inputs.scores.isnan().all() for batch in found):
        return [Answer("advantages", "unknown", "the file has advantages and no scores")]
    answers = _check_scores([row for batch in found for row in batch.rows])
    total = sum(len(batch.rows) for batch in found)
    penalty = [batch._replace(inputs=batch.inputs._replace(kl_coef=0.0)) for batch in found]
    used = list(found) if kl_in == "reward" else penalty
    if algorithm is not None:
        wrong = [
            row.place
            for batch in used
            for row, off in zip(
                batch.rows, _misses(FORMULAS[algorithm], batch).tolist(), strict=True
            )
            if off
        ]
        if not wrong:
            text = f"the advantages of {total:,} responses are those of {algorithm}"
            return [*answers, Answer("advantages", "sound", text)]
    fitting = [
        (name, kind)
        for kind, these in (
            ("", used),
            (" with the KL penalty", found),
            (" without the KL penalty", penalty),
        )
        for name, formula in FORMULAS.items()
        if not any(bool(_misses(formula, batch).any()) for batch in these)
        and (
            kind != " with the KL penalty"
            or any(bool((b.inputs.kl != 0).any()) and b.inputs.kl_coef for b in found)
        )
    ]
    names = list(dict.fromkeys(name + kind for name, kind in fitting))
    if kl_in != "reward":
        names = [name for name in names if not name.endswith(" without the KL penalty")]
    if algorithm is None:
        if names:
            text = f"the advantages of {total:,} responses are those of {', '.join(names)}"
            return [*answers, Answer("advantages", "sound", text)]
        return [*answers, Answer("advantages", "unknown", "no formula that is known fits them")]
    seen = f"{names[0]} fits all" if names else _multiple(used, algorithm)
    text = f"{len(wrong):,} of {total:,} advantages are not those of {algorithm}; {seen}"
    return [*answers, Answer("advantages", "fault", text, {"fits": names}, wrong)]


def _multiple(found: Sequence[Batch], algorithm: str) -> str:
    """Describe advantages that are a multiple of a formula, row by row or all of them."""
    ratios = []
    for batch in found:
        exact = FORMULAS[algorithm](batch.inputs)
        there = batch.seen & (exact.abs() > 1e-3)
        ratios.append((batch.advantages / exact)[there])
    ratio = torch.cat(ratios)
    if len(ratio) and float(ratio.max() - ratio.min()) <= 1e-4 * abs(float(ratio.mean())):
        return f"they are {float(ratio.mean()):.4g} times those"
    return "no formula that is known fits all"


def _check_scores(rows: Sequence[Row]) -> list[Answer]:
    """Check that the score of a response is the weighted sum of its rewards."""
    wrong, known = [], 0
    for row in rows:
        if len(row.parts) < 1 or math.isnan(row.score):
            continue
        known += 1
        values = [
            value * row.weights.get(name, 1.0)
            for name, value in row.parts.items()
            if not math.isnan(value) and not math.isnan(row.weights.get(name, 1.0))
        ]
        bound = 1e-4 * max([1e-3, abs(row.score), *map(abs, values)])
        if abs(sum(values) - row.score) > bound:
            wrong.append(row.place)
    if not wrong:
        return []
    text = f"the score of {len(wrong):,} of {known:,} responses is not the sum of its rewards"
    return [Answer("advantages", "fault", text, {}, wrong)]


def check_kl(rows: Sequence[Row], masks: Sequence[Tensor | None], form: str | None) -> list[Answer]:
    """Compare recorded KL estimates with the forms k1, k2 and k3.

    Args:
        rows: The rollouts.
        masks: Their sampled tokens.
        form: ``k1``, ``k2`` or ``k3``; None: it is looked for.
    """
    known = []
    for row, mask in zip(rows, masks, strict=True):
        policy = row.tokens.get("old", row.tokens.get("sampling"))
        if mask is None or policy is None or not {"kl", "ref"} <= row.tokens.keys():
            continue
        keep = mask & row.tokens["kl"].isfinite() & policy.isfinite()
        known.append((row, row.tokens["kl"][keep], policy[keep], row.tokens["ref"][keep]))
    if not known:
        return [
            Answer("kl", "unknown", "the file has no KL beside log-probabilities of both models")
        ]
    forms: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        **{
            name: lambda policy, ref, name=name: kl_estimate(policy, ref, estimator=name)  # type: ignore[misc]
            for name in ("k1", "k2", "k3")
        },
        "|k1|": lambda policy, ref: (policy - ref).abs(),
        "k1 with policy and reference exchanged": lambda policy, ref: ref - policy,
        "k3 with policy and reference exchanged": lambda policy, ref: kl_estimate(
            ref, policy, estimator="k3"
        ),
    }
    wrong = {
        name: [
            row.place
            for row, kl, policy, ref in known
            if bool(
                (
                    (kl - estimate(policy, ref)).abs()
                    # of log-probabilities in float32, and of what cancels in k3
                    > _SAFETY
                    * 2.0**-22
                    * (1 + policy.abs() + ref.abs())
                    * (1 + estimate(policy, ref).abs())
                ).any()
            )
        ]
        for name, estimate in forms.items()
    }
    fits = [name for name, places in wrong.items() if not places]
    seen = f"{fits[0]} fits" if fits else "no form that is known fits"
    if form is None:
        return [Answer("kl", "sound" if fits else "unknown", f"of {len(known):,} responses {seen}")]
    if form in fits:
        return [Answer("kl", "sound", f"the KL of {len(known):,} responses is {form}")]
    count = len(wrong[form])
    text = f"the KL of {count:,} of {len(known):,} responses is not {form}; {seen}"
    return [Answer("kl", "fault", text, {}, wrong[form])]


def check_loss(
    rows: Sequence[Row], masks: Sequence[Tensor | None], average: str | None
) -> list[Answer]:
    """Check whether the loss of a step is the average over all its micro-batches.

    Args:
        rows: With the loss of each token, the micro-batch, and the loss of the step.
        masks: Their sampled tokens.
        average: ``token_mean`` or ``sequence_mean``; None: either is sound.
    """
    steps: dict[int, list[tuple[Row, Tensor]]] = defaultdict(list)
    for row, mask in zip(rows, masks, strict=True):
        if mask is not None and "losses" in row.tokens and not math.isnan(row.step_loss):
            own = mask if row.loss_mask is None else mask & row.loss_mask
            steps[row.step].append((row, own))
    if not steps:
        return [
            Answer("loss", "unknown", "the file has no losses of tokens beside that of their step")
        ]
    wrong: dict[str, list[str]] = defaultdict(list)
    for step, members in steps.items():
        losses, mask = _padded(members)
        means = {
            mode: float(aggregate(losses, mask, mode=mode))
            for mode in ("token_mean", "sequence_mean")
        }
        micro = torch.tensor([row.micro_batch or 0 for row, _ in members])
        parts = {
            mode: torch.stack(
                [
                    aggregate(losses[micro == m], mask[micro == m], mode=mode)
                    for m in torch.unique(micro)
                ]
            )
            for mode in means
        }
        named = members[0][0].step_loss
        bound = _SAFETY * 2.0**-22 * float(losses[mask].abs().mean() + abs(named))
        forms = {
            **{f"the {mode} over the step": value for mode, value in means.items()},
            **{
                f"the mean of the {mode} of each micro-batch": float(value.mean())
                for mode, value in parts.items()
            },
            **{
                f"the sum of the {mode} of each micro-batch": float(value.sum())
                for mode, value in parts.items()
            },
        }
        right = [f"the {mode} over the step" for mode in ([average] if average else means)]
        fits = [name for name, value in forms.items() if abs(value - named) <= bound]
        if not set(right) & set(fits):
            wrong[fits[0] if fits else "no average that is known"].append(f"step {step}")
    if wrong:
        return [
            Answer("loss", "fault", f"the loss of {len(places):,} steps is {name}", {}, places)
            for name, places in wrong.items()
        ]
    return [
        Answer("loss", "sound", f"the loss of {len(steps):,} steps is the average of all tokens")
    ]


def _padded(members: Sequence[tuple[Row, Tensor]]) -> tuple[Tensor, Tensor]:
    length = max(int(mask.sum()) for _, mask in members) or 1
    losses = torch.zeros(len(members), length, dtype=torch.float64)
    mask = torch.zeros(len(members), length, dtype=torch.bool)
    for index, (row, own) in enumerate(members):
        values = row.tokens["losses"][own]
        losses[index, : len(values)], mask[index, : len(values)] = values.nan_to_num(0.0), True
    return losses, mask
