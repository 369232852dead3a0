"""What metrics are called of answers at several temperatures."""

from __future__ import annotations

import re

_PREFIX = re.compile(r"^t[\d.e+-]+/")


def temperature_name(temperature: float) -> str:
    """Return what the metrics of a temperature are grouped by, such as ``t0.7``."""
    return f"t{temperature:g}"


def temperature_prefix(temperature: float | None, main: float | None) -> str:
    """Return what metrics of an answer begin with beside others, such as ``t0.7/``.

    Args:
        temperature: Of the answer; None: nobody says.
        main: The temperature whose metrics have plain names.

    Returns:
        Nothing for answers at the main temperature, which those are taken to be that do not say.
    """
    return "" if temperature in (None, main) else f"{temperature_name(temperature)}/"


def plain_name(metric: str) -> str:
    """Return what a metric is called without its temperature."""
    return _PREFIX.sub("", metric)
