"""The reward functions of a run, and how they become one score per response."""

from __future__ import annotations

import copy
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lrlhf.arguments import KeepsArguments
from lrlhf.rewards.dispatch import Call, Dispatcher, Outcome
from lrlhf.rewards.failures import MAX_UNSCORABLE_FRACTION, Failures, check_quota, explain
from lrlhf.rewards.function import (
    OTHER_REWARDS,
    Completion,
    MissingColumnError,
    NoSiblingsError,
    PartialValues,
    RewardError,
    RewardFunction,
    StepReward,
    did_you_mean,
    first_of,
    with_segments,
)
from lrlhf.rewards.lookup import (
    BoundFunction,
    NamedFunction,
    bind_functions,
    chosen_arguments,
    filled_by_python,
    judging_columns,
    unwrapped,
)
from lrlhf.rewards.reward_values import (
    Journal,
    Logged,
    Returned,
    RewardResult,
    Score,
    check_known,
    check_values,
    same_weights,
    weighted_steps,
    weighted_sum,
    weights_by_label,
)
from lrlhf.types import Prompt


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


_TIMEOUT_S = 1800.0
"""For functions that may hang; far more than work takes."""
_NONE_APPLIES = "all of them"
"""Counts as a function that fails where no function applies to a batch."""


class _Asked(NamedTuple):
    """A function, the rows it is asked about, and what it logs."""

    bound: BoundFunction
    rows: list[int]
    journal: Journal


class _Answer(NamedTuple):
    """What came of asking a function."""

    asked: _Asked
    values: list[float]
    """One per row that it was asked about; NaN: none."""
    declined: list[bool]
    """Of each row, whether the function says that it does not apply."""
    failure: str
    logged: Logged
    outcome: Outcome


