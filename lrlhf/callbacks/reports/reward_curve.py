"""One picture of a run: what the policy earned, step by step."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lrlhf.callbacks.output_files import atomic_write

_LINE, _POINT = "#2a6fbb", "#c8500a"


class Curve(NamedTuple):
    """Values of one metric; steps ascend."""

    name: str
    steps: list[int]
    values: list[float]

    def finite(self) -> Curve:
        """Return the curve without steps whose value is NaN or infinite."""
        kept = [
            (step, value)
            for step, value in zip(self.steps, self.values, strict=True)
            if math.isfinite(value)
        ]
        return Curve(self.name, [step for step, _ in kept], [value for _, value in kept])


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to ``window - 1`` before it: what was known at that step."""
    averages = []
    for end in range(1, len(values) + 1):
        seen = values[max(0, end - window) : end]
        averages.append(sum(seen) / len(seen))
    return averages


def draw_curve(path: Path, metric: Curve, evaluation: Curve) -> None:
    """Write a PNG of a metric, its moving average, and the evaluations on the same axis.

    Args:
        path: Where to; the folder is created.
        metric: One value per training step.
        evaluation: One value per evaluation, possibly none.
    """
    metric, evaluation = metric.finite(), evaluation.finite()
    # half a second of import that only the end of a run needs
    figure_class = importlib.import_module("matplotlib.figure").Figure
    figure = figure_class(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    _draw_metric(axes, metric)
    _draw_evaluation(axes, evaluation)
    axes.set_xlabel("step")
    axes.set_title(_title(metric, evaluation), loc="left", fontsize=11)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", color="#e3e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.05, y=0.12)
    axes.legend(frameon=False, fontsize=9, loc="best")
    with atomic_write(path) as handle:
        figure.savefig(handle, format="png")


def _draw_metric(axes: Any, metric: Curve) -> None:
    window = max(1, len(metric.values) // 20)
    if window == 1:
        # too few for a mean, and one alone is no line
        axes.plot(
            metric.steps, metric.values, color=_LINE, linewidth=2, marker=".", label=metric.name
        )
        return
    axes.plot(
        metric.steps,
        metric.values,
        color=_LINE,
        alpha=0.3,
        linewidth=1,
        label=f"{metric.name}, each step",
    )
    axes.plot(
        metric.steps[window - 1 :],
        moving_average(metric.values, window)[window - 1 :],
        color=_LINE,
        linewidth=2.2,
        label=f"mean of {window} steps",
    )


def _draw_evaluation(axes: Any, evaluation: Curve) -> None:
    if not evaluation.steps:
        return
    axes.plot(
        evaluation.steps,
        evaluation.values,
        color=_POINT,
        linestyle=(0, (4, 3)),
        linewidth=1.2,
        marker="o",
        markersize=6,
        label=evaluation.name,
    )
    for index in sorted({0, len(evaluation.steps) - 1}):
        axes.annotate(
            f"{evaluation.values[index]:.3g}",
            (evaluation.steps[index], evaluation.values[index]),
            xytext=(0, 9),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=_POINT,
            fontweight="bold",
            # the number stays readable where the curve runs behind it
            bbox={
                "boxstyle": "round,pad=0.15",
                "facecolor": "white",
                "edgecolor": "none",
                "alpha": 0.8,
            },
        )


def _title(metric: Curve, evaluation: Curve) -> str:
    if len(evaluation.values) >= 2:
        return (
            f"{evaluation.name}  {evaluation.values[0]:.3g} → {evaluation.values[-1]:.3g}  "
            f"from step {evaluation.steps[0]} to {evaluation.steps[-1]}"
        )
    return f"{metric.name}, steps {metric.steps[0]} to {metric.steps[-1]}"
