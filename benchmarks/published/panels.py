"""Panels of the picture, one for each study."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.published.verdicts import Measures
from lrlhf.statistics import mean_interval

Runs = Mapping[str, Sequence[Measures]]


def values(measure: str, label: str) -> Callable[[Any, Runs], None]:
    """Return what draws a measure of each variant: its seeds, their mean and its interval."""

    def draw(panel: Any, runs: Runs) -> None:
        for place, seeds in enumerate(runs.values()):
            own = [one[measure] for one in seeds]
            panel.plot([place - 0.12] * len(own), own, "o", color="0.6", markersize=3)
            _point(panel, place, own, "C0")
        panel.set_xticks(range(len(runs)), [name.replace(", ", "\n") for name in runs])
        panel.set(ylabel=label, xlim=(-0.5, len(runs) - 0.5))

    return draw


def rates(measure: str, label: str) -> Callable[[Any, Runs], None]:
    """Return what draws a measure against the learning rate, from variants ``name, rate``."""

    def draw(panel: Any, runs: Runs) -> None:
        names = [*dict.fromkeys(name.split(", ")[0] for name in runs)]
        for colour, name in zip(("C0", "C1"), names, strict=True):
            chosen = {one: seeds for one, seeds in runs.items() if one.split(", ")[0] == name}
            places = [float(one.split(", ")[1]) for one in chosen]
            own = [[one[measure] for one in seeds] for seeds in chosen.values()]
            panel.plot(places, [mean_interval(one).mean for one in own], colour, label=name)
            for place, seeds in zip(places, own, strict=True):
                _point(panel, place, seeds, colour)
        panel.set(xscale="log", xlabel="learning rate", ylabel=label)
        panel.legend()

    return draw


def lengths(panel: Any, runs: Runs) -> None:
    """Draw lengths of right and wrong responses over the iterations."""
    for colour, (name, seeds) in zip(("C1", "C0"), runs.items(), strict=True):
        for kind, line in (("wrong", "-"), ("right", ":")):
            fifths = [*zip(*(one[kind] for one in seeds), strict=True)]
            means = [mean_interval(own).mean for own in fifths]
            panel.plot(range(1, len(means) + 1), means, line, color=colour, label=f"{name}, {kind}")
            if kind == "wrong":
                for place, own in enumerate(fifths, 1):
                    _point(panel, place, own, colour)
    panel.set(xlabel="fifth of the iterations", ylabel="tokens of a response")
    panel.set_xticks(range(1, 6))
    panel.legend(fontsize=7)


def score_distributions(names: Sequence[str]) -> Callable[[Any, Runs], None]:
    """Return what draws 5, 25, 50, 75 and 95 % of chosen and rejected held-out scores."""

    def draw(panel: Any, runs: Runs) -> None:
        for place, name in enumerate(names):
            for shift, kind, colour in ((-0.15, "chosen", "C0"), (0.15, "rejected", "C1")):
                rows = [one[kind] for one in runs[name]]
                low, first, median, third, high = (
                    sum(column) / len(rows) for column in zip(*rows, strict=True)
                )
                at = place + shift
                panel.plot([at, at], [low, high], colour, linewidth=1)
                panel.plot([at, at], [first, third], colour, linewidth=6, alpha=0.6)
                panel.plot([at], [median], "k_", markersize=9)
                if place == 0:
                    panel.plot([], [], colour, linewidth=6, alpha=0.6, label=kind)
        labels = [name.split(", ")[0].replace("_", "\n") for name in names]
        panel.set_xticks(range(len(names)), labels)
        panel.set(ylabel="held-out score, 5 to 95 %", ylim=(0, 1))
        panel.legend()

    return draw


def _point(panel: Any, place: float, own: Sequence[float], colour: str) -> None:
    mean, low, high, _ = mean_interval(own)
    reach = [[mean - low], [high - mean]] if low <= high else None
    panel.errorbar([place], [mean], yerr=reach, color=colour, fmt="o", markersize=5, capsize=4)
