"""Which weights sampled the tokens, at which temperature, out of which set."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lrlhf.apps.verify.answers import Answer, Verdict
from lrlhf.apps.verify.candidate_weights import Candidate, continued_logprobs
from lrlhf.apps.verify.rollout_rows import Row
from lrlhf.statistics.intervals import mean_interval

_NOISE = 4.0
"""Errors of the measured size that a sound difference may have: both sides round by themselves
(a factor of √2), with other kernels and in another order than the measurement (as much again)."""
_LEVEL = 1e-6
"""Of tests: how often they reject what is sound. A report makes a handful of them."""
_TEMPERATURES = torch.logspace(-1.3, 1.3, 53, dtype=torch.float64)
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


class Evidence:
    """Rows and candidates, and how recorded log-probabilities come about.

    Args:
        rows: With token ids.
        masks: `[T]` bool of each row, the tokens that the policy wrote.
        candidates: The first is that which should have sampled the rows.
        sampling: Options of rows that record none.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        masks: Sequence[Tensor],
        candidates: Sequence[Candidate],
        sampling: Sampling,
    ) -> None:
        self.rows, self.masks, self.candidates, self.sampling = rows, masks, candidates, sampling
        ids = [row.ids for row in rows if row.ids is not None]
        self.rounding = candidates[0].rounding(ids, sampling.temperature)
        self.shift, self.temperatures = 0, dict[tuple[str, str], float]()

    def temperature(self, row: Row) -> float:
        """Return the temperature that a row says it was sampled at."""
        return row.options.get("temperature") or self.sampling.temperature

    def tolerance(self, row: Row, values: Tensor) -> float:
        """Return the root mean square difference that rounding explains."""
        # numbers were written with so many digits, and computed in float32 at best
        size = float(values.abs().nan_to_num(0.0).max().clamp(min=1.0))
        written = size * max(10.0 ** (1 - row.digits), 2.0**-23)
        return _NOISE * math.hypot(self.rounding, written)

    def fits(self, column: str) -> list[tuple[Row, Fit]]:
        """Explain a column of every row that has it."""
        there = [
            (row, mask & row.tokens[column].isfinite())
            for row, mask in zip(self.rows, self.masks, strict=True)
            if column in row.tokens
        ]
        plain = [(row, mask, self._plain(row, row.tokens[column], mask)) for row, mask in there]
        lost = [(row, mask) for row, mask, fit in plain if fit is None and mask.any()]
        for candidate in self.candidates if lost else ():
            found = self._temperature(lost, column, candidate)
            self.temperatures[column, candidate.name] = found
        return [
            (row, fit or self._explained(row, column, mask))
            for row, mask, fit in plain
            if mask.any()
        ]

    def _plain(self, row: Row, values: Tensor, mask: Tensor) -> Fit | None:
        """Return the candidate that fits as it is; the one that is expected first."""
        fits = [
            Fit("plain", candidate.name, error)
            for candidate in self.candidates
            if (error := _rms(self._gap(candidate, row, values, mask)))
            <= self.tolerance(row, values)
        ]
        return fits[0] if fits else None

    def _gap(
        self, candidate: Candidate, row: Row, values: Tensor, mask: Tensor, temperature: float = 0.0
    ) -> Tensor:
        """Return recorded minus recomputed, of the tokens of a mask."""
        assert row.ids is not None, "of rows with ids"
        own = candidate.facts(row.ids, temperature or self.temperature(row)).logprobs
        keep = mask & own.isfinite()
        return (values - own)[keep]

    def _temperature(
        self, lost: Sequence[tuple[Row, Tensor]], column: str, candidate: Candidate
    ) -> float:
        """Fit the temperature at which a candidate comes nearest to rows that nothing explains."""
        logits, targets, values, taken = [], [], [], 0
        for row, mask in lost:
            assert row.ids is not None, "of rows with ids"
            if taken >= _FITTED:
                break
            keep = mask[1:][: len(row.ids) - 1]
            start = 0
            for part, ids in candidate.logits(row.ids):
                here = keep[start : start + len(ids)]
                logits.append(part[here])
                targets.append(ids[here])
                values.append(row.tokens[column][1:][start : start + len(ids)][here])
                start, taken = start + len(ids), taken + int(here.sum())
        scores, wanted = torch.cat(logits), torch.cat(values)
        ids = torch.cat(targets)[:, None]

        def error(log_temperature: float) -> float:
            scaled = (scores / math.exp(log_temperature)).log_softmax(-1)
            gap = wanted - scaled.gather(-1, ids).squeeze(-1).double().cpu()
            return float(gap.square().mean())

        grid = _TEMPERATURES.log().tolist()
        best = min(range(len(grid)), key=lambda place: error(grid[place]))
        low, high = grid[max(0, best - 1)], grid[min(len(grid) - 1, best + 1)]
        for _ in range(40):
            first, second = low + (high - low) * 0.382, low + (high - low) * 0.618
            low, high = (low, second) if error(first) < error(second) else (first, high)
        return math.exp((low + high) / 2)

    def _explained(self, row: Row, column: str, mask: Tensor) -> Fit:
        values = row.tokens[column]
        bound = self.tolerance(row, values)
        for candidate in self.candidates:
            for shift in (1, -1):
                moved = values.roll(shift)
                keep = mask & mask.roll(1) & mask.roll(-1)
                if keep.any() and (error := _rms(self._gap(candidate, row, moved, keep))) <= bound:
                    return Fit("shifted", candidate.name, error, at=-shift)
            fitted = self.temperatures[column, candidate.name]
            error = _rms(self._gap(candidate, row, values, mask, fitted))
            # a fitted number takes its share of what rounding leaves
            if error <= bound:
                return Fit("temperature", candidate.name, error, value=fitted)
            for temperature in dict.fromkeys((self.temperature(row), 1.0)):
                gap = self._gap(candidate, row, values, mask, temperature)
                if self._is_renormalised(candidate, row, gap, mask, temperature, bound):
                    return Fit("renormalised", candidate.name, _rms(gap), value=temperature)
        return self._changed(row, values, mask, bound)

    def _is_renormalised(
        self,
        candidate: Candidate,
        row: Row,
        gap: Tensor,
        mask: Tensor,
        temperature: float,
        bound: float,
    ) -> bool:
        """Tell whether tokens are more probable by the mass of a set of the most probable ones."""
        assert row.ids is not None, "of rows with ids"
        if not bool((gap > -3 * bound).all()):
            return False
        sets = self._sets(candidate, row, gap, mask, temperature)
        kept = (gap > 3 * bound) & (gap < math.inf)
        facts = candidate.facts(row.ids, temperature)
        rank = facts.rank[mask & facts.logprobs.isfinite()]
        exact = (sets[1].log() + gap).abs() <= 3 * bound
        return bool(kept.any()) and bool((exact & (rank < sets[0]))[kept].all())

    def _sets(
        self, candidate: Candidate, row: Row, gap: Tensor, mask: Tensor, temperature: float
    ) -> Tensor:
        """Return `[5, N]`, the columns of `Candidate.kept_sets` at the tokens of a mask."""
        assert row.ids is not None, "of rows with ids"
        own = candidate.facts(row.ids, temperature).logprobs
        keep = mask & own.isfinite()
        mass = torch.ones(len(row.ids), dtype=torch.float64)
        mass[keep] = (-gap).exp().clamp(max=1.0)
        return torch.stack(
            [column[keep] for column in candidate.kept_sets(row.ids, temperature, mass)]
        )

    def _changed(self, row: Row, values: Tensor, mask: Tensor, bound: float) -> Fit:
        """Find weights that fit the first tokens of a row, and others that fit the rest."""
        assert row.ids is not None, "of rows with ids"
        places = mask.nonzero().flatten()
        gaps = {
            candidate.name: (values - candidate.facts(row.ids, self.temperature(row)).logprobs)[
                places
            ].nan_to_num(0.0)
            for candidate in self.candidates
        }
        # one token differs by more than the mean of all
        good = {name: (gap.abs() <= _NOISE * bound) for name, gap in gaps.items()}
        ahead = {name: _fitting_ahead(flags) for name, flags in good.items()}
        first = max(ahead, key=lambda name: ahead[name])
        until = ahead[first]
        nearest = min(gaps, key=lambda name: _rms(gaps[name]))
        if until == 0:
            return Fit("none", nearest, _rms(gaps[nearest]))
        by_name = {candidate.name: candidate for candidate in self.candidates}
        for name, flags in good.items():
            if name != first and bool(flags[until:].all()):
                return Fit("changed", first, _rms(gaps[name][until:]), at=until, other=name)
        for name in gaps:
            for change in range(until, max(0, until - 5), -1):
                if name == first:
                    continue
                at = int(places[change])
                own = continued_logprobs(
                    by_name[first], by_name[name], row.ids, at, self.temperature(row)
                )
                rest = (values - own)[places[change:]]
                if _rms(rest) <= bound:
                    return Fit("changed", first, _rms(rest), at=change, other=name)
        # by chance a token of other weights is within rounding once in a while, three are not
        kind = "broken" if until >= 3 else "none"
        return Fit(kind, first, _rms(gaps[nearest]), at=until)


