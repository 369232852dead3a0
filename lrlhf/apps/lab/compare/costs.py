"""What runs have cost, as far as their files tell."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import NamedTuple

from lrlhf.apps.lab.run_files import RunFiles

_SECONDS = "_s"
_PEAK = "allocated_bytes.all.peak"
"""End of what DeviceStatsMonitor calls the most memory that a GPU's tensors took."""
_OWN_PEAK = "perf/memory_gib"
"""The same of the rank that took the most; without a GPU what the process had in memory."""
_GIB = 2**30


class Cost(NamedTuple):
    """Of one run; None: its files do not tell."""

    steps: int | None
    responses: int | None
    tokens: int | None
    """Of the responses."""
    seconds: dict[str, float]
    """By phase of an iteration: mean over the logged steps, times all steps."""
    peak_gib: float | None
    """The most memory that one process took: on its GPU, or without one in all."""

    @property
    def total_seconds(self) -> float | None:
        return math.fsum(self.seconds.values()) if self.seconds else None


def cost_of(folder: Path) -> Cost:
    """Read what a run has cost from ``metrics.csv``, ``timings.csv`` and ``rollouts.jsonl``.

    Raises:
        ValueError: A file is damaged; names it.
    """
    metrics, timings = (_columns(folder / name) for name in ("metrics.csv", "timings.csv"))
    steps = int(max(metrics["step"])) if metrics.get("step") else None
    columns = metrics | timings
    peaks = [max(own) / _GIB for name, own in columns.items() if name.endswith(_PEAK)]
    peaks += columns.get(_OWN_PEAK, [])
    lengths = [record.get("length") for record in RunFiles(folder).responses()]
    counted = [length for length in lengths if isinstance(length, int)]
    return Cost(
        steps=steps,
        responses=len(lengths) or None,
        tokens=sum(counted) if counted else None,
        seconds={
            name.removeprefix("perf/").removesuffix(_SECONDS): math.fsum(values)
            / len(values)
            * (steps or len(values))
            for name, values in columns.items()
            if _is_phase(name)
        },
        peak_gib=max(peaks, default=None),
    )


def _is_phase(name: str) -> bool:
    return name.startswith("perf/") and name.endswith(_SECONDS) and not name.endswith("_per_s")


def _columns(path: Path) -> dict[str, list[float]]:
    """Return the finite numbers of each column; of a file that is not there: nothing."""
    found: dict[str, list[float]] = {}
    if not path.exists():
        return found
    text = path.read_text(encoding="utf-8")
    # a run that goes on may be writing the last line
    whole = text[: text.rfind("\n") + 1]
    for row in csv.DictReader(io.StringIO(whole, newline="")):
        for name, cell in row.items():
            if not cell:
                continue
            try:
                value = float(cell)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}: {name} is '{cell}', which is no number") from error
            if math.isfinite(value):
                found.setdefault(name, []).append(value)
    return found
