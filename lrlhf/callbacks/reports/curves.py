"""Pictures of a run: what the policy earned step by step, and a panel for each further metric."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from lrlhf.callbacks.output_files import atomic_write
from lrlhf.media import Audio
from lrlhf.types import Media

_LINE, _POINT = "#2a6fbb", "#c8500a"
_COLOURS = (_LINE, _POINT, "#3a8a4d", "#8a4fa3", "#7a6a1f")
_DASHED = (0, (4, 3))
_BEHIND_TEXT = {"boxstyle": "round,pad=0.15", "fc": "white", "ec": "none", "alpha": 0.8}
"""Keeps text readable where a curve runs behind it."""
_ROUNDING = 1e-6
"""Of a float32, relative to its value."""


class Curve(NamedTuple):
    """Values of one metric; steps ascend."""

    name: str
    steps: list[int]
    values: list[float]

    def record(self, step: int, value: float) -> None:
        """Add a value, or replace that of the same step."""
        if self.steps and self.steps[-1] == step:
            self.values[-1] = value
        else:
            self.steps.append(step)
            self.values.append(value)

    def finite(self) -> Curve:
        """Return the curve without steps whose value is NaN or infinite."""
        pairs = zip(self.steps, self.values, strict=True)
        points = {step: value for step, value in pairs if math.isfinite(value)}
        return Curve(self.name, list(points), list(points.values()))


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
    figure = _new_figure(8, 4.5, dpi=150)
    axes = figure.add_subplot()
    _draw_metric(axes, metric)
    title = f"{metric.name}, steps {metric.steps[0]} to {metric.steps[-1]}"
    if evaluation.steps:
        _draw_evaluation(axes, evaluation)
    if len(evaluation.steps) > 1:
        title = (
            f"{evaluation.name}  {evaluation.values[0]:.3g} → {evaluation.values[-1]:.3g}  "
            f"from step {evaluation.steps[0]} to {evaluation.steps[-1]}"
        )
    axes.set_xlabel("step")
    _finish(axes, title, fontsize=11, x_margin=0.05)
    axes.legend(frameon=False, fontsize=9, loc="best")
    _save(path, figure)


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
    shown: dict[str, list[tuple[int, str, Curve]]] = {}
    for number, (run, curves) in enumerate(runs.items()):
        for curve in curves:
            if (finite := curve.finite()).steps:
                shown.setdefault(curve.name, []).append((number, run, finite))
    if not shown:
        raise ValueError("no run has a value of any metric to draw")
    columns = min(3, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure = _new_figure(4.2 * columns, 2.8 * rows, dpi=130)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    for axes, (name, series) in zip(grid.flat, shown.items(), strict=False):
        for number, run, curve in series:
            colour = _COLOURS[number % len(_COLOURS)]
            marker = "o" if len(curve.steps) < 15 else None
            draw = partial(axes.plot, color=colour, linewidth=1.6, marker=marker, markersize=3.5)
            draw(curve.steps, curve.values, label=run)
        if targets and name in targets:
            _draw_target(axes, targets[name])
        axes.tick_params(labelsize=8)
        _finish(axes, name, fontsize=10, x_margin=0.03)
    if len(runs) > 1:
        handles, labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=len(runs), frameon=False)
    _save(path, figure)


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
    draw = partial(axes.plot, color=_POINT, linestyle=_DASHED, linewidth=1.2, marker="o")
    draw(evaluation.steps, evaluation.values, markersize=6, label=evaluation.name)
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
            bbox=_BEHIND_TEXT,
        )


def _draw_target(axes: Any, target: float) -> None:
    axes.axhline(target, color="#555555", linestyle=_DASHED, linewidth=1.1)
    axes.annotate(
        f"target {target:g}",
        (0.98, target),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color="#555555",
        bbox=_BEHIND_TEXT,
        zorder=4,  # above the curves, as the text would not be by itself
    )


def _new_figure(width: float, height: float, *, dpi: int) -> Any:
    """Return a figure that needs no display."""
    # half a second of import that only the end of a run needs
    try:
        figure = importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ImportError(
            "drawing curves needs the package matplotlib: pip install 'lrlhf[plots]'"
        ) from error
    return figure(figsize=(width, height), dpi=dpi, layout="constrained")


def _finish(axes: Any, title: str, *, fontsize: int, x_margin: float) -> None:
    axes.set_title(title, loc="left", fontsize=fontsize)
    # one tick is enough where one step has a value
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.ticklabel_format(useOffset=False)
    axes.grid(axis="y", color="#e3e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=x_margin, y=0.12)
    low, high = axes.dataLim.intervaly
    if high - low < _ROUNDING * abs(high):
        # values that only rounding tells apart are one value
        axes.set_ylim(low - abs(low) / 20, high + abs(high) / 20)


def _save(path: Path, figure: Any) -> None:
    with atomic_write(path) as handle:
        figure.savefig(handle, format="png")


_GAP = 4
"""Pixels between two pictures."""
_WAVEFORM = (256, 128)


def picture(media: Media) -> Image.Image:
    """Return the first image, the first frame of a video, or the waveform of an audio."""
    return _pictures(media)[0]


def strip(media: Media, *, side: int = 256) -> Image.Image | None:
    """Put all images, the first frame of each video, and waveforms of audio side by side.

    None: there are none, as those of a stored rollout, which has only what a model reads of them.

    Args:
        media: Of one row.
        side: Pixels of the square that each is fitted into.
    """
    shown = [ImageOps.pad(each.convert("RGB"), (side, side)) for each in _pictures(media)]
    if not shown:
        return None
    page = Image.new("RGB", ((side + _GAP) * len(shown) - _GAP, side), "white")
    for number, one in enumerate(shown):
        page.paste(one, (number * (side + _GAP), 0))
    return page


def stack(strips: list[Image.Image]) -> Image.Image:
    """Put pictures below each other."""
    size = max(item.width for item in strips), sum(one.height + _GAP for one in strips) - _GAP
    page, top = Image.new("RGB", size, "white"), 0
    for each in strips:
        page.paste(each, (0, top))
        top += each.height + _GAP
    return page


def _pictures(media: Media) -> list[Image.Image]:
    frames = (Image.fromarray(video.frames[0]) for video in media.videos)
    return [*media.images, *frames, *map(_waveform, media.audios)]


def _waveform(audio: Audio) -> Image.Image:
    """Draw the loudest samples of each stretch of a sound, the whole of it across the width."""
    middle, loudest = (_WAVEFORM[1] - 1) / 2, max(np.abs(audio.samples).max(), 1e-9)
    drawn = Image.new("RGB", _WAVEFORM, "white")
    pen = ImageDraw.Draw(drawn)
    for column, part in enumerate(np.array_split(audio.samples, _WAVEFORM[0])):
        top, bottom = part.max() / loudest, part.min() / loudest
        pen.line([(column, (1 - top) * middle), (column, (1 - bottom) * middle)], "black")
    return drawn