class Rewards(KeepsArguments):
    """Scores responses with several functions at once.

    The score of a response is the weighted sum of what the functions return for it. A function that
    returns None for all responses to a prompt does not apply to it: the others count alone, and
    where every function does so, the prompt is left out and counted. A function that returns None
    for some of them and numbers for others leaves the whole group without scores, as their sums
    could not be compared. One that raises, runs out of time or returns no number leaves its
    responses without a score, and is reported. In both cases those that are ``optional`` are
    not missed: the others count alone. Functions with weight 0, and those that the recipe does not
    ask, are never missed.

    Args:
        functions: List of reward functions: an import path (``my_rewards.brevity``), the short
            name of a built-in one (``exact_match``), or ``class_path`` with ``init_args``. A
            mapping gives them the names under which they are logged, in place of their own.
        weights: One per function, as a list or by name; all 1 by default. 0: only logged.
        timeout: Seconds that each function may take for a batch; null: no limit. ``auto`` is half
            an hour, and no limit for those that end by themselves: learned, remote and isolated
            rewards.
        max_unscorable_fraction: Stop if more than this part of a batch has no score although a
            function applies to it.
        max_failures: Stop if a function fails in so many batches of the run, where a batch that
            fails in part counts as that part, and ten without failure make up for one; null:
            never. A resumed run counts anew.
        recipe: Weights by label instead of ``weights``: label, reward name, weight. A function is
            asked only about the responses whose label gives it a weight.
        label_column: Data column that holds the label for ``recipe``.
        optional: Names of functions that may have no value for a response.
        inputs: For functions with an argument ``rewards``: the names of the rewards whose values
            they are given in it, as a mapping from name to a list with one value per response, or
            None. Those that are not listed here get the values of all functions before them.

    Raises:
        ValueError: The functions, names, weights or recipe do not fit together.
    """

    def __init__(  # noqa: PLR0913  the keys of a user's config
        self,
        functions: list[NamedFunction] | dict[str, NamedFunction],
        weights: list[float] | dict[str, float] | None = None,
        timeout: float | Literal["auto"] | None = "auto",
        max_unscorable_fraction: float = MAX_UNSCORABLE_FRACTION,
        recipe: dict[str, dict[str, float]] | None = None,
        label_column: str = "label",
        max_failures: int | None = 10,
        optional: list[str] | None = None,
        inputs: dict[str, list[str]] | None = None,
    ) -> None:
        if isinstance(timeout, int | float) and not timeout > 0:
            raise ValueError(f"timeout is {timeout}; give seconds above 0, or null for no limit")
        if not 0 <= max_unscorable_fraction <= 1:
            raise ValueError(
                f"max_unscorable_fraction is {max_unscorable_fraction}; it must lie in [0, 1]"
            )
        if recipe is not None and weights is not None:
            raise ValueError("weights and recipe exclude each other: drop one of the two")
        self._functions = bind_functions(functions)
        self.names: tuple[str, ...] = tuple(name for name, _ in self._functions)
        self._weights = (
            same_weights(self.names, weights)
            if recipe is None
            else weights_by_label(self.names, recipe, label_column)
        )
        check_known(optional or [], self.names, "optional")
        self._inputs = complete_inputs(self._functions, inputs or {})
        self._waves = in_waves(self.names, self._inputs)
        self._of_turns = torch.tensor(
            [getattr(function, "sums_turns", False) for _, function in self._functions]
        )
        self._looks_at_steps = any(
            getattr(function, "gives_steps", False) for _, function in self._functions
        )
        self._optional = torch.tensor([name in (optional or []) for name in self.names])
        self._max_unscorable_fraction = max_unscorable_fraction
        self._failures = Failures(max_failures)
        self._spares_some = timeout == "auto"
        self._dispatcher = Dispatcher(_TIMEOUT_S if timeout == "auto" else timeout)

    @property
    def functions(self) -> dict[str, object]:
        """The functions by name."""
        return dict(self._functions)

    @property
    def asked_of_all(self) -> list[str]:
        """The functions that no label of the recipe leaves out."""
        return self._weights.of_all

    @property
    def answer_columns(self) -> dict[str, str]:
        """See `judging_columns`."""
        return judging_columns(function for _, function in self._functions)

    def asking_for(self, argument: str) -> list[str]:
        """Return the functions whose signature names an argument."""
        return [
            name
            for name, function in self._functions
            if argument in inspect.signature(function).parameters
        ]

    def prepare(self) -> None:
        """Load what the functions need, so that it does not count as their time.

        :meth:`score` does so itself; call it earlier to fail before anything was generated.
        """
        for _, function in self._functions:
            if isinstance(function, RewardFunction):
                function.prepare()

    def close(self) -> None:
        """End the processes that functions have started; the next :meth:`score` starts them."""
        for _, function in self._functions:
            if isinstance(function, RewardFunction):
                function.close()

    def beside_a_run(self) -> Rewards:
        """Return the same functions, whose failures count by themselves."""
        own = copy.copy(self)
        own._failures = self._failures.afresh()
        return own

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]],
        columns: Sequence[Mapping[str, Any]],
        *,
        limited: bool = True,
        on_request: Mapping[str, Sequence[Any]] | None = None,
        failed: Mapping[int, str] | None = None,
        group_ids: Sequence[Hashable] | None = None,
    ) -> RewardResult:
        """Score responses.

        Args:
            prompts: Text or chat turns, one per response.
            completions: Text, or the assistant's turns where the prompt is a chat.
            completion_ids: Token ids of each response as the engine returned them.
            columns: The other data columns of each response's row; where a column has the name of
                an argument of :class:`RewardFunction`, the argument wins.
            limited: Whether ``max_unscorable_fraction`` holds for these responses by themselves.
            on_request: Further arguments by name, one value per response, for the functions whose
                signature names them.
            failed: Responses that no function is asked about, as something went wrong with them
                before; and what.
            group_ids: What the responses to one prompt have in common; None: the prompt.

        Raises:
            RewardError: Too many responses without a score, a function that fails again and
                again, a column that a function needs and the data lacks, an unknown label, or a
                function that does not return one value per response.
        """
        counts = {len(prompts), len(completions), len(completion_ids), len(columns)}
        if len(counts) > 1:
            raise ValueError(
                f"{len(prompts)} prompts, {len(completions)} completions, {len(completion_ids)} "
                f"completion_ids and {len(columns)} columns: there must be one of each per response"
            )
        self.prepare()
        weights = self._weights.rows(columns)
        weights[[*(failed or {})]] = math.nan
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        answers = self._answers(weights, given, columns, on_request or {}, lost=bool(failed))
        groups = _numbered(map(repr, prompts) if group_ids is None else group_ids)
        return self._combine(answers, weights, groups, failed or {}, limited=limited)

    def _answers(
        self,
        weights: Float[Tensor, "B K"],
        given: Mapping[str, Sequence[Any]],
        columns: Sequence[Mapping[str, Any]],
        on_request: Mapping[str, Sequence[Any]],
        *,
        lost: bool,
    ) -> list[_Answer]:
        """Ask the functions, those that see others' values after these."""
        rows = [weight.isfinite().nonzero()[:, 0].tolist() for weight in weights.T]
        found: dict[str, list[float | None]] = {name: [None] * len(weights) for name in self.names}
        answers: dict[int, _Answer] = {}
        for wave in self._waves:
            asked = {
                place: _Asked(self._functions[place], rows[place], Journal(len(rows[place])))
                for place in wave
                if rows[place]
            }
            outcomes = self._dispatcher.run(
                [self._call(entry, given, columns, on_request, found) for entry in asked.values()]
            )
            for (place, entry), outcome in zip(asked.items(), outcomes, strict=True):
                answer = answers[place] = self._read(entry, outcome, lost=lost)
                for row, value in zip(entry.rows, answer.values, strict=True):
                    found[entry.bound.name][row] = None if math.isnan(value) else value
        return [answers[place] for place in sorted(answers)]

    def _call(
        self,
        entry: _Asked,
        given: Mapping[str, Sequence[Any]],
        columns: Sequence[Mapping[str, Any]],
        on_request: Mapping[str, Sequence[Any]],
        found: Mapping[str, Sequence[float | None]],
    ) -> Call:
        """Return what is called, with the rows that are asked about in lists of its own."""
        name, function = entry.bound
        signature = inspect.signature(function)
        wanted = {name: on_request[name] for name in on_request if name in signature.parameters}
        names = {column: None for row in entry.rows for column in columns[row]}
        available = {
            **{column: [columns[row].get(column) for row in entry.rows] for column in names},
            **{
                argument: [_copied(values[row]) for row in entry.rows]
                for argument, values in given.items()
            },
            **{
                argument: [values[row] for row in entry.rows] for argument, values in wanted.items()
            },
            "log_metric": entry.journal.log_metric,
            "log_extra": entry.journal.log_extra,
        }
        sees_others = name in self._inputs or OTHER_REWARDS in signature.parameters
        if sees_others and OTHER_REWARDS in names:
            raise RewardError(
                f"reward function {name!r} takes {OTHER_REWARDS!r}, the values of other rewards, "
                "and the data has a column of that name too: rename the column"
            )
        if name in self._inputs:
            available[OTHER_REWARDS] = OtherRewards(
                {other: [found[other][row] for row in entry.rows] for other in self._inputs[name]}
            )
        ends = isinstance(function, RewardFunction) and function.ends_by_itself
        arguments = chosen_arguments(name, signature, available, filled_by_python(function))
        return Call(name, function, arguments, unlimited=self._spares_some and ends)

    def _combine(
        self,
        answers: Sequence[_Answer],
        weights: Float[Tensor, "B K"],
        groups: Int[Tensor, " B"],
        failed: Mapping[int, str],
        *,
        limited: bool,
    ) -> RewardResult:
        per_function = torch.full(weights.shape, math.nan, dtype=torch.float32)
        declined = torch.zeros(weights.shape, dtype=torch.bool)
        metrics, extras = self._logged(answers, len(weights))
        failures: dict[str, str] = {}
        if failed:
            reason = first_of(failed, f"{len(failed)} episodes failed")
            failures["environment"] = f"environment: {reason}"
            self._failures.log(failures["environment"])
        for answer in answers:
            name = answer.asked.bound.name
            values = torch.tensor(answer.values, dtype=torch.float32)
            per_function[answer.asked.rows, self.names.index(name)] = values
            declined[answer.asked.rows, self.names.index(name)] = torch.tensor(answer.declined)
            if answer.failure:
                failures[name] = f"{name}: {answer.failure}"
                self._failures.log(failures[name])
        score = weighted_sum(
            per_function, weights, optional=self._optional, declined=declined, groups=groups
        )
        self._report(score, failures)
        self._failures.check(failures)
        if limited:
            check_quota(
                score,
                per_function,
                weights,
                names=self.names,
                failures=[*failures.values()],
                allowed=self._max_unscorable_fraction,
            )
        wanted = weights.isfinite()
        missing = (per_function.isnan() & wanted).sum(dim=0) / wanted.sum(dim=0).clamp(min=1)
        unscored = {
            f"{name}/unscored_fraction": fraction
            for name, fraction in zip(self.names, missing.tolist(), strict=True)
        }
        mixed = {
            f"{name}/mixed_fraction": fraction
            for name, fraction in zip(
                self.names, score.mixed.double().mean(0).tolist(), strict=True
            )
        }
        return RewardResult(
            scores=score.sums,
            per_function=per_function,
            names=self.names,
            metrics=metrics | unscored | mixed,
            extras=extras,
            failures=[*failures.values()],
            seconds={answer.asked.bound.name: answer.outcome.seconds for answer in answers},
            weights=weights,
            turn_weights=(weights.nan_to_num(nan=0.0) * self._of_turns).sum(dim=1),
            step_rewards=self._steps(answers, weights) if self._looks_at_steps else None,
        )

    def _report(self, score: Score, failures: dict[str, str]) -> None:
        """Say which functions apply to a part of a group, and whether none applies to a response.

        A batch that no function applies to counts as a failure: nothing is learnt from it.
        """
        for name, mixed in zip(self.names, score.mixed.any(dim=0).tolist(), strict=True):
            if mixed:
                reason = (
                    f"{name}: returned None for some responses to a prompt and numbers for others, "
                    "which leaves all of them without a score: return None for all responses to a "
                    "prompt that the function does not apply to, or list it under optional"
                )
                failures[name] = "\n".join([reason, *filter(None, [failures.get(name)])])
                self._failures.log(reason)
        everywhere = bool(len(score.sums) and score.inapplicable.all())
        self._failures.count(_NONE_APPLIES, float(everywhere))
        if everywhere:
            failures[_NONE_APPLIES] = f"each returned None for all {len(score.sums)} responses"
        if score.inapplicable.any():
            self._failures.warn(
                "no reward function applies to some responses: all returned None. They are left "
                "out of training and counted (rollout/unscorable_fraction)"
            )

    def _steps(
        self, answers: Sequence[_Answer], weights: Float[Tensor, "B K"]
    ) -> tuple[tuple[StepReward, ...], ...]:
        returned = [
            Returned(self.names.index(bound.name), bound.name, rows, answer.outcome.value)
            for answer in answers
            for bound, rows, _ in [answer.asked]
        ]
        return weighted_steps(returned, weights)

    def _read(self, entry: _Asked, outcome: Outcome, *, lost: bool) -> _Answer:
        """Return the values of a function, what it logged, and what went wrong.

        Where responses were lost before, others may be without siblings by accident.
        """
        logged = entry.journal.close()
        if lost and isinstance(outcome.error, NoSiblingsError):
            outcome = Outcome(PartialValues([math.nan] * len(entry.rows), "", failed=0), None)
        name, error = entry.bound.name, outcome.error
        if isinstance(error, RewardError):
            # a class of the user's own may have another constructor
            kind = MissingColumnError if isinstance(error, MissingColumnError) else RewardError
            raise kind(f"reward function {name!r}: {error}") from error
        if error is not None:
            self._failures.count(name, 1.0)
            nothing, none = [math.nan] * len(entry.rows), [False] * len(entry.rows)
            return _Answer(entry, nothing, none, explain(error), logged, outcome)
        values, declined, bad, failure = check_values(outcome.value, function=name, rows=entry.rows)
        if isinstance(entry.bound.function, RewardFunction):
            declined = [row and not entry.bound.function.none_is_missing for row in declined]
        if isinstance(outcome.value, PartialValues):
            failure = "\n".join(filter(None, (failure, outcome.value.failure)))
            bad += outcome.value.failed
        self._failures.count(name, bad / len(entry.rows))
        return _Answer(entry, values, declined, failure, logged, outcome)

    def _logged(
        self, answers: Sequence[_Answer], count: int
    ) -> tuple[dict[str, float], dict[str, list[Any]]]:
        """Return the means of all metrics, and every column spread over all responses."""
        metrics: dict[str, list[float]] = defaultdict(list)
        extras: dict[str, list[Any]] = {}
        prefixes = metric_prefixes(self._functions)
        for entry, _, _, _, logged, _ in answers:
            for metric, numbers in logged.metrics.items():
                metrics[prefixes[entry.bound.name] + metric] += numbers
            for column, values in logged.extras.items():
                # a second column of a name gets its function's
                name = column if column not in extras else f"{entry.bound.name}/{column}"
                extras[name] = [None] * count
                for row, value in zip(entry.rows, values, strict=True):
                    extras[name][row] = value
        means = {name: math.fsum(numbers) / len(numbers) for name, numbers in metrics.items()}
        return means, extras


