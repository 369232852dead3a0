"""Many metrics of one run, or of several, in one picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lrlhf.callbacks.reports.plots import finish, new_figure, save
from lrlhf.callbacks.reports.reward_curve import Curve

_COLOURS = ("#2a6fbb", "#c8500a", "#3a8a4d", "#8a4fa3", "#7a6a1f")


def draw_panels(
    path: Path,
    runs: Mapping[str, Sequence[Curve]],
    *,
    targets: Mapping[str, float] | None = None,
) -> None:
    """Write a PNG with one panel per metric, the curves of all runs in each.

    Args:
        path: Where to; the folder is created.
        runs: Curves by the name of their run; panels are in the order of the first run's.
        targets: Values to hold, by metric; drawn as a dashed line.

    Raises:
        ValueError: No run has a value of any metric.
        ImportError: matplotlib is not installed.
    """
    panels: dict[str, list[tuple[str, Curve]]] = {}
    for run, curves in runs.items():
        for curve in curves:
            finite = curve.finite()
            panels.setdefault(curve.name, []).extend([(run, finite)] if finite.steps else [])
    shown = {name: pairs for name, pairs in panels.items() if pairs}
    if not shown:
        raise ValueError(f"no run has a value of {', '.join(panels) or 'any metric'} to draw")
    columns = min(3, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure = new_figure(4.2 * columns, 2.8 * rows, dpi=130)
    colours = dict(zip(runs, _COLOURS * math.ceil(len(runs) / len(_COLOURS)), strict=False))
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    for axes, (name, pairs) in zip(grid.flat, shown.items(), strict=False):
        _draw(axes, name, pairs, colours, (targets or {}).get(name))
    if len(runs) > 1:
        handles, labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=len(runs), frameon=False)
    save(path, figure)


def _draw(
    axes: Any,
    name: str,
    pairs: Sequence[tuple[str, Curve]],
    colours: Mapping[str, str],
    target: float | None,
) -> None:
    for run, curve in pairs:
        sparse = len(curve.steps) < 15
        axes.plot(
            curve.steps,
            curve.values,
            color=colours[run],
            linewidth=1.6,
            marker="o" if sparse else None,
            markersize=3.5,
            label=run,
        )
    if target is not None:
        axes.axhline(target, color="#555555", linestyle=(0, (4, 3)), linewidth=1.1)
        axes.annotate(
            f"target {target:g}",
            (0.98, target),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
            color="#555555",
        )
    axes.tick_params(labelsize=8)
    finish(axes, name, fontsize=10, x_margin=0.03)
