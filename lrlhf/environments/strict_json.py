"""JSON as its standard has it."""

from __future__ import annotations

import json
import math


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no number of JSON")
    return value


STRICT_JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)
"""Reads JSON without the ``NaN`` and ``Infinity`` that Python adds to it."""
