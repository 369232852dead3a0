"""Calling one reward function: what it is given, and what it may give back."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from torch import Tensor

from lrlhf.rewards.result import RewardError

RewardFunction = Callable[..., Any]
"""Any callable, sync or async, that takes some of the keywords ``prompts``, ``completions``,
``completion_ids``, ``log_metric``, ``log_extra`` and the columns of the data, each a list with one
entry per response, and returns a float or None for each."""


@dataclass(frozen=True, slots=True)
class NamedReward:
    """A reward function, its name in logs, its weight, and the keywords that it takes."""

    name: str
    function: RewardFunction
    weight: float
    keywords: frozenset[str] | None
    """None: it takes any."""
    required: frozenset[str]
    """Keywords without a default."""

    def select(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        """Pick the keywords that the function takes.

        Raises:
            RewardError: It needs a column that the data do not have.
        """
        missing = sorted(self.required - offered.keys())
        if missing:
            columns = sorted(offered.keys() - _ALWAYS)
            raise RewardError(
                f"reward {self.name!r} needs the column {missing[0]!r}, which the data do not "
                f"have; their columns are: {', '.join(columns) or 'none'}"
            )
        if self.keywords is None:
            return dict(offered)
        return {key: value for key, value in offered.items() if key in self.keywords}


_ALWAYS = frozenset({"prompts", "completions", "completion_ids", "log_metric", "log_extra"})


def named_reward(function: RewardFunction, *, name: str, weight: float) -> NamedReward:
    """Read a function's signature.

    Raises:
        RewardError: It takes positional-only arguments, which cannot be passed by keyword.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters):
        raise RewardError(f"reward {name!r} takes positional-only arguments; use keywords")
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return NamedReward(
        name=name,
        function=function,
        weight=weight,
        keywords=None if anything else frozenset(p.name for p in named),
        required=frozenset(p.name for p in named if p.default is p.empty),
    )


def default_name(function: RewardFunction) -> str:
    """Name of a function, or of the class of a callable object, in snake case."""
    if inspect.isroutine(function):
        return function.__name__
    name = type(function).__name__
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def checked_values(values: Any, *, name: str, rows: int) -> list[float]:
    """Turn what a function returned into floats.

    Args:
        values: Its answer.
        name: For error messages.
        rows: Responses that it was asked about.

    Returns:
        One number per response, NaN for None and for anything that is not a finite number.

    Raises:
        RewardError: Not a sequence of one entry per response, or an entry that is no number.
    """
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable | Tensor):
        raise RewardError(
            f"reward {name!r} returned {type(values).__name__}; return a list with a float or "
            "None for each completion"
        )
    entries = list(values)
    if len(entries) != rows:
        raise RewardError(
            f"reward {name!r} returned {len(entries)} values for {rows} completions; "
            "return one for each"
        )
    return [_number(entry, name, position) for position, entry in enumerate(entries)]


def _number(entry: Any, name: str, position: int) -> float:
    if entry is None:
        return math.nan
    if isinstance(entry, Tensor | np.generic):
        entry = entry.item()
    if not isinstance(entry, Real):
        raise RewardError(
            f"reward {name!r} returned {entry!r} for completion {position}; return a float or None"
        )
    number = float(entry)
    return number if math.isfinite(number) else math.nan
