"""Tables and a plot of the runs of both systems."""

from __future__ import annotations

import importlib
import math
import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from trl_measure import Run

from lrlhf.statistics.intervals import wilson_interval

SYSTEMS = ("lrlhf", "trl")
TITLES = {"lrlhf": "lrlhf", "trl": "TRL"}
DRAWING = ("generation", "weight sync")
NOT_TRAINING = (*DRAWING, "scoring")
"""Phases that come before the scored responses are there."""
TRAINING = "scored responses to moved weights"
MEMORY = {
    "loaded": "memory with the policy loaded",
    "peak": "peak memory of training",
    "training": "peak above the loaded policy",
    "gpu_peak": "peak GPU memory of training",
    "gpu_training": "peak GPU memory above the loaded policy",
}


class Tolerance(NamedTuple):
    """How far two systems that do the same work may be apart."""

    logged: float
    """Of what is logged in each step, relative."""
    near_zero: float
    """Of the same, absolute."""
    weights: float
    """See `trl_measure.weight_gap`."""


TOLERANCES = {
    "float32": Tolerance(logged=2e-4, near_zero=2e-6, weights=0.02),
    "bfloat16": Tolerance(logged=0.05, near_zero=0.01, weights=0.5),
}
"""Rounding alone: other orders of the same sums, and AdamW's first steps, in which a weight whose
gradient is nearly 0 goes one way or the other."""


@dataclass
class Comparison:
    """The runs of one setting.

    Attributes:
        runs: By system, in the order of the repeats.
        weights_apart: See `trl_measure.weight_gap`; None where the responses were not the same.
        rows: Responses or pairs of one step.
        given: The responses were given, so that drawing them is no part of a step.
    """

    runs: dict[str, list[Run]]
    weights_apart: float | None
    rows: int
    given: bool = False

    def differences(self, tolerance: Tolerance) -> list[str]:
        """Describe where the two did not do the same work: nothing, if ratios mean something.

        Losses near 0, as of a policy gradient at its first step, are measured by the rounding of
        what they are sums of, which is about 1.
        """
        found = []
        for repeat, pair in enumerate(zip(*(self.runs[name] for name in SYSTEMS), strict=True)):
            ours, theirs = (run.steps for run in pair)
            if len(ours) != len(theirs):
                found.append(f"round {repeat + 1}: {len(ours)} steps beside {len(theirs)}")
            if self.weights_apart is None:  # responses were drawn, and differ
                continue
            for step, logged in enumerate(zip(ours, theirs, strict=False), start=1):
                found += [
                    f"round {repeat + 1}, step {step}: {name} {logged[0][name]:.6g} beside "
                    f"{logged[1][name]:.6g}"
                    for name in logged[0]
                    if not math.isclose(
                        logged[0][name],
                        logged[1][name],
                        rel_tol=tolerance.logged,
                        abs_tol=tolerance.near_zero,
                    )
                ]
        if self.weights_apart is not None and not self.weights_apart <= tolerance.weights:
            found.append(
                f"weights are apart by {self.weights_apart:.2g} of the way that they moved, more "
                f"than {tolerance.weights:g}"
            )
        return found

    def whole(self, run: Run) -> list[float]:
        """Return the seconds of every step."""
        if not self.given:
            return run.seconds
        drawing = (sum(phases.get(name, 0.0) for name in DRAWING) for phases in run.phases)
        return [whole - part for whole, part in zip(run.seconds, drawing, strict=True)]

    def middle(self, system: str, measure: Callable[[Run], list[float]]) -> list[float]:
        """Return the median of each repeat."""
        return [statistics.median(measure(run)) for run in self.runs[system]]


def training_seconds(run: Run) -> list[float]:
    """Return the seconds from scored responses to moved weights, of every step."""
    return [
        sum(value for name, value in phases.items() if name not in NOT_TRAINING)
        for phases in run.phases
    ]


def tables(comparison: Comparison, phases: Sequence[str], unit: str) -> str:
    """Write what was measured, and what both systems logged.

    Args:
        comparison: The runs.
        phases: Names of the parts of a step, in the order of the table.
        unit: What a step is made of, ``responses`` or ``pairs``.
    """
    parts = [speed_table(comparison, phases, unit), agreement_table(comparison)]
    accuracies = accuracy_table(comparison)
    return "\n".join([*parts, accuracies] if accuracies else parts)


