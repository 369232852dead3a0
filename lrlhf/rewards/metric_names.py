"""What the metrics that reward functions log are called, so that one name is one function's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from lrlhf.rewards.function import RewardFunction
from lrlhf.rewards.lookup import BoundFunction, unwrapped


def metric_prefixes(functions: Sequence[BoundFunction]) -> dict[str, str]:
    """Return what is put before the names of the metrics of each function, often nothing.

    It depends on the functions alone and not on what they log: which of them answer differs between
    batches and processes, and a name must not change its owner there.

    Args:
        functions: All that log together.

    Returns:
        The function's name where another one may log the same: both are of one class, or both are
        the user's own and take ``log_metric``.
    """
    logging = [one for one in functions if _can_log(one.function)]
    shared = {
        one.name
        for one in logging
        for other in logging
        if one is not other and _log_alike(one.function, other.function)
    }
    return {name: f"{name}/" if name in shared else "" for name, _ in functions}


def _can_log(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    return takes_all or "log_metric" in parameters


def _log_alike(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    one, other = unwrapped(one), unwrapped(other)
    if isinstance(one, type(other)) or isinstance(other, type(one)):
        return True
    return _is_own(one) and _is_own(other)


def _is_own(function: Callable[..., Any]) -> bool:
    """Whether a function is the user's or calls one: nobody knows what such ones log."""
    if isinstance(function, RewardFunction) and function.forwards_columns:
        return True
    return not type(function).__module__.startswith("lrlhf.")