def _fitting_ahead(flags: Tensor) -> int:
    """Count the entries before the first that is False."""
    return int(flags.int().cumprod(0).sum())


def _rms(gap: Tensor) -> float:
    return float(gap.square().mean().sqrt()) if len(gap) else 0.0


def check_weights(evidence: Evidence) -> list[Answer]:
    """Say which weights sampled the rows, and from which token on."""
    fits = evidence.fits("sampling")
    if not fits:
        return _by_likelihood(evidence)
    expected, total = evidence.candidates[0].name, len(fits)
    groups: dict[tuple[str, str, str], list[tuple[Row, Fit]]] = defaultdict(list)
    for row, fit in fits:
        groups[fit.kind, fit.name, fit.other].append((row, fit))
    answers = []
    for (kind, name, other), members in groups.items():
        places = [row.place for row, _ in members]
        error = max(fit.error for _, fit in members)
        share = f"{len(members):,} of {total:,} responses"
        figures = {"rms": error, "rounding": evidence.rounding, "responses": len(members)}
        size = f"{error:.2g} nats apart, {evidence.rounding:.2g} from rounding"
        starts = sorted(fit.at for _, fit in members)
        where = (
            f"token {starts[0]}"
            if starts[0] == starts[-1]
            else f"tokens {starts[0]} to {starts[-1]}"
        )
        if kind in {"plain", "temperature", "renormalised"}:
            verdict, text = (
                "sound" if name == expected else "fault",
                f"{name} sampled {share} ({size})",
            )
        elif kind == "shifted":
            side = "after" if starts[0] > 0 else "before"
            text = f"log-probabilities stand one token {side} theirs in {share}"
            verdict = "fault"
        elif kind == "changed":
            versions = [
                len(torch.unique(row.tokens["versions"][m]))
                for row, m in zip(evidence.rows, evidence.masks, strict=True)
                if row.place in places and "versions" in row.tokens
            ]
            known = len(versions) == len(places) and min(versions) > 1
            verdict = "sound" if known else "fault"
            recorded = "as their versions record" if known else "no version records it"
            text = (
                f"{name} sampled the first tokens and {other} the rest, from {where} on, of "
                f"{share}; {recorded}"
            )
        elif kind == "broken":
            verdict = "fault"
            text = (
                f"{name} fits up to {where} of {share}; behind that the log-probabilities are of "
                "other tokens"
            )
        else:
            near = f"{name} comes nearest, {size}"
            verdict, text = "fault", f"none of the weights sampled {share}: {near}"
        answers.append(Answer("weights", verdict, text, figures, places))  # type: ignore[arg-type]
    return [*answers, *_rivals(evidence, fits)]


