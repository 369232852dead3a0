"""What a comparison says, in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lrlhf.apps.lab.compare.comparison import Power, Row, RunComparison
from lrlhf.statistics import Estimate
from lrlhf.statistics.intervals import unseen_share
from lrlhf.statistics.paired import fewest_prompts
from lrlhf.statistics.repeated_samples import plain_name

_LEVEL = 0.05
_FEW = 10
_NEUTRAL = ("length", "truncated", "turns")
"""Metrics of which more is neither better nor worse."""
_SUBJECTS = {"accuracy": "pairs", "margin": "pairs", "mean_logprob": "texts"}
"""What metrics are of, if not of prompts."""


def answer(comparison: RunComparison, a: str = "A", b: str = "B") -> str:
    """Say in one sentence which side is better, by how much, and of what this speaks."""
    row = comparison.main
    what = _SUBJECTS.get(row.metric.partition("/")[0], "prompts")
    return f"{_verdict(row, a, b)} on these {row.prompts:,} {what}; {scope(comparison, a, b)}."


def _verdict(row: Row, a: str, b: str) -> str:
    if not row.differing and row.difference.value == 0:
        return f"{a} and {b} have the same {row.metric}, one by one,"
    size = amount(abs(row.difference.value), row)
    up = row.difference.value > 0
    # of a loss it says whose difference it is: the size before it has no sign
    sentence = f"{'' if up else f'{b} − {a}: '}{_interval(row)}, {probability(row)}"
    if row.adjusted_p > _LEVEL:
        way = "above" if up else "below"
        return (
            f"No difference in {row.metric} is shown between {a} and {b}: {b} is {size} {way} {a} "
            f"({sentence})"
        )
    if plain_name(row.metric) in _NEUTRAL:
        return f"{b} has {'more' if up else 'less'} {row.metric} than {a} by {size} ({sentence})"
    how = "better" if up else "worse"
    return f"{b} is {how} than {a} in {row.metric} by {size} ({sentence})"


def _interval(row: Row) -> str:
    """Say the interval with the signs that the table has."""
    low, high = row.difference.low, row.difference.high
    if math.isinf(low):
        return "too few for a 95 % interval"
    scale = _scale(row)
    return f"95 % interval {plain(low * scale, row)} to {plain(high * scale, row)}"


def scope(comparison: RunComparison, a: str = "A", b: str = "B") -> str:
    """Say of what the main result speaks: of checkpoints, or of recipes."""
    first, second = comparison.seeds
    if first == second == 1:
        return "one seed each: this speaks of these two checkpoints, not of the recipes"
    if min(first, second) > 1:
        count = f"{first} seeds each" if first == second else f"{first} and {second} seeds"
        return f"{count}: this speaks of the recipes, as far as so few seeds tell"
    alone, several = (a, b) if first == 1 else (b, a)
    return (
        f"one seed of {alone}, {max(first, second)} of {several}: this speaks of the recipe of "
        f"{several} against this one checkpoint of {alone}"
    )


def notes(comparison: RunComparison, a: str = "A", b: str = "B") -> Iterator[str]:
    """Say what one should know before one believes the figures."""
    yield from _untrained_sentences(comparison, a, b)
    yield from _left_out(comparison)
    row, matched = comparison.main, comparison.matched
    if matched.by == "text":
        yield "Prompts were matched by their text."
    if max(matched.samples) > 1:
        yield (
            f"The samples of a prompt ({matched.samples[0]} and {matched.samples[1]}) are "
            "averaged, or judged together: they are no further prompts."
        )
    steps = [
        sorted({each.step for each in side.evaluations}) for side in (comparison.a, comparison.b)
    ]
    if steps[0] != steps[1]:
        first, second = (", ".join(map(str, step)) for step in steps)
        yield f"Evaluations after different steps: {a} step {first}, {b} step {second}."
    if comparison.seeds == (1, 1) and row.differing < min(_FEW, row.prompts):
        few = f"{b} and {a} differ on {row.differing} of {row.prompts:,} prompts only"
        share = 100 * unseen_share(row.prompts)
        unseen = f"they could still differ on up to {share:.2g} % of such prompts"
        yield f"{few}; {'the interval rests on these few' if row.differing else unseen}."
    if comparison.power is None:
        yield (
            "What such an evaluation could find is not known: that takes differences that vary, "
            f"and with one seed each at least {fewest_prompts()} prompts."
        )


def _untrained_sentences(comparison: RunComparison, a: str, b: str) -> Iterator[str]:
    for letter, side in ((a, comparison.a), (b, comparison.b)):
        steps = [each.step for each in side.evaluations]
        if not any(steps):
            yield f"{letter} is untrained: its evaluation was before the first step (step 0)."
        elif not all(steps):
            untrained = steps.count(0)
            yield (
                f"{untrained} of the {len(steps)} runs of {letter} "
                f"{'is' if untrained == 1 else 'are'} untrained (step 0)."
            )


def _left_out(comparison: RunComparison) -> Iterator[str]:
    for folder, count in comparison.matched.unmatched.items():
        if count:
            yield f"{count:,} of the prompts of {folder} are not in all runs, and were left out."
    for row in (comparison.main, *comparison.others):
        if row.left_out:
            yield f"{row.metric}: {row.left_out:,} prompts without a value in all runs left out."
    for name in comparison.empty:
        yield f"{name}: no prompt has a value in all runs."


def wins_and_losses(comparison: RunComparison, a: str = "A", b: str = "B") -> str:
    """Say how often B does better than A on the same prompt."""
    row = comparison.main
    sentence = (
        f"{b} against {a}, prompt by prompt: {row.wins.wins:.1%} wins, {row.wins.ties:.1%} ties, "
        f"{row.wins.losses:.1%} losses"
    )
    if row.wins.net == row.difference:  # right or wrong, once each
        return f"{sentence}."
    net = f"{row.wins.net.value * 100:+.1f} points".replace("-", "−")
    return f"{sentence}; wins less losses {net} ({_net(row.wins.net)})."


def _net(net: Estimate) -> str:
    if math.isinf(net.low):
        return "too few for an interval"
    return f"95 % interval {100 * net.low:.1f} to {100 * net.high:.1f}".replace("-", "−")


def power_sentence(comparison: RunComparison, seen: Power) -> str:
    """Say what this evaluation could see."""
    seeds = "" if max(comparison.seeds) == 1 else f" and {_seeds(comparison.seeds)}"
    return (
        f"With {comparison.main.prompts:,} prompts{seeds} a difference of "
        f"{amount(seen.detectable, comparison.main)} would be found in 80 % of evaluations."
    )


def needs(comparison: RunComparison, seen: Power) -> list[list[str]]:
    """Return headings and rows: how many prompts, or seeds, find a difference as often."""
    prompts, seeds = "prompts", "seeds each"
    if max(comparison.seeds) > 1:
        prompts += f" with {_seeds(comparison.seeds)}"
        seeds += f" with {comparison.main.prompts:,} prompts"
    several = min(comparison.seeds) > 1
    rows = [
        [amount(need.difference, comparison.main), _number(need.prompts)]
        + ([_number(need.seeds)] if several else [])
        for need in seen.needs
    ]
    return [["to find", prompts, *([seeds] if several else [])], *rows]


def _number(count: int | None) -> str:
    return "no number does" if count is None else f"{count:,}"


def _seeds(seeds: tuple[int, int]) -> str:
    return f"{seeds[0]} seeds each" if seeds[0] == seeds[1] else f"{seeds[0]} and {seeds[1]} seeds"


def probability(row: Row) -> str:
    """Say the p-value; of several comparisons also the corrected one."""
    p = row.difference.p_value
    sentence = f"p = {p:.2g}" if p >= 0.001 else "p < 0.001"
    if row.adjusted_p != p:
        sentence += f", {row.adjusted_p:.2g} after Holm's correction"
    return sentence


def amount(value: float, row: Row) -> str:
    """Write a difference with its unit: shares in points, hundredths."""
    return plain(value * _scale(row), row) + (" points" if row.binary else "")


def plain(value: float, row: Row) -> str:
    """Write a number as precisely as its unit asks for."""
    if math.isinf(value):
        return "−∞" if value < 0 else "∞"
    text = f"{value:.1f}" if row.binary else f"{value:.3g}"
    return text.replace("-", "−")


def _scale(row: Row) -> float:
    return 100.0 if row.binary else 1.0


def cells(row: Row) -> list[str]:
    """Return what a table shows of a row: A, B, difference, interval, p."""
    scale = _scale(row)
    first, second = (plain(mean * scale, row) for mean in row.means)
    if row.binary:
        first, second = f"{first} %", f"{second} %"
    sign = "+" if row.difference.value > 0 else ""
    low, high = (plain(end * scale, row) for end in (row.difference.low, row.difference.high))
    p = f"{row.adjusted_p:.3f}" if row.adjusted_p >= 0.001 else "<0.001"
    value = f"{sign}{plain(row.difference.value * scale, row)}"
    return [first, second, value, f"{low} to {high}", p]
