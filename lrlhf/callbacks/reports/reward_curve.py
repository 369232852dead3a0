"""One picture of a run: what the policy earned, step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lrlhf.callbacks.reports.plots import finish, new_figure, save

_LINE, _POINT = "#2a6fbb", "#c8500a"


class Curve(NamedTuple):
    """Values of one metric; steps ascend."""

    name: str
    steps: list[int]
    values: list[float]

    def finite(self) -> Curve:
        """Return the curve without steps whose value is NaN or infinite."""
        pairs = zip(self.steps, self.values, strict=True)
        kept = {step: value for step, value in pairs if math.isfinite(value)}
        return Curve(self.name, list(kept), list(kept.values()))


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to ``window - 1`` before it: what was known at that step."""
    seen = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [sum(part) / len(part) for part in seen]


def draw_curve(path: Path, metric: Curve, evaluation: Curve) -> None:
    """Write a PNG of a metric, its moving average, and the evaluations on the same axis.

    Args:
        path: Where to; the folder is created.
        metric: One value per training step.
        evaluation: One value per evaluation, possibly none.

    Raises:
        ImportError: matplotlib is not installed.
    """
    metric, evaluation = metric.finite(), evaluation.finite()
    figure = new_figure(8, 4.5, dpi=150)
    axes = figure.add_subplot()
    _draw_metric(axes, metric)
    _draw_evaluation(axes, evaluation)
    axes.set_xlabel("step")
    finish(axes, _title(metric, evaluation), fontsize=11, x_margin=0.05)
    axes.legend(frameon=False, fontsize=9, loc="best")
    save(path, figure)


def _draw_metric(axes: Any, metric: Curve) -> None:
    window, draw = max(1, len(metric.values) // 20), partial(axes.plot, color=_LINE)
    if window == 1:
        # too few for a mean, and one alone is no line
        draw(metric.steps, metric.values, linewidth=2, marker=".", label=metric.name)
        return
    each = f"{metric.name}, each step"
    draw(metric.steps, metric.values, alpha=0.3, linewidth=1, label=each)
    means = moving_average(metric.values, window)[window - 1 :]
    draw(metric.steps[window - 1 :], means, linewidth=2.2, label=f"mean of {window} steps")


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
            bbox={"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.8},
        )


def _title(metric: Curve, evaluation: Curve) -> str:
    if len(evaluation.values) >= 2:
        return (
            f"{evaluation.name}  {evaluation.values[0]:.3g} → {evaluation.values[-1]:.3g}  "
            f"from step {evaluation.steps[0]} to {evaluation.steps[-1]}"
        )
    return f"{metric.name}, steps {metric.steps[0]} to {metric.steps[-1]}"
