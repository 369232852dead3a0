"""Are rewards, advantages, KL and loss those of the formula that a run names?"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lrlhf.apps.verify.answers import Answer, faults_or
from lrlhf.apps.verify.rollout_rows import Row
from lrlhf.functional import EstimatorInputs, aggregate, kl_estimate
from lrlhf.functional.advantages import group_mean_advantages
from lrlhf.functional.algorithm import penalized_scores, spread_over_tokens
from lrlhf.functional.algorithms import ESTIMATORS
from lrlhf.functional.masking import standardize

_COPIES = 4
_SAFETY = 4.0
"""Rounding errors of the measured size that a sound difference may have."""
_FLOAT32 = 2.0**-22


class Batch(NamedTuple):
    """The groups of one step, one after the other, the smaller ones filled up.

    A filling row has no tokens and the score NaN, which keeps it out of baselines.
    """

    rows: list[Row]
    inputs: EstimatorInputs
    advantages: Tensor
    """`[B, T]` as recorded, 0 where there is none."""
    seen: Tensor
    """`[B, T]` bool: the tokens whose advantage was recorded."""
    noise: float
    """Rounding error of a KL estimate, in nats."""
    written: float
    """Rounding error of the recorded advantages."""


Formula = Callable[[EstimatorInputs], Tensor]


def _over_deviation(inputs: EstimatorInputs, *, whole: bool, eps: float) -> Tensor:
    """Divide by the deviation of the batch, or by that of the group as a population."""
    rewards = penalized_scores(inputs)
    known = ~rewards.isnan().view(-1, inputs.num_generations)
    centred = group_mean_advantages(rewards, num_generations=inputs.num_generations)
    groups = centred.view_as(known)
    deviation = (
        rewards[~rewards.isnan()].std()
        if whole
        else (groups.square().sum(1, keepdim=True) / known.sum(1, keepdim=True)).sqrt()
    )
    return spread_over_tokens((groups / (deviation + eps)).flatten(), inputs)


def _batch_z_score(inputs: EstimatorInputs) -> Tensor:
    rewards, known = penalized_scores(inputs).nan_to_num(0.0), ~inputs.scores.isnan()
    return spread_over_tokens(standardize(rewards, known, eps=1e-8), inputs)


def _other_groups(inputs: EstimatorInputs) -> Tensor:
    """Leave-one-out over rows that stand far apart, as where a batch was read in another order."""
    size = inputs.num_generations
    moved = inputs.scores.view(size, -1).T.flatten()
    alone = torch.ones(len(moved), 1, dtype=torch.bool)
    swapped = inputs._replace(scores=moved, kl=torch.zeros(len(moved), 1), response_mask=alone)
    return spread_over_tokens(ESTIMATORS["rloo"](swapped).view(-1, size).T.flatten(), inputs)


def _whitened(inputs: EstimatorInputs, *, name: str) -> Tensor:
    estimator = ESTIMATORS[name]
    mask = inputs.response_mask & ~inputs.scores.isnan()[:, None]
    return estimator.normalized(estimator(inputs), mask)


FORMULAS: dict[str, Formula] = {
    **{
        name: partial(_whitened, name=name)
        for name, each in ESTIMATORS.items()
        # a critic, observations, rewards of turns, a teacher and further samples are not recorded
        if not (each.uses_values or each.uses_observations or each.uses_rewards or each.per_turn)
        and name not in {"distillation", "remax"}
    },
    "GRPO with ε = 1e-6 (verl)": partial(ESTIMATORS["grpo"].function, eps=1e-6),
    "GRPO with ε = 1e-9 (OpenRLHF)": partial(ESTIMATORS["grpo"].function, eps=1e-9),
    "GRPO with the deviation of the population": partial(_over_deviation, whole=False, eps=1e-4),
    "the same with ε = 1e-6": partial(_over_deviation, whole=False, eps=1e-6),
    "group mean and the deviation of the batch (TRL: scale_rewards='batch')": partial(
        _over_deviation, whole=True, eps=1e-4
    ),
    "z-score over the batch": _batch_z_score,
    "leave-one-out over the rows of other groups": _other_groups,
}
"""Advantages by name: those of lrlhf, and what else libraries compute."""


def batches(
    rows: Sequence[Row], form: str | None, kl_coef: float, noise: float = 0.0
) -> Iterator[Batch]:
    """Group the rows of each step that has advantages.

    Args:
        rows: The rollouts.
        form: Of the KL penalty in the reward; None: k1.
        kl_coef: Its strength.
        noise: Rounding error of log-probabilities in nats, beyond that of float32.
    """
    steps: dict[int, dict[Hashable, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        prompt = () if row.ids is None else tuple(row.ids[: row.start].tolist())
        key = repr(row.prompt) if row.prompt is not None else prompt
        steps[row.step][key if row.group is None else row.group].append(row)
    padding = Row(place="", ids=torch.zeros(0, dtype=torch.int64))
    for _, groups in sorted(steps.items()):
        size = max([2, *map(len, groups.values())])
        filled = [row for own in groups.values() for row in own + [padding] * (size - len(own))]
        masks, advantages, kls, kl_errors = zip(
            *(_columns(row, form or "k1") for row in filled), strict=True
        )
        errors = [
            row.written_error("advantages", own)
            for row, own in zip(filled, advantages, strict=True)
            if len(own)
        ]
        mask, recorded, kl = (
            pad_sequence([*each], batch_first=True) for each in (masks, advantages, kls)
        )
        if not recorded.isfinite().any():
            continue
        inputs = EstimatorInputs(
            scores=torch.tensor([row.score for row in filled], dtype=torch.float64),
            kl=kl,
            response_mask=mask,
            num_generations=size,
            kl_coef=kl_coef,
            baseline_mask=torch.ones(len(filled), dtype=torch.bool),
        )
        seen = mask & recorded.isfinite()
        yield Batch(
            *(filled, inputs, recorded.nan_to_num(0.0), seen),
            *(noise + max(kl_errors) + 2 * _FLOAT32, max(errors)),
        )


def _columns(row: Row, form: str) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return mask, advantages (NaN: not recorded, or not trained on), KL, and the KL's error."""
    if row.ids is None:  # one token stands for all
        advantage = torch.tensor([row.advantage], dtype=torch.float64)
        return torch.ones(1, dtype=torch.bool), advantage, torch.zeros_like(advantage), 0.0
    own = row.response if row.written is None else row.written
    missing = torch.full((len(row.ids),), math.nan, dtype=torch.float64)
    advantages = row.tokens.get("advantages", missing)
    if row.loss_mask is not None:
        advantages = torch.where(row.loss_mask, advantages, math.nan)
    kl, error = missing, 0.0
    if {row.policy, "ref"} <= row.tokens.keys():
        policy, ref = row.tokens[row.policy], row.tokens["ref"]
        kl = kl_estimate(policy, ref, estimator=form)
        error = row.written_error(row.policy, policy) + row.written_error("ref", ref)
    mask = torch.ones(int(own.sum()), dtype=torch.bool)
    return mask, advantages[own], kl[own].nan_to_num(0.0), error


