"""Which weights sampled the tokens, at which temperature, out of which set."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lrlhf.apps.verify.answers import Answer
from lrlhf.apps.verify.candidate_weights import Candidate, continued_logprobs
from lrlhf.apps.verify.rollout_rows import Row
from lrlhf.statistics.intervals import mean_interval

_NOISE = 4.0
"""Errors of the measured size that a sound difference may have: both sides round by themselves
(a factor of √2), with other kernels and in another order than the measurement (as much again)."""
_LEVEL = 1e-6
"""Of tests: how often they reject what is sound. A report makes a handful of them."""
_FITTED = 256
"""Tokens that a temperature is fitted to."""


class Fit(NamedTuple):
    """How the recorded log-probabilities of a row come about."""

    kind: str
    """``plain``; ``shifted`` by one token; of another ``temperature``; ``renormalised`` over the
    tokens that were kept; of weights that ``changed`` within the row; ``broken``: of other tokens
    from some token on; ``none``."""
    name: str
    """The weights."""
    error: float
    """Root mean square difference in nats."""
    at: int = 0
    """First token of the response that is different, from 0; the shift."""
    value: float = math.nan
    """Temperature."""
    other: str = ""
    """The weights behind a change."""


class Sampling(NamedTuple):
    """Options that rows were sampled with, as far as they record them or a person names them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def truncates(self) -> bool:
        """Whether tokens were cut off."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class _Column(NamedTuple):
    """A recorded column of a row."""

    row: Row
    ids: Tensor
    values: Tensor
    mask: Tensor
    """`[T]` bool: the tokens of the policy that have a value."""
    bound: float
    """Root mean square difference that rounding explains."""


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
        self.rows, self.candidates, self.sampling = rows, candidates, sampling
        ids = [row.ids for row in rows if row.ids is not None]
        self.rounding = candidates[0].rounding(ids, sampling.temperature)
        self.fits = {name: self._fits(self.columns(name)) for name in ("sampling", "old")}

    @property
    def noise(self) -> float:
        """Difference in nats between log-probabilities of two programs that is sound."""
        return _NOISE * self.rounding

    def temperature(self, row: Row) -> float:
        """Return the temperature that a row says it was sampled at."""
        return row.options.get("temperature") or self.sampling.temperature

    def columns(self, name: str) -> list[_Column]:
        """Return a column of every row that has it."""
        found = []
        for row in self.rows:
            if row.ids is None or row.written is None or name not in row.tokens:
                continue
            values = row.tokens[name]
            mask = row.written & values.isfinite()
            mask[0] = False  # nothing predicts it
            # numbers were written with so many digits, and computed in float32 at best
            size = float(values.abs().nan_to_num(0.0).max().clamp(min=1.0))
            written = size * max(10.0 ** (1 - row.digits), 2.0**-23)
            bound = _NOISE * math.hypot(self.rounding, written)
            if mask.any():
                found.append(_Column(row, row.ids, values, mask, bound))
        return found

    def gap(
        self, candidate: Candidate, column: _Column, temperature: float | None = None
    ) -> Tensor:
        """Return recorded minus recomputed, of the tokens of a column."""
        own = candidate.facts(column.ids, temperature or self.temperature(column.row)).logprobs
        return (column.values - own)[column.mask]

    def _fits(self, columns: Sequence[_Column]) -> list[tuple[Row, Fit]]:
        """Explain the columns; the candidate that is expected goes first."""
        plain = [
            next(
                (
                    Fit("plain", candidate.name, error)
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
            (column.row, fit or self._explained(column, fitted))
            for column, fit in zip(columns, plain, strict=True)
        ]

    def _explained(self, column: _Column, fitted: Sequence[float]) -> Fit:
        mask, bound = column.mask, column.bound
        for candidate, temperature in zip(self.candidates, fitted, strict=True):
            for shift in (1, -1):
                moved = column._replace(
                    values=column.values.roll(shift), mask=mask & mask.roll(1) & mask.roll(-1)
                )
                if moved.mask.any() and (error := _rms(self.gap(candidate, moved))) <= bound:
                    return Fit("shifted", candidate.name, error, at=-shift)
            # a fitted number takes its share of what rounding leaves
            if (error := _rms(self.gap(candidate, column, temperature))) <= bound:
                return Fit("temperature", candidate.name, error, value=temperature)
            for named in dict.fromkeys((self.temperature(column.row), 1.0)):
                if self._is_renormalised(candidate, column, named):
                    error = _rms(self.gap(candidate, column, named))
                    return Fit("renormalised", candidate.name, error, value=named)
        return self._changed(column)

    def sets(self, candidate: Candidate, column: _Column, temperature: float) -> Tensor:
        """Return `[5, N]`, the columns of `Candidate.kept_sets` at the tokens of a column."""
        mass = torch.ones(len(column.ids), dtype=torch.float64)
        gap = self.gap(candidate, column, temperature)
        mass[column.mask] = (-gap).exp().clamp(max=1.0)
        kept = candidate.kept_sets(column.ids, temperature, mass)
        return torch.stack([each[column.mask] for each in kept])

    def _is_renormalised(self, candidate: Candidate, column: _Column, temperature: float) -> bool:
        """Tell whether tokens are more probable by the mass of a set of the most probable ones."""
        gap, near = self.gap(candidate, column, temperature), 3 * column.bound
        kept = (gap > near) & (gap < math.inf)
        if not bool((gap > -near).all()) or not bool(kept.any()):
            return False
        size, mass, *_ = self.sets(candidate, column, temperature)
        rank = candidate.facts(column.ids, temperature).rank[column.mask]
        return bool((((mass.log() + gap).abs() <= near) & (rank < size))[kept].all())

    def _changed(self, column: _Column) -> Fit:
        """Find weights that fit the first tokens of a row, and others that fit the rest."""
        gaps = {c.name: self.gap(c, column).nan_to_num(0.0) for c in self.candidates}
        # one token differs by more than the mean of all
        good = {name: gap.abs() <= _NOISE * column.bound for name, gap in gaps.items()}
        ahead = {name: int(flags.int().cumprod(0).sum()) for name, flags in good.items()}
        first = max(ahead, key=lambda name: ahead[name])
        until, nearest = ahead[first], min(gaps, key=lambda name: _rms(gaps[name]))
        by_name = {candidate.name: candidate for candidate in self.candidates}
        places = column.mask.nonzero().flatten()
        for name, flags in good.items():
            if until and name != first and bool(flags[until:].all()):
                return Fit("changed", first, _rms(gaps[name][until:]), at=until, other=name)
        for name in (other for other in by_name if other != first):
            for change in range(until, max(0, until - 5), -1):
                pair, at = (by_name[first], by_name[name]), int(places[change])
                own = continued_logprobs(*pair, column.ids, at, self.temperature(column.row))
                error = _rms((column.values - own)[places[change:]])
                if error <= column.bound:
                    return Fit("changed", first, error, at=change, other=name)
        # by chance a token of other weights is within rounding once in a while, three are not
        kind, name = ("broken", first) if until >= 3 else ("none", nearest if not until else first)
        return Fit(kind, name, _rms(gaps[nearest]), at=until)


def _fitted_temperature(columns: Sequence[_Column], candidate: Candidate) -> float:
    """Return the temperature at which a candidate comes nearest to columns of log-probabilities."""
    logits, targets, values = [], [], list[Tensor]()
    for column in columns:
        if sum(len(part) for part in values) >= _FITTED:
            break
        for places, scores, ids in candidate.logits(column.ids):
            here = column.mask[places]
            logits.append(scores[here.to(scores.device)])
            targets.append(ids[here.to(ids.device)])
            values.append(column.values[places][here])
    scores, ids, wanted = torch.cat(logits), torch.cat(targets)[:, None], torch.cat(values)

    def error(log_temperature: float) -> float:
        own = (scores / math.exp(log_temperature)).log_softmax(-1).gather(-1, ids)
        return _rms(wanted - own.squeeze(-1).double().cpu())

    low, high = math.log(0.05), math.log(20.0)
    for _ in range(10):  # each grid spans the two neighbours of the best of the one before
        grid = np.linspace(low, high, 41).tolist()
        best = min(range(41), key=lambda place: error(grid[place]))
        low, high = grid[max(0, best - 1)], grid[min(40, best + 1)]
    return math.exp((low + high) / 2)


def _rms(gap: Tensor) -> float:
    return float(gap.square().mean().sqrt()) if len(gap) else 0.0


def check_weights(evidence: Evidence) -> list[Answer]:
    """Say which weights sampled the rows, and from which token on."""
    fits = evidence.fits["sampling"]
    if not fits:
        return _by_likelihood(evidence)
    groups: dict[tuple[str, str, str], list[tuple[Row, Fit]]] = defaultdict(list)
    for row, fit in fits:
        groups[fit.kind, fit.name, fit.other].append((row, fit))
    answers = []
    for (kind, name, other), members in groups.items():
        error = max(fit.error for _, fit in members)
        share = f"{len(members):,} of {len(fits):,} responses"
        size = f"{error:.2g} nats apart, {evidence.rounding:.2g} from rounding"
        start, stop = (end(fit.at for _, fit in members) for end in (min, max))
        where = f"token {start}" if start == stop else f"tokens {start} to {stop}"
        # the change is in order where the row says so itself
        sound = kind == "changed" and all(
            "versions" in row.tokens and len({*row.tokens["versions"][row.written].tolist()}) > 1
            for row, _ in members
        )
        text = {
            "shifted": f"log-probabilities stand one token {'after' if start > 0 else 'before'} "
            f"theirs in {share}",
            "changed": f"{name} sampled the first tokens and {other} the rest, from {where} on, of "
            f"{share}; {'as their versions record' if sound else 'no version records it'}",
            "broken": f"{name} fits up to {where} of {share}; behind that the log-probabilities "
            "are of other tokens",
            "none": f"none of the weights sampled {share}: {name} comes nearest, {size}",
        }.get(kind)
        if text is None:
            text, sound = f"{name} sampled {share} ({size})", name == evidence.candidates[0].name
        figures = {"rms": error, "rounding": evidence.rounding, "responses": len(members)}
        places = [row.place for row, _ in members]
        answers.append(Answer("weights", "sound" if sound else "fault", text, figures, places))
    return [*answers, *_rivals(evidence)]


def _rivals(evidence: Evidence) -> Iterator[Answer]:
    """Compare the expected weights with others that rounding does not tell apart from them."""
    expected = evidence.candidates[0]
    columns = [
        column
        for column, (_, fit) in zip(
            evidence.columns("sampling"), evidence.fits["sampling"], strict=True
        )
        if fit.kind == "plain" and fit.name == expected.name
    ]
    for rival in evidence.candidates[1:]:
        gains = []
        for column in columns:
            other, own = (_rms(evidence.gap(each, column)) for each in (rival, expected))
            if other <= column.bound:
                gains.append(own**2 - other**2)
        interval = mean_interval(gains, confidence=1 - _LEVEL)
        if interval.low > 0:
            text = f"{rival.name} fits better than {expected.name} by more than chance"
            yield Answer("weights", "fault", text, {"gain": interval.mean})
        elif gains and not interval.high < 0:
            text = f"{rival.name} fits {len(gains):,} responses too: closer to {expected.name} than"
            yield Answer("weights", "sound", f"{text} rounding")


class _Tokens(NamedTuple):
    """The sampled tokens of all rows under one candidate."""

    uniforms: Tensor
    """`[N]`: uniform and independent if the candidate sampled them; small for probable tokens."""
    totals: list[float]
    """Log-probability of each response."""
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


def _tokens(evidence: Evidence, candidate: Candidate, temperature: float | None = None) -> _Tokens:
    generator = torch.Generator().manual_seed(0)
    uniforms, totals, rank = [], [], 0
    for row in evidence.rows:
        if row.ids is None or row.written is None:
            continue
        facts = candidate.facts(row.ids, temperature or evidence.temperature(row))
        keep = row.written & facts.logprobs.isfinite()
        logprobs = facts.logprobs[keep]
        random = torch.rand(len(logprobs), generator=generator, dtype=torch.float64)
        uniforms.append(facts.above[keep] + random * logprobs.exp())
        totals.append(float(logprobs.sum()))
        rank = max(rank, int(facts.rank[keep].max())) if len(logprobs) else rank
    return _Tokens(torch.cat(uniforms), totals, rank)


def _by_likelihood(evidence: Evidence) -> list[Answer]:
    """Test each candidate by the tokens alone, where no log-probability was recorded."""
    tokens = {candidate.name: _tokens(evidence, candidate) for candidate in evidence.candidates}
    p_values = {name: each.p_value for name, each in tokens.items()}
    expected, *others = tokens
    note = "no sampling log-probabilities were recorded; by the tokens alone"
    shown = ", ".join(f"{name} p = {p:.2g}" for name, p in p_values.items())
    figures: dict[str, Any] = {"p_values": p_values}
    better = None
    for name in others:
        gains = np.subtract(tokens[expected].totals, tokens[name].totals).tolist()
        interval = mean_interval(gains, confidence=1 - _LEVEL)
        figures[f"likelier than {name}"] = interval._asdict()
        shown += (
            f"; {expected} makes a response likelier than {name} by {interval.mean:.3g} nats "
            f"({interval.low:.3g} to {interval.high:.3g})"
        )
        if better is None and interval.high < 0 and p_values[name] >= _LEVEL:
            better = name
    verdict: Literal["sound", "fault", "unknown"] = "fault"
    if better is not None:
        text = f"{better} sampled the responses and not {expected} ({shown})"
    elif p_values[expected] >= _LEVEL:
        verdict, text = "sound", f"they are samples of {expected} ({shown})"
    elif evidence.sampling.truncates or _limits(evidence) is not None:
        verdict, text = "unknown", "and top-p, top-k or min-p cut some off"
    elif (temperature := _sampled_at(evidence)) is not None:
        verdict, text = "sound", f"they are samples of {expected} at temperature {temperature:.3g}"
    else:
        text = f"none of the weights sampled them ({shown})"
    return [Answer("weights", verdict, f"{note}, {text}", figures)]


def _sampled_at(evidence: Evidence) -> float | None:
    """Return another temperature at which the expected weights may have sampled the tokens."""
    own = {evidence.temperature(row) for row in evidence.rows}
    if len(own) > 1:
        return None
    named = own.pop()
    others = [1.0, named**2, 1 / named, *(named * torch.logspace(-0.5, 0.5, 11)).tolist()]
    tested = {
        other: _tokens(evidence, evidence.candidates[0], other).p_value
        for other in others
        if abs(other / named - 1) > 1e-3
    }
    best = max(tested, key=lambda value: tested[value])
    return best if tested[best] > 1e-3 else None


class _Limits(NamedTuple):
    mass: float
    """The largest share of more probable tokens, the token itself included."""
    rank: int
    p_value: float


def _limits(evidence: Evidence) -> _Limits | None:
    """Return within which set all tokens lie; None: by chance they may."""
    tokens = _tokens(evidence, evidence.candidates[0])
    # the largest of n uniform numbers is below m with probability m^n
    largest = max(tokens.uniforms.tolist(), default=1.0)
    p_value = largest ** len(tokens.uniforms)
    return _Limits(largest, tokens.rank + 1, p_value) if p_value < _LEVEL else None


def check_ratio(evidence: Evidence) -> list[Answer]:
    """Look for a factor of temperature, top-p, top-k or min-p between sampling and training."""
    answers = [*_factors(evidence, "sampling"), *_factors(evidence, "old"), *_mean_ratio(evidence)]
    kinds = {fit.kind for _, fit in evidence.fits["sampling"]}
    limits = _limits(evidence)
    if limits is not None and kinds <= {"plain"} and all(a.verdict != "fault" for a in answers):
        text = (
            f"no token lies outside of the {limits.mass:.1%} most probable, nor beyond rank "
            f"{limits.rank} (p = {limits.p_value:.1g}): tokens were cut off by top-p, top-k or "
            "min-p, and the log-probabilities know nothing of it"
        )
        answers.append(Answer("ratio", "fault", text, limits._asdict()))
    if answers:
        return answers
    if kinds & {"none", "broken"}:
        return [Answer("ratio", "unknown", "there are responses that none of the weights sampled")]
    if kinds or evidence.fits["old"]:
        return [Answer("ratio", "sound", "log-probabilities are at the named temperature")]
    rejected = _tokens(evidence, evidence.candidates[0]).p_value < _LEVEL
    if rejected and (temperature := _sampled_at(evidence)) is not None:
        text = f"the tokens were sampled at temperature {temperature:.3g}"
        return [Answer("ratio", "fault", text, {"temperature": temperature})]
    return [Answer("ratio", "unknown", "no log-probabilities were recorded")]


def _factors(evidence: Evidence, name: str) -> Iterator[Answer]:
    """Name what log-probabilities of a column are of, where that is not what they should be of."""
    title = "sampling log-probabilities" if name == "sampling" else "trainer's log-probabilities"
    groups: dict[tuple[str, str, float], list[_Column]] = defaultdict(list)
    for column, (_, fit) in zip(evidence.columns(name), evidence.fits[name], strict=True):
        groups[fit.kind, fit.name, round(fit.value, 3)].append(column)
    for (kind, weights, value), columns in groups.items():
        places = [column.row.place for column in columns]
        share = f"in {len(columns):,} of {len(evidence.fits[name]):,} responses"
        if kind == "temperature":
            wanted = evidence.temperature(columns[0].row)
            text = f"the {title} are of temperature {value:.3g}, not {wanted:.3g}, {share}"
            yield Answer("ratio", "fault", text, {"temperature": value}, places)
        elif kind == "renormalised":
            found, mass = _kept_by(evidence, columns)
            if all(_same_set(column) for column in columns):
                text = f"trainer and engine are both renormalised over {found} {share}"
                yield Answer("ratio", "sound", text, {"kept": found, "mass": mass})
                continue
            text = (
                f"the {title} are renormalised over {found} {share}: the ratio has a factor of "
                f"{mass:.3g} on average"
            )
            trained = any("old" in row.tokens for row in evidence.rows)
            named = name == "sampling" and evidence.sampling.truncates and not trained
            figures = {"kept": found, "mass": mass}
            yield Answer("ratio", "unknown" if named else "fault", text, figures, places)
        elif name == "old" and kind == "plain" and weights != evidence.candidates[0].name:
            yield Answer(
                "ratio", "fault", f"the {title} are those of {weights} {share}", {}, places
            )


def _same_set(column: _Column) -> bool:
    """Whether the trainer is renormalised as the engine is (keep sampling mask)."""
    row = column.row
    if not {"old", "sampling"} <= row.tokens.keys():
        return False
    gap = (row.tokens["old"] - row.tokens["sampling"])[row.written].abs()
    return bool((gap <= 3 * column.bound).all())


def _kept_by(evidence: Evidence, columns: Sequence[_Column]) -> tuple[str, float]:
    """Name the option that kept the tokens, and return the mean probability of what was kept."""
    parts = []
    for column in columns:
        pair, temperature = (evidence.candidates[0], column), evidence.temperature(column.row)
        cut = evidence.gap(*pair) > 3 * column.bound
        parts.append(evidence.sets(*pair, temperature)[:, cut])
    count, mass, before, least, behind = torch.cat(parts, dim=1)
    if not len(count):
        return "a set of the most probable tokens", 1.0
    options = (
        (bool((count == count[0]).all()), f"top-k {int(count[0])}"),
        *(
            (
                float(low.max()) < float(high.min()),
                f"{name} between {low.max():.3g} and {high.min():.3g}",
            )
            for name, low, high in (("top-p", before, mass), ("min-p", behind, least))
        ),
        (True, "a set of the most probable tokens"),
    )
    return next(text for fits, text in options if fits), float(mass.mean())


def _mean_ratio(evidence: Evidence) -> list[Answer]:
    """Test the mean of the ratio, which is 1 where nothing was cut off, whatever the weights."""
    gaps = [
        (row.tokens["old"] - row.tokens["sampling"])[row.written]
        for row in evidence.rows
        if "old" in row.tokens and "sampling" in row.tokens
    ]
    gaps = [gap[gap.isfinite()] for gap in gaps if gap.isfinite().any()]
    if len(gaps) < 2:
        return []
    interval = mean_interval([float(gap.exp().mean()) for gap in gaps], confidence=1 - _LEVEL)
    size, excess = float(np.mean([_rms(gap) for gap in gaps])), torch.cat(gaps).exp() - 1
    figures = {"mean_ratio": interval.mean, "low": interval.low, "high": interval.high, "rms": size}
    # a ratio of other weights goes up as far as down, though seldom; of fewer tokens only down
    above, below = (float((sign * excess).clamp(min=0).sum()) for sign in (1, -1))
    if interval.high < 1 and above < below / 10:
        text = (
            f"the ratio of trainer to engine is {interval.mean:.3f} on average ({interval.low:.3f} "
            f"to {interval.high:.3f}) and not 1: the engine renormalised over fewer tokens"
        )
        return [Answer("ratio", "fault", text, figures)]
    text = f"trainer and engine are {size:.2g} nats apart, and their ratio is {interval.mean:.4f}"
    return [Answer("ratio", "sound", f"{text} on average", figures)]