def _copied(value: Any) -> Any:
    """Return text as it is, and the turns of a chat or token ids as a list that may be changed."""
    if isinstance(value, str):
        return value
    copied = [{**one} if isinstance(one, Mapping) else one for one in value]
    return with_segments(copied, getattr(value, "segments", None))


def _numbered(groups: Iterable[Hashable]) -> Int[Tensor, " B"]:
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(group, len(numbers)) for group in groups]).long()


def as_rewards(given: object) -> Rewards:
    """Take a function, or several, for the `Rewards` of them, all with weight 1."""
    if isinstance(given, list | tuple | dict):
        return Rewards(dict(given) if isinstance(given, dict) else list(given))
    if callable(given) and not hasattr(given, "names"):
        return Rewards([given])
    return cast(Rewards, given)


_WINDOW = 100
"""Responses of which more than half must not have failed: batches may be small, and a single
accident is no reason to stop."""
_ENOUGH = 20
"""Responses that must be known before their share says something."""
_WHOLE_BATCH = 4
"""Responses of a call that do not all fail by accident."""


class NoRewards(Rewards):
    """Gives every response the score 0; those whose episode failed have none.

    No function can say how many may fail, as `Rewards.max_unscorable_fraction` does. So it refuses
    only an environment that is broken: where more than half of the last 100 responses failed, as
    soon as 20 are known, or all of a call with 4 or more.
    """

    def __init__(self) -> None:
        self.names = ()
        self._functions = []
        self._failures = Failures(None)
        self._recent: list[bool] = []
        """Of the last responses: whether their episodes failed."""

    def beside_a_run(self) -> NoRewards:
        return NoRewards()

    def score(
        self,
        prompts: Sequence[Prompt],
        *_: Any,
        limited: bool = True,
        failed: Mapping[int, str] | None = None,
        **__: Any,
    ) -> RewardResult:
        """See `Rewards.score`.

        Raises:
            RewardError: Too many episodes failed, and nothing would be learnt from them.
        """
        failed = failed or {}
        scores = torch.zeros(len(prompts))
        scores[[*failed]] = math.nan
        failures = []
        if failed:
            reason = first_of(failed, f"{len(failed)} episodes failed")
            failures.append(f"environment: {reason}")
            self._failures.log(failures[0])
        if limited:
            self._note([row in failed for row in range(len(prompts))], failures)
        return RewardResult(
            scores=scores,
            per_function=torch.zeros(len(prompts), 0),
            names=(),
            metrics={},
            extras={},
            failures=failures,
            seconds={},
            turn_weights=torch.zeros(len(prompts)),
        )

    def _note(self, failed: list[bool], failures: Sequence[str]) -> None:
        """Count the responses of a call, and look whether too many of the last ones failed."""
        self._recent = [*self._recent, *failed][-max(_WINDOW, len(failed)) :]
        recent = self._recent
        if len(failed) >= _WHOLE_BATCH and all(failed):
            recent = failed
        elif not any(failed) or len(recent) < _ENOUGH or 2 * sum(recent) <= len(recent):
            return
        raise RewardError(
            f"{sum(recent)} of the last {len(recent)} episodes failed, and a teacher sees none of "
            f"them. Repair the environment. First failure of this batch: {failures[0]}"
        )