def _misses(formula: Formula, batch: Batch) -> list[str]:
    """Return the rows that differ from a formula by more than rounding explains."""
    exact, inputs = formula(batch.inputs), batch.inputs
    moved = torch.zeros_like(exact)
    size = float(inputs.scores.abs().nan_to_num(0.0).max()) * _FLOAT32 / 2
    generator = torch.Generator().manual_seed(0)
    for _ in range(_COPIES):
        up, by = (
            torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
            for shape in (len(exact), exact.shape)
        )
        near = inputs._replace(scores=inputs.scores + size * up, kl=inputs.kl + batch.noise * by)
        moved = torch.maximum(moved, (formula(near) - exact).abs())
    written = _FLOAT32 / 2 * exact.abs().clamp(min=1e-3) + 1e-5 * exact.abs()
    tolerance = batch.written + _SAFETY * (moved + written).amax(dim=1, keepdim=True)
    off = (((exact - batch.advantages).abs() > tolerance) & batch.seen).any(dim=1)
    return [row.place for row, flag in zip(batch.rows, off.tolist(), strict=True) if flag]


def check_advantages(
    found: Sequence[Batch], algorithm: str | None, *, penalized: bool
) -> list[Answer]:
    """Compare advantages with the algorithm that is named, and look for the one that they are.

    Args:
        found: Of each step.
        algorithm: A key of `FORMULAS`; None: it is looked for.
        penalized: Whether the KL penalty is part of the scores.
    """

    def unknown(text: str) -> Answer:
        return Answer("advantages", "unknown", text)

    rows = [row for batch in found for row in batch.rows if row.place]
    scored = [row for row in rows if not math.isnan(row.score)]
    if not scored:
        return [unknown(f"the file has {'advantages and no scores' if rows else 'no advantages'}")]
    if penalized and found[0].inputs.kl_coef and any("ref" not in row.tokens for row in rows):
        text = "the KL penalty needs reference log-probabilities: record them, or name --reference"
        return [unknown(text)]
    answers = _check_scores(scored)
    total = sum(int(batch.seen.any(dim=1).sum()) for batch in found)
    share = f"the advantages of {total:,} of {len(rows):,} responses"
    free = [batch._replace(inputs=batch.inputs._replace(kl_coef=0.0)) for batch in found]
    used, other = (found, free) if penalized else (free, found)
    wrong = [] if algorithm is None else [p for b in used for p in _misses(FORMULAS[algorithm], b)]
    if algorithm is not None and not wrong:
        return [*answers, Answer("advantages", "sound", f"{share} are those of {algorithm}")]
    differ = any(batch.inputs.kl_coef and batch.inputs.kl.any() for batch in found)
    kinds = {"": used} | (
        {f" with{'out' if penalized else ''} the KL penalty": other} if differ else {}
    )
    fits = [
        name + kind
        for kind, these in kinds.items()
        for name, formula in FORMULAS.items()
        if not any(_misses(formula, batch) for batch in these)
    ]
    if not fits and all(len(b.rows) == 2 * sum(bool(r.place) for r in b.rows) for b in found):
        # each group of one was filled up to two
        text = "no two responses have the same group, or the same prompt: record the group"
        return [*answers, unknown(text)]
    if algorithm is None:
        text = f"{share} are those of {', '.join(fits)}"
        none = unknown("no formula that is known fits them")
        return [*answers, Answer("advantages", "sound", text) if fits else none]
    fits.sort(key=lambda name: not name.startswith(algorithm))
    seen = f"{fits[0]} fits all" if fits else _multiple(used, algorithm)
    text = f"{len(wrong):,} of {total:,} advantages are not those of {algorithm}; {seen}"
    return [*answers, Answer("advantages", "fault", text, {"fits": fits}, wrong)]


