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
    """Rounding error of a log-probability, in nats."""


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


def _plain(inputs: EstimatorInputs, *, z_score: bool) -> Tensor:
    """Take the score as it is, or its z-score over the batch."""
    rewards, known = penalized_scores(inputs).nan_to_num(0.0), ~inputs.scores.isnan()
    return spread_over_tokens(standardize(rewards, known, eps=1e-8) if z_score else rewards, inputs)


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
    "z-score over the batch": partial(_plain, z_score=True),
    "the plain score, without a baseline": partial(_plain, z_score=False),
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
        columns = zip(*(_columns(row, form or "k1") for row in filled), strict=True)
        mask, advantages, kl = (pad_sequence(list(each), batch_first=True) for each in columns)
        if not advantages.isfinite().any():
            continue
        inputs = EstimatorInputs(
            scores=torch.tensor([row.score for row in filled], dtype=torch.float64),
            kl=kl,
            response_mask=mask,
            num_generations=size,
            kl_coef=kl_coef,
            baseline_mask=torch.ones(len(filled), dtype=torch.bool),
        )
        seen = mask & advantages.isfinite()
        yield Batch(filled, inputs, advantages.nan_to_num(0.0), seen, noise + 2 * _FLOAT32)


def _columns(row: Row, form: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return mask, advantages (NaN: not recorded, or not trained on) and KL of a response."""
    if row.ids is None:  # one token stands for all
        advantage = torch.tensor([row.advantage], dtype=torch.float64)
        return torch.ones(1, dtype=torch.bool), advantage, torch.zeros_like(advantage)
    own = row.response if row.written is None else row.written
    missing = torch.full((len(row.ids),), math.nan, dtype=torch.float64)
    advantages = row.tokens.get("advantages", missing)
    if row.loss_mask is not None:
        advantages = torch.where(row.loss_mask, advantages, math.nan)
    kl = missing
    if row.policy is not None and "ref" in row.tokens:
        kl = kl_estimate(row.policy, row.tokens["ref"], estimator=form)
    return torch.ones(int(own.sum()), dtype=torch.bool), advantages[own], kl[own].nan_to_num(0.0)


def _misses(formula: Formula, batch: Batch) -> list[str]:
    """Return the rows that differ from a formula by more than rounding to float32 explains."""
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
    tolerance = _SAFETY * (moved + written).amax(dim=1, keepdim=True)
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
    if not found:
        return [Answer("advantages", "unknown", "the file has no advantages")]
    rows = [row for batch in found for row in batch.rows if row.place]
    scored = [row for row in rows if not math.isnan(row.score)]
    if not scored:
        return [Answer("advantages", "unknown", "the file has advantages and no scores")]
    if penalized and found[0].inputs.kl_coef and any("ref" not in row.tokens for row in rows):
        text = "the KL penalty needs reference log-probabilities: record them, or name --reference"
        return [Answer("advantages", "unknown", text)]
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
    if algorithm is None:
        text = f"{share} are those of {', '.join(fits)}"
        if not fits:
            return [*answers, Answer("advantages", "unknown", "no formula that is known fits them")]
        return [*answers, Answer("advantages", "sound", text)]
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
        values = [value * row.weights.get(name, 1.0) for name, value in row.parts.items()]
        values = [value for value in values if not math.isnan(value)]
        bound = 1e-4 * max([1e-3, abs(row.score), *map(abs, values)])
        if abs(sum(values) - row.score) > bound:
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
    known = {
        row.place: (
            row.written & row.tokens["kl"].isfinite() & row.policy.isfinite(),
            *(row.tokens["kl"], row.policy, row.tokens["ref"]),
        )
        for row in rows
        if row.written is not None and row.policy is not None and {"kl", "ref"} <= {*row.tokens}
    }
    if not known:
        text = "the file has no KL beside log-probabilities of both models"
        return [Answer("kl", "unknown", text)]

    wrong = {name: list[str]() for name in KL_FORMS}
    for name, estimate in KL_FORMS.items():
        for place, (keep, kl, policy, ref) in known.items():
            value = estimate(policy, ref)
            # of log-probabilities in float32, and of what cancels in k3
            bound = _SAFETY * _FLOAT32 * (1 + policy.abs() + ref.abs()) * (1 + value.abs())
            if ((kl - value).abs() > bound)[keep].any():
                wrong[name].append(place)
    fits = next((name for name, places in wrong.items() if not places), None)
    seen = f"{fits} fits" if fits else "no form that is known fits"
    share = f"of {len(known):,} responses"
    if form is None:
        return [Answer("kl", "sound" if fits else "unknown", f"{share} {seen}")]
    if not wrong[form]:
        return [Answer("kl", "sound", f"the KL {share} is {form}")]
    text = f"the KL of {len(wrong[form]):,} {share} is not {form}; {seen}"
    return [Answer("kl", "fault", text, {}, wrong[form])]


def check_loss(rows: Sequence[Row], average: str | None) -> list[Answer]:
    """Check whether the loss of a step is the average over all its micro-batches.

    Args:
        rows: With the loss of each token, the micro-batch, and the loss of the step.
        average: ``token_mean`` or ``sequence_mean``; None: either is sound.
    """
    steps: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        if row.written is not None and "losses" in row.tokens and not math.isnan(row.step_loss):
            steps[row.step].append(row)
    if not steps:
        text = "the file has no losses of tokens beside that of their step"
        return [Answer("loss", "unknown", text)]
    wrong: dict[str, list[str]] = defaultdict(list)
    for step, members in steps.items():
        own = [r.written if r.loss_mask is None else r.written & r.loss_mask for r in members]  # type: ignore[operator]
        losses = pad_sequence(
            [r.tokens["losses"].nan_to_num(0.0) for r in members], batch_first=True
        )
        mask = pad_sequence(own, batch_first=True)  # type: ignore[arg-type]
        micro = torch.tensor([row.micro_batch or 0 for row in members])
        named, forms = members[0].step_loss, dict[str, float]()
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
    text = f"the loss of {len(steps):,} steps is the average of all tokens"
    return faults_or(Answer("loss", "sound", text), wrong, len(steps))
