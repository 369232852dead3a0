"""From names in a configuration to reward functions, and the arguments that they take."""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from transformers import PreTrainedModel

from lrlhf.functional.names import import_function, unknown_name
from lrlhf.rewards.function import (
    OF_EPISODES,
    OF_RUNS,
    OTHER_REWARDS,
    RESERVED,
    MissingColumnError,
    RewardError,
    RewardFunction,
    did_you_mean,
)
from lrlhf.rewards.functions.numeric_answer import NumericAnswer
from lrlhf.rewards.functions.task_score import EnvironmentReward, ReasoningGymScore
from lrlhf.rewards.functions.text_rewards import (
    ExactMatch,
    LengthPenalty,
    OverlongPenalty,
    RegexFormat,
    RepetitionPenalty,
)
from lrlhf.rewards.functions.verdict_rewards import VerdictCorrect, VerdictFormat
from lrlhf.rewards.learned import LearnedReward
from lrlhf.rewards.process import ProcessReward
from lrlhf.statistics.intervals import Outcomes

NamedFunction = str | RewardFunction | Callable[..., Any]
"""A reward function, or its import path or the short name of a built-in one."""

BUILTINS: Mapping[str, type[RewardFunction]] = {
    "environment_reward": EnvironmentReward,
    "exact_match": ExactMatch,
    "learned_reward": LearnedReward,
    "length_penalty": LengthPenalty,
    "numeric_answer": NumericAnswer,
    "overlong_penalty": OverlongPenalty,
    "process_reward": ProcessReward,
    "reasoning_gym_score": ReasoningGymScore,
    "regex_format": RegexFormat,
    "repetition_penalty": RepetitionPenalty,
    "verdict_correct": VerdictCorrect,
    "verdict_format": VerdictFormat,
}
"""Short names of the reward functions that come with the library."""
_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_BY_KEYWORD = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class BoundFunction(NamedTuple):
    """A reward function and the name of its results."""

    name: str
    function: Callable[..., Any]


def bind_functions(
    functions: Sequence[NamedFunction] | Mapping[str, NamedFunction],
) -> list[BoundFunction]:
    """Find every function and give it a name.

    Args:
        functions: In the order of the results; a mapping names them, otherwise each has its own
            name or that of its class.

    Raises:
        ValueError: A function cannot be found or called, or two have the same name.
    """
    if callable(functions):
        raise ValueError("functions must be a list of reward functions, even if it is only one")
    if not functions:
        raise ValueError("functions is empty: name at least one reward function")
    if isinstance(functions, Mapping):
        bound = [BoundFunction(name, _resolved(named)) for name, named in functions.items()]
    else:
        resolved = map(_resolved, functions)
        bound = [BoundFunction(_default_name(function), function) for function in resolved]
    counts = Counter(name for name, _ in bound)
    for name, function in bound:
        if counts[name] > 1:
            raise ValueError(
                f"{counts[name]} reward functions are called {name!r}: tell them apart by writing "
                "functions as a mapping from name to function"
            )
        if not name or name != name.strip():
            raise ValueError(f"{name!r} cannot name a reward function")
        _check_signature(name, function)
    return bound


def _default_name(function: Callable[..., Any]) -> str:
    """Return a plain function's own name, or the class name in snake case."""
    function = unwrapped(function)
    if inspect.isroutine(function):
        return function.__name__
    return _BOUNDARY.sub("_", type(function).__name__).lower()


def unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of a partial."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def chosen_arguments(
    name: str,
    signature: inspect.Signature,
    available: Mapping[str, Any],
    filled: frozenset[str] = frozenset(),
) -> dict[str, Any]:
    """Pick what a function's signature names.

    Args:
        name: Of the function, for the errors.
        signature: Of the function.
        available: Arguments by name.
        filled: See `filled_by_python`.

    Raises:
        RewardError: It requires an argument that is not available, or would get one that is
            filled.
    """
    parameters = signature.parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        if clash := sorted(filled.intersection(available)):
            raise RewardError(
                f"reward function {name!r} cannot be given the column {clash[0]!r}: Python itself "
                "fills the argument of that name; rename the column"
            )
        chosen = dict(available)
    else:
        chosen = {p.name: available[p.name] for p in parameters if p.name in available}
    for needed in _required(parameters):
        if needed not in available:
            if needed == "trainer_state":
                raise MissingColumnError(
                    f"reward function {name!r} takes TRL's trainer_state, which is not there: take "
                    "step and max_steps, lists with one entry per response (state.global_step is "
                    "step[0]), or give trainer_state a default of None"
                )
            columns = sorted(set(available) - {*RESERVED, *OF_RUNS})
            raise MissingColumnError(
                f"reward function {name!r} takes an argument {needed!r}, and the data has no such "
                f"column{did_you_mean(needed, available)} (columns: "
                f"{', '.join(columns) or 'none'}; always there: {', '.join(RESERVED)})"
            )
    return chosen


