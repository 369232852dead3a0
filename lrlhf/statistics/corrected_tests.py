"""Several tests at once."""

from __future__ import annotations

from collections.abc import Sequence


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values that take into account how many tests there are.

    The i-th smallest of n is multiplied by n - i + 1, and is no less than one before it. Rejecting
    where the result is at most 0.05 errs anywhere in at most 5 % of families, whatever depends on
    whatever.

    Args:
        p_values: Of one family of tests.

    Reference:
        Holm 1979, https://www.jstor.org/stable/4615733
    """
    adjusted = [0.0] * len(p_values)
    so_far = 0.0
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    for rank, index in enumerate(order):
        so_far = max(so_far, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = so_far
    return adjusted
