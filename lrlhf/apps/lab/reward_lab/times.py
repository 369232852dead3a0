"""What the calls of reward functions took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from lrlhf.apps.lab.reward_lab.lab import CallTimes, Lab, OddRow
from lrlhf.apps.lab.reward_lab.responses import Response
from lrlhf.apps.lab.reward_lab.scoring import ScoredResponses, Timing

_SLOWEST = 20


def with_times(lab: Lab, scored: ScoredResponses) -> Lab:
    """Return the lab with the times and failures of its calls."""
    by_part: dict[str, list[Timing]] = defaultdict(list)
    for timing in scored.timings:
        by_part[timing.part].append(timing)
    first: Mapping[str, Response] = {one.place: one for one in reversed(scored.responses)}
    slowest = sorted(scored.timings, key=lambda one: -one.seconds / one.responses)[:_SLOWEST]
    return replace(
        lab,
        times=[_times(name, timings) for name, timings in by_part.items()],
        slowest=[
            OddRow(
                first[one.place],
                one.seconds / one.responses,
                f"{one.part}: {one.seconds:.3g} s for {one.responses} responses",
            )
            for one in slowest
        ],
        failures=scored.failures,
    )


def _times(name: str, timings: Sequence[Timing]) -> CallTimes:
    seconds = np.array([one.seconds for one in timings])
    each = seconds / np.array([one.responses for one in timings])
    middle, late = (0.5, 0.99)
    return CallTimes(
        name,
        len(timings),
        float(np.quantile(seconds, middle)),
        float(np.quantile(seconds, late)),
        float(np.quantile(each, middle)),
        float(np.quantile(each, late)),
    )
