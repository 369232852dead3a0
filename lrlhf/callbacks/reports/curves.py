"""Pictures of a run: a panel for each metric, and what rows show side by side."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from lrlhf.callbacks.output_files import atomic_write
from lrlhf.media import Audio
from lrlhf.types import Media

_COLOURS = ("#2a6fbb", "#c8500a", "#3a8a4d", "#8a4fa3", "#7a6a1f")
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


def draw_panels(
    path: Path,
    runs: Mapping[str, Sequence[Curve]],
    *,
    targets: Mapping[str, float] | None = None,
) -> None:
    """Write a PNG with one panel per metric, the curves of all runs in each.

    A curve of 40 values or more is drawn as the mean of a twentieth of them, each value and those
    before it, with the values themselves behind it.

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
    # half a second of import that only the end of a run needs
    try:
        figure_type = importlib.import_module("matplotlib.figure").Figure
    except ImportError as error:
        raise ImportError(
            "drawing curves needs the package matplotlib: pip install 'lrlhf[plots]'"
        ) from error
    figure = figure_type(figsize=(4.2 * columns, 2.8 * rows), dpi=130, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    for axes, (name, series) in zip(grid.flat, shown.items(), strict=False):
        for number, run, curve in series:
            _draw(axes, curve, run, _COLOURS[number % len(_COLOURS)])
        _finish(axes, name, (targets or {}).get(name))
    if len(runs) > 1:
        handles, labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=len(runs), frameon=False)
    _save(path, figure)


def _draw(axes: Any, curve: Curve, run: str, colour: str) -> None:
    _, steps, values = curve
    if (window := len(values) // 20) > 1:
        axes.plot(steps, values, color=colour, alpha=0.3, linewidth=1)
        steps = steps[window - 1 :]
        values = np.convolve(values, np.full(window, 1 / window), "valid").tolist()
    marker = "o" if len(steps) < 15 else None
    axes.plot(steps, values, color=colour, linewidth=1.6, marker=marker, markersize=3.5, label=run)


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


def _finish(axes: Any, title: str, target: float | None) -> None:
    if target is not None:
        _draw_target(axes, target)
    axes.set_title(title, loc="left", fontsize=10)
    axes.tick_params(labelsize=8)
    # one tick is enough where one step has a value
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.ticklabel_format(useOffset=False)
    axes.grid(axis="y", color="#e3e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.03, y=0.12)
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
