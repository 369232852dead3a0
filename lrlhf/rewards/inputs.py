"""Rewards of rewards: which functions are given the values of others, and who is asked first."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

from lrlhf.rewards.function import OTHER_REWARDS, RewardError, RewardFunction, did_you_mean
from lrlhf.rewards.function_weights import check_known
from lrlhf.rewards.lookup import BoundFunction

Inputs = Mapping[str, Sequence[str]]
"""Reward name -> names of the rewards whose values it is given."""


class OtherRewards(dict[str, list[float | None]]):
    """What a function is given of other rewards: one value per response under each name."""

    def __missing__(self, name: str) -> list[float | None]:
        raise RewardError(
            f"it asks for the values of {name!r}{did_you_mean(name, self)}, and is given those of "
            f"{', '.join(self) or 'no other reward'}: list that function before it, or name it in "
            "inputs"
        )

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, ({**self},)  # other processes need not have this library


def complete_inputs(
    functions: Sequence[BoundFunction], given: Mapping[str, Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """Return for each function that sees others which ones it sees.

    Args:
        functions: In the order of the configuration.
        given: What the user has chosen; who asks by its signature and is not among them sees all
            that stand before it.

    Raises:
        ValueError: A name is unknown, a chosen function takes no values of others, or one that
            needs them has none before it.
    """
    names = [name for name, _ in functions]
    check_known(given, names, "inputs")
    found: dict[str, tuple[str, ...]] = {}
    for place, (name, function) in enumerate(functions):
        parameters = inspect.signature(function).parameters
        asks = parameters.get(OTHER_REWARDS)
        if name in given:
            check_known(given[name], names, f"inputs[{name!r}]")
            takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
            # with a class of rewards that only says that it leaves the rest alone
            uses_all = not isinstance(function, RewardFunction) or function.forwards_columns
            if asks is None and not (takes_all and uses_all):
                raise ValueError(
                    f"inputs[{name!r}]: the function has no argument {OTHER_REWARDS!r} that could "
                    "take the values of other rewards: add it, or drop the entry"
                )
            found[name] = tuple(given[name])
        elif asks is not None and place:
            found[name] = tuple(names[:place])
        elif asks is not None and asks.default is asks.empty:
            raise ValueError(
                f"reward function {name!r} takes {OTHER_REWARDS!r}, the values of the functions "
                "before it, and it is the first: list it after them, or name them in inputs (a "
                "data column of that name needs another one)"
            )
    return found


def in_waves(names: Sequence[str], inputs: Inputs) -> list[list[int]]:
    """Order the functions: each wave can be asked at once, after those before it.

    Returns:
        Positions in ``names``, ascending in each wave.

    Raises:
        ValueError: Some would have to wait for each other.
    """
    sorter = TopologicalSorter({name: inputs.get(name, ()) for name in names})
    try:
        sorter.prepare()
    except CycleError as error:
        circle = " -> ".join(map(repr, error.args[1]))
        raise ValueError(
            f"inputs go in a circle: {circle}; none of these rewards can be computed before the "
            "others, so take one of the names out"
        ) from None
    waves = []
    while sorter.is_active():
        ready = sorter.get_ready()
        sorter.done(*ready)
        waves.append(sorted(names.index(name) for name in ready))
    return waves
