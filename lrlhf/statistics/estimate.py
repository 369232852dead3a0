"""What every comparison returns."""

from __future__ import annotations

from typing import NamedTuple


class Estimate(NamedTuple):
    """A mean with its confidence interval, and the test of whether it is zero."""

    value: float
    low: float
    """Minus infinity where there are too few values for any interval."""
    high: float
    p_value: float
    """Two-sided; at most 0.05 exactly where a 95 % interval leaves zero out."""