def speed_table(comparison: Comparison, phases: Sequence[str], unit: str) -> str:
    """Write medians over repeats of the medians over steps, and ratios."""
    lines = ["| | lrlhf | TRL | TRL / lrlhf | of single repeats |", "|---|---:|---:|---:|---:|"]
    left_out = DRAWING if comparison.given else ()
    shown = [name for name in phases if name not in left_out]
    lines += [_line(comparison, f"{name}, s", partial(_phase, name)) for name in shown]
    if "scoring" in phases:
        lines.append(_line(comparison, f"{TRAINING}, s", training_seconds))
    lines.append(_line(comparison, "whole step, s", comparison.whole))
    rows = partial(_per_second, comparison, lambda run: [comparison.rows] * len(run.seconds))
    lines.append(_line(comparison, f"{unit} per second", rows, digits=1))
    tokens = partial(_per_second, comparison, lambda run: run.tokens)
    lines.append(_line(comparison, "tokens per second", tokens, digits=1))
    lines += [
        _line(comparison, f"{title}, MiB", partial(_memory, key), digits=0)
        for key, title in MEMORY.items()
        if key in comparison.runs["lrlhf"][0].memory
    ]
    return "\n".join(lines) + "\n"


def _per_second(comparison: Comparison, count: Callable[[Run], list[int]], run: Run) -> list[float]:
    whole = comparison.whole(run)
    return [number / seconds for number, seconds in zip(count(run), whole, strict=True)]


def _memory(key: str, run: Run) -> list[float]:
    return [run.memory[key]]


def _phase(name: str, run: Run) -> list[float]:
    return [phases.get(name, 0.0) for phases in run.phases]


def _line(
    comparison: Comparison,
    title: str,
    measure: Callable[[Run], list[float]],
    digits: int = 3,
) -> str:
    ours, theirs = (comparison.middle(system, measure) for system in SYSTEMS)
    cells = [f"{statistics.median(values):.{digits}f}" for values in (ours, theirs)]
    ratio = spread = "–"
    if min(ours) > 0:
        single = [other / own for own, other in zip(ours, theirs, strict=True)]
        ratio = f"{statistics.median(theirs) / statistics.median(ours):.2f}"
        spread = f"{min(single):.2f} to {max(single):.2f}"
    return f"| {title} | {cells[0]} | {cells[1]} | {ratio} | {spread} |"


def agreement_table(comparison: Comparison, most: int = 6) -> str:
    """Write what both systems logged of the first steps of their first runs, side by side."""
    ours, theirs = (comparison.runs[system][0].steps for system in SYSTEMS)
    names = list(ours[0])
    heads = [f"{name}, {TITLES[system]}" for name in names for system in SYSTEMS]
    lines = [f"| step | {' | '.join(heads)} |", f"|---:|{'---:|' * len(heads)}"]
    # where one has fewer steps, the report says so
    for step, pair in enumerate(zip(ours[:most], theirs[:most], strict=False), start=1):
        cells = [f"{logged[name]:.6g}" for name in names for logged in pair]
        lines.append(f"| {step} | {' | '.join(cells)} |")
    if comparison.weights_apart is not None:
        steps = len(ours)
        lines += [
            "",
            f"After {steps} optimizer steps the two sets of weights are apart by "
            f"{comparison.weights_apart:.2g} of the way that training has moved them.",
        ]
    return "\n".join(lines) + "\n"


def accuracy_table(comparison: Comparison) -> str:
    """Write the held-out accuracy, where there is one."""
    lines = ["| system | held-out accuracy | 95 % interval |", "|---|---:|---:|"]
    for system in SYSTEMS:
        run = comparison.runs[system][0]
        if run.accuracy is None:
            return ""
        low, high = wilson_interval(run.accuracy * run.pairs, run.pairs)
        lines.append(f"| {TITLES[system]} | {run.accuracy:.4f} | {low:.4f} to {high:.4f} |")
    return "\n".join(lines) + "\n"


