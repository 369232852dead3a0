"""Many metrics of one run, or of several, in one picture."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lrlhf.callbacks.output_files import atomic_write
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
    """
    names = list(dict.fromkeys(curve.name for curves in runs.values() for curve in curves))
    finite = [(run, curve.finite()) for run, curves in runs.items() for curve in curves]
    drawable = [(run, curve) for run, curve in finite if curve.steps]
    panels = {name: [pair for pair in drawable if pair[1].name == name] for name in names}
    shown = {name: pairs for name, pairs in panels.items() if pairs}
    if not shown:
        raise ValueError(f"no run has a value of {', '.join(names) or 'any metric'} to draw")
    columns = min(3, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure_class = importlib.import_module("matplotlib.figure").Figure
    figure = figure_class(figsize=(4.2 * columns, 2.8 * rows), dpi=130, layout="constrained")
    colours = dict(zip(runs, _COLOURS * math.ceil(len(runs) / len(_COLOURS)), strict=False))
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    for axes, (name, pairs) in zip(grid.flat, shown.items(), strict=False):
        _draw(axes, name, pairs, colours, (targets or {}).get(name))
    if len(runs) > 1:
        handles, labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=len(runs), frameon=False)
    with atomic_write(path) as handle:
        figure.savefig(handle, format="png")


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
    axes.set_title(name, loc="left", fontsize=10)
    axes.tick_params(labelsize=8)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", color="#e3e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.03, y=0.12)