def _rivals(evidence: Evidence, fits: Sequence[tuple[Row, Fit]]) -> list[Answer]:
    """Compare the expected weights with others that rounding does not tell apart from them."""
    expected = evidence.candidates[0]
    answers = []
    rows = [row for row, fit in fits if fit.kind == "plain" and fit.name == expected.name]
    masks = {row.place: mask for row, mask in zip(evidence.rows, evidence.masks, strict=True)}
    for rival in evidence.candidates[1:]:
        gains = []
        for row in rows:
            values, mask = row.tokens["sampling"], masks[row.place]
            mask = mask & values.isfinite()
            other, own = (_rms(evidence._gap(c, row, values, mask)) ** 2 for c in (rival, expected))
            if other <= evidence.tolerance(row, values) ** 2:
                gains.append(own - other)
        if not gains:
            continue
        interval = mean_interval(gains, confidence=1 - _LEVEL)
        if interval.low > 0:
            text = f"{rival.name} fits better than {expected.name} by more than chance"
            answers.append(Answer("weights", "fault", text, {"gain": interval.mean}))
        elif not interval.high < 0:
            text = (
                f"{rival.name} fits {len(gains):,} responses too: closer to {expected.name} than "
                "rounding"
            )
            answers.append(Answer("weights", "sound", text))
    return answers


