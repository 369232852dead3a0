"""Parameters of which the short suite takes a few, and ``make test-all`` all."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def few_of(values: Iterable[Any], short: Collection[Any]) -> list[Any]:
    """Mark every value as exhaustive that is not among the ``short`` ones."""
    every = list(values)
    assert set(short) <= set(every), f"{set(short) - set(every)} are not there"
    return [
        value if value in short else pytest.param(value, marks=pytest.mark.exhaustive)
        for value in every
    ]
