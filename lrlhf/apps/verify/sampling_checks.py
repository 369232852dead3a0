"""Which weights sampled the tokens, at which temperature, out of which set."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lrlhf.apps.verify.answers import Answer, Verdict
from lrlhf.apps.verify.candidate_weights import Candidate
from lrlhf.apps.verify.rollout_rows import Row
from lrlhf.rollout import Sampling

_NOISE = 2 * math.sqrt(2)
"""Root mean square difference that is sound, in errors of the measured size: both sides round (√2),
with other kernels and in another order than the measurement (as much again)."""
_LEVEL = 1e-6
"""Of tests: how often they reject what is sound. A report makes a handful of them."""
_FITTED = 256
"""Tokens that a temperature is fitted to."""


def _spread(count: int) -> float:
    """Return how far the root mean square of so many errors may exceed their deviation by chance.

    Reference:
        Laurent and Massart 2000, lemma 1, https://doi.org/10.1214/aos/1015957395
    """
    per_token = -math.log(_LEVEL) / count
    return math.sqrt(1 + 2 * math.sqrt(per_token) + 2 * per_token)


class Fit(NamedTuple):
    """How the recorded log-probabilities of a row come about."""

    kind: str
    """``plain``; ``shifted`` by one token; of another ``temperature``; ``renormalised`` over the
    tokens that were kept; of weights that ``changed`` within the row; ``broken``: of other tokens
    from some token on; ``none``."""
    weights: Candidate
    error: float
    """Root mean square difference in nats."""
    at: int = 0
    """First token of the response that is different, from 0; the shift."""
    value: float = 0.0
    """Temperature; 0 of other kinds."""
    other: Candidate | None = None
    """The weights behind a change."""


def sampling_of(row: Row, named: Sampling) -> Sampling:
    """Return the options that a row was sampled with, which are those named if it records none."""
    known: dict[str, Any] = dict(row.options)
    if "top_k" in known:  # -1 keeps all tokens in vLLM
        known["top_k"] = max(0, int(known["top_k"]))
    # a greedy response has the log-probabilities of some temperature
    known["temperature"] = known.get("temperature") or named.temperature or 1.0
    return replace(named, **known)


class _Column(NamedTuple):
    """A recorded column of a row."""

    row: Row
    values: Tensor
    mask: Tensor
    """`[T]` bool: the tokens of the policy that have a value."""
    noise: float
    """Error of a token, in nats, that is sound."""

    @property
    def bound(self) -> float:
        """Root mean square difference of the tokens that noise explains."""
        return self.noise * _spread(int(self.mask.sum()))

    @property
    def near(self) -> float:
        """Difference of one token that noise explains."""
        return self.noise * _spread(1)


class Evidence:
    """Rows and candidates, and how recorded log-probabilities come about.

    Args:
        rows: With token ids, and the tokens that the policy wrote.
        candidates: The first is that which should have sampled the rows.
        sampling: Options of rows that record none.
    """

    def __init__(
        self, rows: Sequence[Row], candidates: Sequence[Candidate], sampling: Sampling
    ) -> None:
        self.rows, self.candidates, self._sampling = rows, candidates, sampling
        self.expected = candidates[0]
        self.truncates = any(sampling_of(row, sampling).truncates for row in rows)
        dtype, unit = self.expected.dtype, self.expected.rounding(rows, self.temperature(rows[0]))
        self.rounding = unit * torch.finfo(dtype or torch.float32).eps
        """Root mean square error of a log-probability, in nats."""
        self.assumes_bfloat16 = False
        self.columns, self.fits = self._explanations()
        kinds = {fit.kind for fit in self.fits["sampling"]}
        if dtype is None and kinds and kinds <= {"none", "broken"}:
            exact = self.rounding, self.columns, self.fits
            self.rounding = unit * torch.finfo(torch.bfloat16).eps
            self.columns, self.fits = self._explanations()
            plain = [fit.kind == "plain" for fit in self.fits["sampling"]]
            self.assumes_bfloat16 = sum(plain) >= len(plain) / 2
            if not self.assumes_bfloat16:  # it is no rounding
                self.rounding, self.columns, self.fits = exact

    def _explanations(self) -> tuple[dict[str, list[_Column]], dict[str, list[Fit]]]:
        columns = {name: list(self._columns(name)) for name in ("sampling", "old")}
        return columns, {name: self._fits(own) for name, own in columns.items()}

    @property
    def noise(self) -> float:
        """Difference in nats between log-probabilities of two programs that is sound."""
        return _NOISE * self.rounding

    def temperature(self, row: Row) -> float:
        """Return the temperature of a row."""
        return sampling_of(row, self._sampling).temperature

    def _columns(self, name: str) -> Iterator[_Column]:
        """Iterate over a column of every row that has it."""
        for row in self.rows:
            if row.written is None or name not in row.tokens:
                continue
            mask = row.written & row.tokens[name].isfinite()
            mask[0] = False  # nothing predicts it
            if mask.any():
                noise = _NOISE * math.hypot(
                    self.rounding, row.written_error(name, row.tokens[name])
                )
                yield _Column(row, row.tokens[name], mask, noise)

    def gap(
        self, candidate: Candidate, column: _Column, temperature: float | None = None
    ) -> Tensor:
        """Return recorded minus recomputed, of the tokens of a column."""
        own = candidate.facts(column.row, temperature or self.temperature(column.row)).logprobs
        return (column.values - own)[column.mask]

    def _fits(self, columns: Sequence[_Column]) -> list[Fit]:
        """Explain the columns; the candidate that is expected goes first."""
        plain = [
            next(
                (
                    Fit("plain", candidate, error)
                    for candidate in self.candidates
                    if (error := _rms(self.gap(candidate, column))) <= column.bound
                ),
                None,
            )
            for column in columns
        ]
        lost = [column for column, fit in zip(columns, plain, strict=True) if fit is None]
        fitted = [_fitted_temperature(lost, each) for each in self.candidates if lost]
        return [
            fit or self._explained(column, fitted)
            for column, fit in zip(columns, plain, strict=True)
        ]

    def _explained(self, column: _Column, fitted: Sequence[float]) -> Fit:
        mask, bound = column.mask, column.bound
        for candidate, temperature in zip(self.candidates, fitted, strict=True):
            for shift in (1, -1):
                moved = column._replace(
                    values=column.values.roll(shift), mask=mask & mask.roll(1) & mask.roll(-1)
                )
                if moved.mask.any() and (error := _rms(self.gap(candidate, moved))) <= moved.bound:
                    return Fit("shifted", candidate, error, at=-shift)
            # a fitted number takes its share of what rounding leaves
            if (error := _rms(self.gap(candidate, column, temperature))) <= bound:
                return Fit("temperature", candidate, error, value=temperature)
            for named in dict.fromkeys((self.temperature(column.row), 1.0)):
                if self._is_renormalised(candidate, column, named):
                    error = _rms(self.gap(candidate, column, named))
                    return Fit("renormalised", candidate, error, value=named)
        return self._changed(column)

    def sets(self, candidate: Candidate, column: _Column, temperature: float) -> Tensor:
        """Return `[5, N]`, the columns of `Candidate.kept_sets` at the tokens of a column."""
        mass = torch.ones(len(column.values), dtype=torch.float64)
        mass[column.mask] = (-self.gap(candidate, column, temperature)).exp().clamp(max=1.0)
        return candidate.kept_sets(column.row, temperature, mass)[:, column.mask]

    def _is_renormalised(self, candidate: Candidate, column: _Column, temperature: float) -> bool:
        """Tell whether tokens are more probable by the mass of a set of the most probable ones."""
        gap, near = self.gap(candidate, column, temperature), column.near
        kept = (gap > near) & (gap < math.inf)
        if not bool((gap > -near).all()) or not bool(kept.any()):
            return False
        size, mass, *_ = self.sets(candidate, column, temperature)
        rank = candidate.facts(column.row, temperature).rank[column.mask]
        return bool((((mass.log() + gap).abs() <= near) & (rank < size))[kept].all())

    def _changed(self, column: _Column) -> Fit:
        """Find weights that fit the first tokens of a row, and others that fit the rest."""
        gaps = {each: self.gap(each, column).nan_to_num(0.0) for each in self.candidates}
        good = {each: gap.abs() <= column.near for each, gap in gaps.items()}
        ahead = {each: int(flags.int().cumprod(0).sum()) for each, flags in good.items()}
        first = max(ahead, key=lambda each: ahead[each])
        until, nearest = ahead[first], min(gaps, key=lambda each: _rms(gaps[each]))
        places = column.mask.nonzero().flatten()
        later = [each for each in self.candidates if each is not first]
        for other in later:
            if until and bool(good[other][until:].all()):
                error = _rms(gaps[other][until:])
                return Fit("changed", first, error, at=until, other=other)
        for other in later:
            for change in range(until, max(0, until - 5), -1):
                at, temperature = int(places[change]), self.temperature(column.row)
                own = other.continued(first, column.row, at, temperature)
                if (error := _rms((column.values - own)[places[change:]])) <= column.bound:
                    return Fit("changed", first, error, at=change, other=other)
        # by chance a token of other weights is within rounding once in a while, three are not
        kind, weights = ("broken", first) if until >= 3 else ("none", first if until else nearest)
        return Fit(kind, weights, _rms(gaps[nearest]), at=until)


def _fitted_temperature(columns: Sequence[_Column], candidate: Candidate) -> float:
    """Return the temperature at which a candidate comes nearest to columns of log-probabilities."""
    logits, targets, values = [], [], list[Tensor]()
    for column in columns:
        if sum(map(len, values)) >= _FITTED:
            break
        for places, scores, ids in candidate.logits(column.row):
            here = column.mask[places]
            logits.append(scores[here.to(scores.device)])
            targets.append(ids[here.to(ids.device)])
            values.append(column.values[places][here])
    scores, ids, recorded = torch.cat(logits), torch.cat(targets)[:, None], torch.cat(values)

    def error(log_temperature: float) -> float:
        own = (scores / math.exp(log_temperature)).log_softmax(-1).gather(-1, ids)
        return _rms(recorded - own.squeeze(-1).double().cpu())

    low, high = math.log(0.05), math.log(20.0)
    for _ in range(10):  # each grid spans the two neighbours of the best of the one before
        grid = np.linspace(low, high, 41).tolist()
        best = min(range(41), key=lambda place: error(grid[place]))
        low, high = grid[max(0, best - 1)], grid[min(40, best + 1)]
    return math.exp((low + high) / 2)


def _rms(gap: Tensor) -> float:
    return float(gap.square().mean().sqrt()) if len(gap) else 0.0


def check_weights(evidence: Evidence) -> list[Answer]:
    """Report which weights sampled the rows, and from which token on."""
    fits = evidence.fits["sampling"]
    if not fits:
        return [_by_likelihood(evidence)]
    groups: dict[tuple[Any, ...], list[tuple[Row, Fit]]] = defaultdict(list)
    for column, fit in zip(evidence.columns["sampling"], fits, strict=True):
        kind = "plain" if fit.kind in ("temperature", "renormalised") else fit.kind
        groups[kind, fit.weights, fit.other].append((column.row, fit))
    answers = []
    for (kind, weights, other), members in groups.items():
        error, name = max(fit.error for _, fit in members), weights.name
        share = f"{len(members):,} of {len(fits):,} responses"
        size = f"{error:.2g} nats apart, {evidence.rounding:.2g} from rounding"
        start, stop = (end(fit.at for _, fit in members) for end in (min, max))
        where = f"token {start}" if start == stop else f"tokens {start} to {stop}"
        verdict: Verdict = "fault"
        if kind == "plain" and weights is evidence.expected:
            verdict = "unknown" if evidence.assumes_bfloat16 else "sound"
        # a change is in order where the row records it
        elif kind == "changed" and all(_has_versions(row) for row, _ in members):
            verdict = "sound"
        doubt = "if the engine computed in bfloat16: then name --engine_dtype bfloat16"
        text = {
            "plain": f"{name} sampled {share} ({size})" + f", {doubt}" * evidence.assumes_bfloat16,
            "shifted": f"log-probabilities stand one token {'after' if start > 0 else 'before'} "
            f"their own in {share}",
            "changed": f"{name} sampled the first tokens and {other and other.name} the rest, from "
            f"{where} on, of {share}; "
            + ("as their versions record" if verdict == "sound" else "no version records it"),
            "broken": f"{name} fits up to {where} of {share}; behind that the log-probabilities "
            "are of other tokens",
            "none": f"none of the weights sampled {share}: {name} comes nearest, {size}",
        }[kind]
        figures = {"rms": error, "rounding": evidence.rounding, "responses": len(members)}
        answers.append(Answer("weights", verdict, text, figures, [row.place for row, _ in members]))
    return answers


def _has_versions(row: Row) -> bool:
    versions = row.tokens.get("versions")
    return versions is not None and len({*versions[row.written].tolist()}) > 1


class _Tokens(NamedTuple):
    """The sampled tokens of all rows under one candidate."""

    uniforms: Tensor
    """`[N]`: uniform and independent if the candidate sampled them; small for probable tokens."""
    total: float
    """Log-probability of all of them."""
    rank: int
    """Most tokens that are more probable than one that was sampled."""

    @property
    def p_value(self) -> float:
        """Probability of a sample as far from uniform (Kolmogorov and Smirnov).

        Reference:
            Stephens 1970, https://doi.org/10.1111/j.2517-6161.1970.tb00821.x, for finite samples
        """
        ordered, count = self.uniforms.sort().values, len(self.uniforms)
        if not count:
            return 1.0
        steps = torch.arange(1, count + 1, dtype=torch.float64) / count
        distance = float(torch.maximum(steps - ordered, ordered - steps + 1 / count).max())
        scaled = distance * (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count))
        terms = np.arange(1, 101)
        series = 2 * np.sum((-1.0) ** (terms - 1) * np.exp(-2 * (terms * scaled) ** 2))
        return float(min(1.0, max(0.0, series))) if scaled > 0.2 else 1.0

    @property
    def mass(self) -> float:
        """The most probable tokens that all lie within have this share."""
        return float(self.uniforms.max()) if len(self.uniforms) else 1.0

    @property
    def cut_p_value(self) -> float:
        """Probability of no token outside: the largest of n uniform numbers is below m with m^n."""
        return float(self.mass ** len(self.uniforms))


def _tokens(evidence: Evidence, candidate: Candidate, temperature: float | None = None) -> _Tokens:
    generator = torch.Generator().manual_seed(0)
    uniforms, total, rank = [], 0.0, 0
    for row in evidence.rows:
        facts = candidate.facts(row, temperature or evidence.temperature(row))
        keep = facts.logprobs.isfinite()
        keep &= True if row.written is None else row.written
        logprobs = facts.logprobs[keep]
        random = torch.rand(len(logprobs), generator=generator, dtype=torch.float64)
        uniforms.append(facts.above[keep] + random * logprobs.exp())
        total += float(logprobs.sum())
        rank = max(rank, int(facts.rank[keep].max())) if len(logprobs) else rank
    return _Tokens(torch.cat(uniforms), total, rank)


def _by_likelihood(evidence: Evidence) -> Answer:
    """Test each candidate by the tokens alone, where no log-probability was recorded.

    Of samples of p, Σ log q - Σ log p exceeds c with a probability of at most e^-c, for any q and
    any number of tokens (Markov's inequality of the likelihood ratio, whose mean is 1).
    """
    tokens = {candidate.name: _tokens(evidence, candidate) for candidate in evidence.candidates}
    p_values = {name: each.p_value for name, each in tokens.items()}
    expected, *others = tokens
    gains = {name: tokens[expected].total - tokens[name].total for name in others}
    note = "no sampling log-probabilities were recorded; by the tokens alone"
    shown = ", ".join(f"{name} p = {p:.2g}" for name, p in p_values.items())
    shown += "".join(f"; {gain:.3g} nats likelier than under {n}" for n, gain in gains.items())
    better = [
        name for name in others if p_values[name] >= _LEVEL and gains[name] < math.log(_LEVEL)
    ]
    verdict: Verdict = "fault"
    if better:
        name = min(better, key=lambda each: gains[each])
        text = f"{name} sampled the responses and not {expected} ({shown})"
    elif p_values[expected] >= _LEVEL:
        verdict, text = "sound", f"they are as samples of {expected} are ({shown})"
    elif evidence.truncates or tokens[expected].cut_p_value < _LEVEL:
        verdict, text = "unknown", "and top-p, top-k or min-p cut some off"
    elif (temperature := _sampled_at(evidence)) is not None:
        verdict, text = "sound", f"they are samples of {expected} at temperature {temperature:.3g}"
    else:
        text = f"none of the weights sampled them ({shown})"
    figures = {"p_values": p_values, "likelier by": gains}
    return Answer("weights", verdict, f"{note}, {text}", figures)


def _sampled_at(evidence: Evidence) -> float | None:
    """Return another temperature at which the expected weights may have sampled the tokens."""
    own = {evidence.temperature(row) for row in evidence.rows}
    if len(own) > 1:
        return None
    named = own.pop()
    others = [1.0, named**2, 1 / named, *(named * torch.logspace(-0.5, 0.5, 11)).tolist()]
    tested = {
        other: _tokens(evidence, evidence.expected, other).p_value
        for other in others
        if abs(other / named - 1) > 1e-3
    }
    best = max(tested, key=lambda value: tested[value])
    return best if tested[best] > 1e-3 else None


def check_ratio(evidence: Evidence) -> list[Answer]:
    """Look for a factor of temperature, top-p, top-k or min-p between sampling and training."""
    answers = [*_factors(evidence, "sampling"), *_factors(evidence, "old")]
    kinds = {fit.kind for fit in evidence.fits["sampling"]}
    tokens = _tokens(evidence, evidence.expected)
    cut = tokens.cut_p_value < _LEVEL
    if cut and kinds <= {"plain"} and all(answer.verdict == "sound" for answer in answers):
        text = (
            f"no token lies outside of the {tokens.mass:.1%} most probable, nor beyond rank "
            f"{tokens.rank + 1} (p = {tokens.cut_p_value:.1g}): tokens were cut off by top-p, "
            "top-k or min-p, and the log-probabilities are of all tokens"
        )
        verdict: Verdict = "unknown" if evidence.truncates else "fault"
        figures = {"mass": tokens.mass, "rank": tokens.rank + 1, "p_value": tokens.cut_p_value}
        answers.append(Answer("ratio", verdict, text, figures))
    if answers:
        return answers
    if kinds & {"none", "broken"}:
        return [Answer("ratio", "unknown", "there are responses that none of the weights sampled")]
    if kinds or evidence.fits["old"]:
        return [Answer("ratio", "sound", "log-probabilities are at the named temperature")]
    if tokens.p_value < _LEVEL and (temperature := _sampled_at(evidence)) is not None:
        text = f"the tokens were sampled at temperature {temperature:.3g}"
        return [Answer("ratio", "fault", text, {"temperature": temperature})]
    return [Answer("ratio", "unknown", "no log-probabilities were recorded")]


def _factors(evidence: Evidence, name: str) -> Iterator[Answer]:
    """Describe what the log-probabilities of a column are of, where they should be of another."""
    title = "sampling log-probabilities" if name == "sampling" else "trainer's log-probabilities"
    groups: dict[tuple[str, Candidate, float], list[_Column]] = defaultdict(list)
    for column, fit in zip(evidence.columns[name], evidence.fits[name], strict=True):
        groups[fit.kind, fit.weights, round(fit.value, 3)].append(column)
    for (kind, weights, value), columns in groups.items():
        figures, text = dict[str, Any](), ""
        verdict: Verdict = "fault"
        share = f"in {len(columns):,} of {len(evidence.fits[name]):,} responses"
        if kind == "temperature":
            named = evidence.temperature(columns[0].row)
            text = f"the {title} are of temperature {value:.3g}, not {named:.3g}, {share}"
            figures = {"temperature": value}
        elif kind == "renormalised":
            kept, mass = _kept_by(evidence, weights, columns)
            if all(_same_set(column) for column in columns):
                text = f"trainer and engine are both renormalised over {kept} {share}"
                yield Answer("ratio", "sound", text, {"kept": kept, "mass": mass})
                continue
            text = (
                f"the {title} are renormalised over {kept} {share}: the ratio has a factor of "
                f"{mass:.3g} on average"
            )
            trained = any("old" in row.tokens for row in evidence.rows)
            if name == "sampling" and evidence.truncates and not trained:
                verdict = "unknown"
            figures = {"kept": kept, "mass": mass}
        elif name == "old" and kind == "plain" and weights is not evidence.expected:
            text = f"the {title} are those of {weights.name} {share}"
        if text:
            places = [column.row.place for column in columns]
            yield Answer("ratio", verdict, text, figures, places)


def _same_set(column: _Column) -> bool:
    """Whether the trainer is renormalised as the engine is (keep sampling mask)."""
    row = column.row
    if not {"old", "sampling"} <= row.tokens.keys():
        return False
    gap = (row.tokens["old"] - row.tokens["sampling"])[row.written].abs()
    return bool((gap <= 2 * column.near).all())


def _kept_by(
    evidence: Evidence, weights: Candidate, columns: Sequence[_Column]
) -> tuple[str, float]:
    """Name the option that kept the tokens, and return the mean probability of what was kept."""
    parts = []
    for column in columns:
        cut = evidence.gap(weights, column) > column.near
        parts.append(evidence.sets(weights, column, evidence.temperature(column.row))[:, cut])
    count, mass, before, least, behind = torch.cat(parts, dim=1)
    kept = "a set of the most probable tokens"
    if not len(count):
        return kept, 1.0
    if bool((count == count[0]).all()):
        kept = f"top-k {int(count[0])}"
    else:
        for name, low, high in (("min-p", behind, least), ("top-p", before, mass)):
            if float(low.max()) < float(high.min()):
                kept = f"{name} between {low.max():.3g} and {high.min():.3g}"
    return kept, float(mass.mean())