class _Tokens(NamedTuple):
    """The sampled tokens of all rows under one candidate."""

    uniforms: Tensor
    """`[N]`: uniform and independent if the candidate sampled them; small for probable tokens."""
    totals: list[float]
    """Log-probability of each response."""


def _tokens(evidence: Evidence, candidate: Candidate, temperature: float = 0.0) -> _Tokens:
    generator = torch.Generator().manual_seed(0)
    uniforms, totals = [], []
    for row, mask in zip(evidence.rows, evidence.masks, strict=True):
        assert row.ids is not None, "of rows with ids"
        facts = candidate.facts(row.ids, temperature or evidence.temperature(row))
        keep = mask & facts.logprobs.isfinite()
        logprobs = facts.logprobs[keep]
        random = torch.rand(len(logprobs), generator=generator, dtype=torch.float64)
        uniforms.append(facts.above[keep] + random * logprobs.exp())
        totals.append(float(logprobs.sum()))
    return _Tokens(torch.cat(uniforms), totals)


def uniform_p_value(values: Tensor) -> float:
    """Return how probable a sample is that is as far from uniform (Kolmogorov and Smirnov).

    Reference:
        Stephens 1970, https://doi.org/10.1111/j.2517-6161.1970.tb00821.x, for finite samples
    """
    ordered = values.sort().values
    count = len(ordered)
    if not count:
        return 1.0
    steps = torch.arange(1, count + 1, dtype=torch.float64) / count
    distance = float(torch.maximum(steps - ordered, ordered - steps + 1 / count).max())
    scaled = distance * (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count))
    terms = np.arange(1, 101)
    series = 2 * np.sum((-1.0) ** (terms - 1) * np.exp(-2 * (terms * scaled) ** 2))
    return float(min(1.0, max(0.0, series))) if scaled > 0.2 else 1.0


def _by_likelihood(evidence: Evidence) -> list[Answer]:
    """Test each candidate by the tokens alone, where no log-probability was recorded."""
    found = {candidate.name: _tokens(evidence, candidate) for candidate in evidence.candidates}
    p_values = {name: uniform_p_value(tokens.uniforms) for name, tokens in found.items()}
    expected = evidence.candidates[0].name
    possible = [name for name, p in p_values.items() if p >= _LEVEL]
    shown = ", ".join(f"{name} p = {p:.2g}" for name, p in p_values.items())
    note = "no sampling log-probabilities were recorded; by the tokens alone"
    figures: dict[str, object] = {"p_values": p_values}
    comparisons = []
    for name, tokens in found.items():
        if name == expected:
            continue
        gains = np.subtract(found[expected].totals, tokens.totals).tolist()
        interval = mean_interval(gains, confidence=1 - _LEVEL)
        comparisons.append((name, interval))
        figures[f"likelier than {name}"] = interval._asdict()
    likelier = "".join(
        f"; {expected} makes a response likelier than {name} by {i.mean:.3g} nats "
        f"({i.low:.3g} to {i.high:.3g})"
        for name, i in comparisons
    )
    better = [name for name, i in comparisons if i.high < 0 and name in possible]
    if better:
        text = f"{note}, {better[0]} sampled the responses and not {expected} ({shown}{likelier})"
        return [Answer("weights", "fault", text, figures)]
    if expected in possible:
        text = f"{note}, they are samples of {expected} ({shown}{likelier})"
        return [Answer("weights", "sound", text, figures)]
    if evidence.sampling.truncates or _limits(evidence, evidence.candidates[0]) is not None:
        return [
            Answer("weights", "unknown", f"{note}, and top-p, top-k or min-p cut some off", figures)
        ]
    if (temperature := _sampled_at(evidence)) is not None:
        text = f"{note}, they are samples of {expected} at temperature {temperature:.3g}"
        return [Answer("weights", "sound", text, figures)]
    return [
        Answer("weights", "fault", f"{note}, none of the weights sampled them ({shown})", figures)
    ]