@runtime_checkable
class ComparesAnswers(Protocol):
    """A reward function with an option for the data column that holds the right answer."""

    answer_column: str


@runtime_checkable
class ReadsAnswer(Protocol):
    """A reward function that extracts the answer of a response.

    An argument ``truncated`` of ``answer_of`` receives whether the response was cut off.
    """

    def answer_of(self, text: str) -> str | None:
        """Return the answer of a response, normalized to compare texts; None: there is none."""
        ...


@runtime_checkable
class SumsUpAnswers(Protocol):
    """A reward function with metrics of an evaluation besides its mean value."""

    share_names: tuple[str, ...]
    """Of these metrics, such as ``accuracy``."""

    def observed(
        self, text: str, columns: Mapping[str, Any], *, truncated: bool, row: Hashable
    ) -> Any:
        """Return what the metrics need of a response: little, and picklable.

        Args:
            text: The response.
            columns: Of its row of the data.
            truncated: Whether it was cut off.
            row: Identifies its row, on all ranks.
        """
        ...

    def shares(self, observed: Sequence[Any]) -> Mapping[str, Outcomes]:
        """Return the metrics over all responses of all ranks, by name, as far as they exist."""
        ...


def comparing(functions: Mapping[str, object]) -> list[str]:
    """Return the names of functions that have no value for a response without siblings."""
    return [
        name
        for name, function in functions.items()
        if isinstance(function, RewardFunction) and function.compares_responses
    ]


def scoring_columns(functions: Iterable[Callable[..., Any]]) -> dict[str, str]:
    """Return the data columns by which functions score, and the heading of each in a table.

    The column of an option for right answers is headed "right answer"; otherwise it is the only
    column that a signature names.
    """
    others = (*RESERVED, OTHER_REWARDS, *OF_EPISODES, *OF_RUNS)
    headings: dict[str, str] = {}
    for function in functions:
        if isinstance(function, ComparesAnswers):
            headings[function.answer_column] = "right answer"
            continue
        parameters = inspect.signature(function).parameters.values()
        named = [p.name for p in parameters if p.kind in _BY_KEYWORD and p.name not in others]
        if len(named) == 1:
            headings.setdefault(named[0], named[0])
    return headings


def filled_by_python(function: Callable[..., Any]) -> frozenset[str]:
    """Return the arguments that no caller passes: ``self``, and those that a partial binds."""
    plain: Any = unwrapped(function)
    if not inspect.isroutine(plain):
        plain = type(plain).__call__
    plain = getattr(plain, "__func__", plain)
    free = inspect.signature(function).parameters
    return frozenset(inspect.signature(plain).parameters) - frozenset(free)


def _required(parameters: Iterable[inspect.Parameter]) -> list[str]:
    return [p.name for p in parameters if p.kind in _BY_KEYWORD and p.default is p.empty]


def _resolved(named: NamedFunction) -> Callable[..., Any]:
    function: Any = named
    if isinstance(named, str):
        is_path = "." in named and all(map(str.isidentifier, named.split(".")))
        if named not in BUILTINS and not is_path:
            unknown = unknown_name("reward function", named, BUILTINS)
            raise ValueError(f"{unknown}. If it names a model, {_for_model(named)}")
        function = BUILTINS.get(named) or import_function("reward function", named, BUILTINS)
    if isinstance(function, type):
        if needed := _required(inspect.signature(function).parameters.values()):
            raise ValueError(
                f"reward function {str(named)!r} needs {', '.join(needed)}: write it as "
                f"`class_path: {function.__module__}.{function.__qualname__}` with `init_args`"
            )
        function = function()
    if isinstance(function, PreTrainedModel):
        raise ValueError(
            f"a {type(function).__name__} is a model and no reward function: save it and its "
            f"tokenizer to a folder and {_for_model(function.name_or_path or 'folder')}"
        )
    if not callable(function):
        raise ValueError(
            f"reward function {named!r} cannot be called; give a function, an object with "
            "__call__, an import path, or class_path and init_args"
        )
    return function  # type: ignore[no-any-return]


def _for_model(source: str) -> str:
    return (
        f"take LearnedReward(source={source!r}), in a config `class_path: LearnedReward` with "
        f"`init_args: {{source: {source}}}`"
    )


def _check_signature(name: str, function: Callable[..., Any]) -> None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:
        raise ValueError(
            f"reward function {name!r}: Python cannot tell its arguments ({error}); wrap it in a "
            "function of your own"
        ) from error
    for parameter in parameters:
        required = parameter.default is inspect.Parameter.empty
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY and required:
            raise ValueError(
                f"reward function {name!r} takes {parameter.name!r} by position only, and "
                "everything is passed by keyword: drop the `/` from its signature"
            )