def _multiple(found: Sequence[Batch], algorithm: str) -> str:
    """Describe advantages that are all the same multiple of a formula."""
    exact = [FORMULAS[algorithm](batch.inputs) for batch in found]
    ratio = torch.cat(
        [(b.advantages / a)[b.seen & (a.abs() > 1e-3)] for b, a in zip(found, exact, strict=True)]
    )
    if len(ratio) and float(ratio.max() - ratio.min()) <= 1e-4 * abs(float(ratio.mean())):
        return f"they are {float(ratio.mean()):.4g} times those"
    return "no formula that is known fits all"


def _check_scores(rows: Sequence[Row]) -> list[Answer]:
    """Check that the score of a response is the weighted sum of its rewards."""
    wrong, known = [], [row for row in rows if row.parts]
    for row in known:
        values = [v * row.weights.get(n, 1.0) for n, v in row.parts.items() if not math.isnan(v)]
        bound = 1e-4 * max([1e-3, abs(row.score), *map(abs, values)])
        if abs(row.sum_of_parts - row.score) > bound:
            wrong.append(row.place)
    if not wrong:
        return []
    text = f"the score of {len(wrong):,} of {len(known):,} responses is not the sum of its rewards"
    return [Answer("advantages", "fault", text, {}, wrong)]