def _sampled_at(evidence: Evidence) -> float | None:
    """Return another temperature at which the expected weights may have sampled the tokens."""
    candidate = evidence.candidates[0]
    own = [evidence.temperature(row) for row in evidence.rows]
    factors = [1 / own[0], own[0], 1 / own[0] ** 2, *torch.logspace(-0.5, 0.5, 11).tolist()]
    tested = {
        own[0] * factor: uniform_p_value(_tokens(evidence, candidate, own[0] * factor).uniforms)
        for factor in factors
        if len({*own}) == 1 and abs(factor - 1) > 1e-3
    }
    best = max(tested, key=lambda value: tested[value], default=None)
    return best if best is not None and tested[best] > 1e-3 else None


class _Limits(NamedTuple):
    mass: float
    """The largest share of more probable tokens, the token itself included."""
    rank: int
    p_value: float


def _limits(evidence: Evidence, candidate: Candidate) -> _Limits | None:
    """Return within which set all tokens lie; None: by chance they may."""
    uniforms = _tokens(evidence, candidate).uniforms
    if not len(uniforms):
        return None
    # the largest of n uniform numbers is below m with probability m^n
    largest = float(uniforms.max())
    ranks = []
    for row, mask in zip(evidence.rows, evidence.masks, strict=True):
        assert row.ids is not None, "of rows with ids"
        ranks.append(candidate.facts(row.ids, evidence.temperature(row)).rank[mask])
    rank = int(torch.cat(ranks).nan_to_num(0.0).max())
    p_value = largest ** len(uniforms)
    return _Limits(largest, rank + 1, p_value) if p_value < _LEVEL else None


def check_ratio(evidence: Evidence) -> list[Answer]:
    """Look for a factor of temperature, top-p, top-k or min-p between sampling and training."""
    answers: list[Answer] = []
    kinds = {column: evidence.fits(column) for column in ("sampling", "old")}
    for column, fits in kinds.items():
        answers += _factors(evidence, column, fits)
    answers += _mean_ratio(evidence.rows, evidence.masks)
    if evidence.candidates and not any(answer.verdict == "fault" for answer in answers):
        limits = _limits(evidence, evidence.candidates[0])
        kept = any(fit.kind == "renormalised" for _, fit in kinds["sampling"])
        plain = kinds["sampling"] and all(fit.kind == "plain" for _, fit in kinds["sampling"])
        if limits is not None and not kept and (plain or not kinds["sampling"]):
            text = (
                f"no token lies outside of the {limits.mass:.1%} most probable, nor beyond rank "
                f"{limits.rank} (p = {limits.p_value:.1g}): tokens were cut off by top-p, top-k or "
                "min-p, and the log-probabilities know nothing of it"
            )
            answers.append(Answer("ratio", "fault", text, limits._asdict()))
    if not answers and not kinds["sampling"] and not kinds["old"]:
        if (temperature := _sampled_at_if_rejected(evidence)) is not None:
            text = f"the tokens were sampled at temperature {temperature:.3g}"
            return [Answer("ratio", "fault", text, {"temperature": temperature})]
        return [Answer("ratio", "unknown", "no log-probabilities were recorded")]
    if not answers:
        answers.append(Answer("ratio", "sound", "log-probabilities are at the named temperature"))
    return answers