def sweep_table(name: str, comparisons: dict[str, Comparison], *, has_phases: bool) -> str:
    """Write one line per value of what was swept."""
    measures = _measures(next(iter(comparisons.values())), has_phases=has_phases)
    heads = [f"{title}, {what}" for title, _ in measures for what in ("lrlhf", "TRL", "ratio")]
    heads += [f"peak above the model, MiB, {TITLES[system]}" for system in SYSTEMS]
    lines = [f"| {name} | {' | '.join(heads)} |", f"|---:|{'---:|' * len(heads)}"]
    for value, comparison in comparisons.items():
        cells = []
        for _, measure in _measures(comparison, has_phases=has_phases):
            ours, theirs = _medians(comparison, measure)
            cells += [f"{ours:.3f}", f"{theirs:.3f}", f"{theirs / ours:.2f}"]
        peaks = _medians(comparison, lambda run: [run.memory["training"]])
        cells += [f"{peak:.0f}" for peak in peaks]
        lines.append(f"| {value} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _measures(
    comparison: Comparison, *, has_phases: bool
) -> list[tuple[str, Callable[[Run], list[float]]]]:
    found: list[tuple[str, Callable[[Run], list[float]]]] = []
    if has_phases:
        found.append((f"{TRAINING}, s", training_seconds))
    return [*found, ("whole step, s", comparison.whole)]


def _medians(comparison: Comparison, measure: Callable[[Run], list[float]]) -> tuple[float, float]:
    ours, theirs = (statistics.median(comparison.middle(system, measure)) for system in SYSTEMS)
    return ours, theirs


def plot(
    name: str, comparisons: dict[str, Comparison], path: Path, *, has_phases: bool, note: str
) -> None:
    """Draw seconds and their ratio over what was swept.

    Args:
        name: What was swept.
        comparisons: By its value.
        path: Of the PNG.
        has_phases: Whether generation is part of a step, and is left out of the picture.
        note: A line below the title that says what ran.
    """
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(9, 4), layout="constrained"
    )
    measures = {
        value: _measures(one, has_phases=has_phases)[0] for value, one in comparisons.items()
    }
    title = next(iter(measures.values()))[0].removesuffix(", s")
    seconds, ratios = figure.subplots(1, 2)
    places, numeric = _places(comparisons)
    for system, marker in zip(SYSTEMS, "os", strict=True):
        repeats = [one.middle(system, measures[v][1]) for v, one in comparisons.items()]
        _draw(seconds, places, repeats, label=TITLES[system], marker=marker)
    per_repeat = [
        [
            theirs / ours
            for ours, theirs in zip(*(one.middle(s, measures[v][1]) for s in SYSTEMS), strict=True)
        ]
        for v, one in comparisons.items()
    ]
    _draw(ratios, places, per_repeat, label="TRL / lrlhf", marker="D", color="black")
    seconds.set(title=title, ylabel="seconds, log scale", yscale="log")
    seconds.legend()
    _show_plain_numbers(seconds)
    most = max(max(values) for values in per_repeat)
    ratios.set(title="times as fast as TRL", ylabel="TRL / lrlhf", ylim=(0, 1.1 * max(1, most)))
    ratios.axhline(1, color="grey", linewidth=0.8, linestyle="--")
    for axes in (seconds, ratios):
        if numeric:
            axes.set_xscale("log", base=2)
        axes.set_xticks(places, list(comparisons))
        axes.xaxis.minorticks_off()
        axes.set_xlabel(name)
        axes.grid(alpha=0.3)
    figure.suptitle(textwrap.fill(note, 120), fontsize=9)
    figure.savefig(path, dpi=150)


def _show_plain_numbers(axes: Any) -> None:
    """Label a logarithmic axis at 1, 2 and 5, however short it is."""
    ticker = importlib.import_module("matplotlib.ticker")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())


def _places(comparisons: dict[str, Comparison]) -> tuple[list[float], bool]:
    numeric = all(value.isdigit() for value in comparisons)
    return [
        float(value) if numeric else float(index) for index, value in enumerate(comparisons)
    ], numeric


def _draw(
    axes: Any, places: Sequence[float], repeats: Sequence[Sequence[float]], **style: Any
) -> None:
    """Draw medians with bars from the smallest to the largest repeat."""
    middle = [statistics.median(values) for values in repeats]
    below = [m - min(values) for m, values in zip(middle, repeats, strict=True)]
    above = [max(values) - m for m, values in zip(middle, repeats, strict=True)]
    axes.errorbar(places, middle, yerr=[below, above], capsize=3, **style)