KL_FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{name: partial(kl_estimate, estimator=name) for name in ("k1", "k2", "k3")},
    "|k1|": lambda policy, ref: (policy - ref).abs(),
    "k1 with policy and reference exchanged": lambda policy, ref: ref - policy,
    "k3 with policy and reference exchanged": lambda policy, ref: kl_estimate(
        ref, policy, estimator="k3"
    ),
}


def check_kl(rows: Sequence[Row], form: str | None) -> list[Answer]:
    """Compare recorded KL estimates with the form that is named; None: it is looked for."""
    wrong, count = {name: list[str]() for name in KL_FORMS}, 0
    for row in rows:
        if row.written is None or not {"kl", row.policy, "ref"} <= row.tokens.keys():
            continue
        kl, policy, ref = (row.tokens[name] for name in ("kl", row.policy, "ref"))
        keep = row.written & kl.isfinite() & policy.isfinite()
        keep &= True if row.loss_mask is None else row.loss_mask  # else a mask may have made it 0
        error = row.written_error(row.policy, policy) + row.written_error("ref", ref)
        count += 1
        for name, estimate in KL_FORMS.items():
            value = estimate(policy, ref)
            moved = [(estimate(policy + by, ref) - value).abs() for by in (error, -error)]
            bound = _SAFETY * (torch.maximum(*moved) + _FLOAT32 * (1 + value.abs()))
            off = (kl - value).abs() > bound + row.written_error("kl", kl)
            if off[keep].any():
                wrong[name].append(row.place)
    if not count:
        text = "the file has no KL beside log-probabilities of both models"
        return [Answer("kl", "unknown", text)]
    fits = next((name for name, places in wrong.items() if not places), None)
    seen, share = f"{fits or 'no form that is known'} fits", f"of {count:,} responses"
    if form is None:
        return [Answer("kl", "sound" if fits else "unknown", f"{share} {seen}")]
    faults = {f"the KL is not {form}; {seen}": wrong[form]} if wrong[form] else {}
    return faults_or(Answer("kl", "sound", f"the KL {share} is {form}"), faults, count)


def check_loss(rows: Sequence[Row], average: str | None) -> list[Answer]:
    """Check whether the loss of a step is the average over all its micro-batches.

    Args:
        rows: With the loss of each token, the micro-batch, and the loss of the step.
        average: ``token_mean`` or ``sequence_mean``; None: either is sound.
    """
    steps: dict[int, list[tuple[Row, Tensor]]] = defaultdict(list)
    for row in rows:
        if row.written is not None and "losses" in row.tokens and not math.isnan(row.step_loss):
            own = row.written if row.loss_mask is None else row.written & row.loss_mask
            steps[row.step].append((row, own))
    wrong: dict[str, list[str]] = defaultdict(list)
    for step, members in steps.items():
        columns = [(row.tokens["losses"].nan_to_num(0.0), own) for row, own in members]
        losses, mask = (pad_sequence([*c], batch_first=True) for c in zip(*columns, strict=True))
        micro = torch.tensor([row.micro_batch for row, _ in members])
        named, forms = members[0][0].step_loss, dict[str, float]()
        for mode in ("token_mean", "sequence_mean"):
            forms[f"the {mode} over the step"] = float(aggregate(losses, mask, mode=mode))
            parts = [
                float(aggregate(losses[micro == m], mask[micro == m], mode=mode))
                for m in torch.unique(micro)
            ]
            forms[f"the mean of the {mode} of each micro-batch"] = sum(parts) / len(parts)
            forms[f"the sum of the {mode} of each micro-batch"] = sum(parts)
        bound = _SAFETY * _FLOAT32 * float(losses[mask].abs().mean() + abs(named))
        fits = [name for name, value in forms.items() if abs(value - named) <= bound]
        modes = [average] if average else ["token_mean", "sequence_mean"]
        if not {f"the {mode} over the step" for mode in modes} & {*fits}:
            text = fits[0] if fits else "no average that is known"
            wrong[f"the loss of steps is {text}"].append(f"step {step}")
    if not steps:
        text = "the file has no losses of tokens beside that of their step"
        return [Answer("loss", "unknown", text)]
    text = f"the loss of {len(steps):,} steps is the average of all tokens"
    return faults_or(Answer("loss", "sound", text), wrong, len(steps))