def _factors(evidence: Evidence, column: str, fits: Sequence[tuple[Row, Fit]]) -> Iterator[Answer]:
    """Name what log-probabilities of a column are of, where that is not what they should be of."""
    title = "sampling log-probabilities" if column == "sampling" else "trainer's log-probabilities"
    groups: dict[tuple[str, str, float], list[Row]] = defaultdict(list)
    for row, fit in fits:
        groups[fit.kind, fit.name, round(fit.value, 3)].append(row)
    for (kind, name, value), rows in groups.items():
        places = [row.place for row in rows]
        share = f"{len(rows):,} of {len(fits):,} responses"
        if kind == "temperature":
            wanted = Counter(evidence.temperature(row) for row in rows).most_common(1)[0][0]
            text = f"the {title} are of temperature {value:.3g}, not {wanted:.3g}, in {share}"
            yield Answer("ratio", "fault", text, {"temperature": value}, places)
        elif kind == "renormalised":
            yield _of_kept(evidence, rows, column, f"the {title}", share)
        elif column == "old" and kind == "plain" and name != evidence.candidates[0].name:
            yield Answer(
                "ratio", "fault", f"the {title} are those of {name} in {share}", {}, places
            )


def _sampled_at_if_rejected(evidence: Evidence) -> float | None:
    if uniform_p_value(_tokens(evidence, evidence.candidates[0]).uniforms) >= _LEVEL:
        return None
    return _sampled_at(evidence)


def _of_kept(evidence: Evidence, rows: Sequence[Row], column: str, name: str, share: str) -> Answer:
    """Name the option whose sets of tokens the log-probabilities are renormalised over."""
    columns = []
    for row, mask in zip(evidence.rows, evidence.masks, strict=True):
        if not any(row is one for one in rows):
            continue
        values = row.tokens[column]
        mask = mask & values.isfinite()
        temperature = evidence.temperature(row)
        gap = evidence._gap(evidence.candidates[0], row, values, mask, temperature)
        bound = 3 * evidence.tolerance(row, values)
        sets = evidence._sets(evidence.candidates[0], row, gap, mask, temperature)
        columns.append(sets[:, gap > bound])
    count, mass, before, least, behind = torch.cat(columns, dim=1)
    found = "a set of the most probable tokens"
    if len(count) and bool((count == count[0]).all()):
        found = f"top-k {int(count[0])}"
    elif len(count) and float(before.max()) < float(mass.min()):
        found = f"top-p between {float(before.max()):.3g} and {float(mass.min()):.3g}"
    elif len(count) and float(behind.max()) < float(least.min()):
        found = f"min-p between {float(behind.max()):.3g} and {float(least.min()):.3g}"
    mean = float(mass.mean()) if len(mass) else 1.0
    text = (
        f"{name} are renormalised over {found} in {share}: the ratio has a factor of {mean:.3g} on "
        "average"
    )
    trained = all("old" not in row.tokens for row in rows)
    named = trained and column == "sampling" and evidence.sampling.truncates
    verdict: Verdict = "unknown" if named else "fault"
    figures = {"kept": found, "mass": mean}
    return Answer("ratio", verdict, text, figures, [row.place for row in rows])


def _mean_ratio(rows: Iterable[Row], masks: Iterable[Tensor]) -> list[Answer]:
    """Test the mean of the ratio, which is 1 where nothing was cut off, whatever the weights."""
    means, spread, above, below = [], [], 0.0, 0.0
    for row, mask in zip(rows, masks, strict=True):
        if "old" not in row.tokens or "sampling" not in row.tokens:
            continue
        gap = (row.tokens["old"] - row.tokens["sampling"])[mask]
        gap = gap[gap.isfinite()]
        if len(gap):
            means.append(float(gap.exp().mean()))
            spread.append(float(gap.square().mean().sqrt()))
            excess = gap.exp() - 1
            above, below = (
                above + float(excess.clamp(min=0).sum()),
                below - float(excess.clamp(max=0).sum()),
            )
    if len(means) < 2:
        return []
    interval = mean_interval(means, confidence=1 - _LEVEL)
    size = float(np.mean(spread))
    figures = {"mean_ratio": interval.mean, "low": interval.low, "high": interval.high, "rms": size}
    # a ratio of other weights goes up as far as down, though seldom; of fewer tokens only down
    if interval.high < 1 and above < below / 10:
        text = (
            f"the ratio of trainer to engine is {interval.mean:.3f} on average ({interval.low:.3f} "
            f"to {interval.high:.3f}) and not 1: the engine renormalised over fewer tokens"
        )
        return [Answer("ratio", "fault", text, figures)]
    text = (
        f"trainer and engine are {size:.2g} nats apart, and their ratio is {interval.mean:.4f} on "
        "average"
    )
    return [Answer("ratio", "sound", text, figures)]
