"""Student's t distribution with any number of degrees of freedom, whole or not."""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

_ORDER = 96
_NORMAL = NormalDist()


def two_sided_p(t: float, degrees: float) -> float:
    """Return the probability of a value as far from zero as ``t``, or farther.

        P(|T| > t) = 1 - 2 Γ((ν + 1) / 2) / (√π Γ(ν / 2)) ∫₀^θ cos^(ν - 1) φ dφ,  t = √ν tan θ

    Args:
        t: The value; its sign does not matter.
        degrees: Of freedom, ν, at least 1.

    Reference:
        Abramowitz and Stegun 1964, 26.7.1, with the substitution above
    """
    return max(0.0, 1.0 - _within(math.atan(abs(t) / math.sqrt(degrees)), degrees))


@cache
def t_quantile(confidence: float, degrees: float) -> float:
    """Return the t that ``confidence`` of all values stay below in size.

    Args:
        confidence: Between 0 and 1, such as 0.95.
        degrees: Of freedom, at least 1.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < confidence else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def t_test_power(effect: float, degrees: float, confidence: float) -> float:
    """Return how often a two-sided t test finds an effect.

    The statistic is (Z + δ) / U with Z standard normal and νU² of χ² with ν degrees of freedom:
    the mean over U of Φ(δ - tU) + Φ(-δ - tU).

    Args:
        effect: δ, the effect in standard errors of its estimate.
        degrees: Of freedom of the test, ν, at least 1.
        confidence: One minus the level of the test.
    """
    t = t_quantile(confidence, degrees)
    width = 1 / math.sqrt(2 * degrees)
    scales, weights = _quadrature(max(1e-9, 1 - 9 * width), 1 + 12 * width)
    log_density = (
        math.log(2)
        + degrees / 2 * math.log(degrees / 2)
        - math.lgamma(degrees / 2)
        + (degrees - 1) * np.log(scales)
        - degrees * scales**2 / 2
    )
    found = [
        _NORMAL.cdf(effect - t * scale) + _NORMAL.cdf(-effect - t * scale)
        for scale in scales.tolist()
    ]
    return float(np.exp(log_density) * weights @ np.array(found))


def _within(angle: float, degrees: float) -> float:
    """Return P(|T| ≤ √ν tan(angle))."""
    # beyond so many standard deviations there is nothing, and the nodes would miss the peak
    angles, weights = _quadrature(0.0, min(angle, 9 / math.sqrt(degrees)))
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2))
    return float(2 / math.sqrt(math.pi) * scale * (np.cos(angles) ** (degrees - 1) @ weights))


def _quadrature(low: float, high: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    nodes, weights = _legendre()
    return (high + low) / 2 + (high - low) / 2 * nodes, (high - low) / 2 * weights


@cache
def _legendre() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return np.polynomial.legendre.leggauss(_ORDER)
