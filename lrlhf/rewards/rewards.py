"""The reward functions of a run, and how they become one score per response.

`Rewards.score` calls the functions, in waves if some of them read the values of others, reads what
they return, adds it up, and raises where too many responses have no score. `NoRewards` takes its
place where a run has no reward function.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import traceback
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor

from lrlhf.arguments import KeepsArguments
from lrlhf.rewards.dispatch import Call, Dispatcher, Outcome
from lrlhf.rewards.function import (
    OTHER_REWARDS,
    Completion,
    MissingColumnError,
    NoSiblingsError,
    PartialValues,
    RewardError,
    RewardFunction,
    did_you_mean,
    first_failure,
    with_segments,
)
from lrlhf.rewards.lookup import (
    BoundFunction,
    NamedFunction,
    bind_functions,
    chosen_arguments,
    filled_by_python,
    scoring_columns,
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
from lrlhf.types import Episode, Prompt

logger = logging.getLogger(__name__)

_MAX_LOGGED = 50
_FORGIVEN = 0.1
"""Subtracted from the count by a batch without failure, so that a long run may have accidents."""
_TIMEOUT_S = 1800.0
"""For functions that may hang; far longer than their work."""
_NONE_APPLIES = "all of them"
"""Counts as a function that fails where no function applies to a batch."""


class _Task(NamedTuple):
    """A function, the rows that it scores, and what it logs."""

    bound: BoundFunction
    rows: list[int]
    journal: Journal


class _Result(NamedTuple):
    """The values of a function."""

    task: _Task
    values: list[float]
    """One per row of the task; NaN: none."""
    declined: list[bool]
    """Of each row, whether the function does not apply."""
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
    responses without a score, and is reported. In both cases the values of ``optional`` functions
    may be missing: the others count alone. So may those of functions with weight 0, and of
    functions that the recipe does not call.

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
        recipe: Weights by label instead of ``weights``: label, reward name, weight. A function
            scores only the responses whose label gives it a weight.
        label_column: Data column that holds the label for ``recipe``.
        optional: Names of functions that may have no value for a response.
        inputs: For functions with an argument ``rewards``: the names of the rewards whose values
            it has, as a mapping from name to a list with one value per response, or None. Those
            that are not listed here get the values of all functions before them.

    Raises:
        ValueError: The functions, names, weights or recipe do not fit together.
    """

    def __init__(  # noqa: PLR0913  the keys of a user's config
        self,
        functions: list[NamedFunction] | dict[str, NamedFunction],
        weights: list[float] | dict[str, float] | None = None,
        timeout: float | Literal["auto"] | None = "auto",
        max_unscorable_fraction: float = 0.1,
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
        self._has_steps = any(
            getattr(function, "scores_steps", False) for _, function in self._functions
        )
        self._optional = torch.tensor([name in (optional or []) for name in self.names])
        self._max_unscorable_fraction = max_unscorable_fraction
        self._failures = Failures(max_failures)
        self._spares_some = timeout == "auto"
        self._dispatcher = Dispatcher(_TIMEOUT_S if timeout == "auto" else timeout)

    @property
    def functions(self) -> dict[str, object]:
        return dict(self._functions)

    @property
    def unconditional(self) -> list[str]:
        """The functions that score responses of every label of the recipe."""
        return self._weights.of_all

    @property
    def answer_columns(self) -> dict[str, str]:
        return scoring_columns(function for _, function in self._functions)

    def asking_for(self, argument: str) -> list[str]:
        """Return the functions whose signature names an argument."""
        return [
            name
            for name, function in self._functions
            if argument in inspect.signature(function).parameters
        ]

    def prepare(self) -> None:
        """Load what the functions need, so that it does not count as their time.

        :meth:`score` does so itself; call it earlier to fail before anything is generated.
        """
        for _, function in self._functions:
            if isinstance(function, RewardFunction):
                function.prepare()

    def close(self) -> None:
        """End the processes that functions have started; the next :meth:`score` starts them."""
        for _, function in self._functions:
            if isinstance(function, RewardFunction):
                function.close()

    def with_own_failures(self) -> Rewards:
        """Return the same functions with a count of failures of their own."""
        other = copy.copy(self)
        other._failures = Failures(self._failures.limit)
        return other

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
            failed: Responses that no function scores, as something went wrong with them before,
                and the reason.
            group_ids: Equal for the responses to one prompt; None: the prompt itself.

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
        inputs = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids}
        results = self._results(weights, inputs, columns, on_request or {}, lost=bool(failed))
        numbers: dict[Hashable, int] = {}
        groups = torch.tensor(
            [
                numbers.setdefault(group, len(numbers))
                for group in (map(repr, prompts) if group_ids is None else group_ids)
            ]
        ).long()
        return self._combine(results, weights, groups, failed or {}, limited=limited)

    def _results(
        self,
        weights: Float[Tensor, "B K"],
        inputs: Mapping[str, Sequence[Any]],
        columns: Sequence[Mapping[str, Any]],
        on_request: Mapping[str, Sequence[Any]],
        *,
        lost: bool,
    ) -> list[_Result]:
        """Call the functions, those that read others' values after these."""
        rows = [weight.isfinite().nonzero()[:, 0].tolist() for weight in weights.T]
        known: dict[str, list[float | None]] = {name: [None] * len(weights) for name in self.names}
        results: dict[int, _Result] = {}
        for wave in self._waves:
            tasks = {
                index: _Task(self._functions[index], rows[index], Journal(len(rows[index])))
                for index in wave
                if rows[index]
            }
            outcomes = self._dispatcher.run(
                [self._call(task, inputs, columns, on_request, known) for task in tasks.values()]
            )
            for (index, task), outcome in zip(tasks.items(), outcomes, strict=True):
                result = results[index] = self._read(task, outcome, lost=lost)
                for row, value in zip(task.rows, result.values, strict=True):
                    known[task.bound.name][row] = None if math.isnan(value) else value
        return [results[index] for index in sorted(results)]

    def _call(
        self,
        task: _Task,
        inputs: Mapping[str, Sequence[Any]],
        columns: Sequence[Mapping[str, Any]],
        on_request: Mapping[str, Sequence[Any]],
        known: Mapping[str, Sequence[float | None]],
    ) -> Call:
        """Return the call of a function, with its rows in lists of its own."""
        name, function = task.bound
        signature = inspect.signature(function)
        names = {column: None for row in task.rows for column in columns[row]}
        available = {
            **{column: [columns[row].get(column) for row in task.rows] for column in names},
            **{
                argument: [_copied(values[row]) for row in task.rows]
                for argument, values in inputs.items()
            },
            **{
                argument: [values[row] for row in task.rows]
                for argument, values in on_request.items()
                if argument in signature.parameters
            },
            "log_metric": task.journal.log_metric,
            "log_extra": task.journal.log_extra,
        }
        reads_others = name in self._inputs or OTHER_REWARDS in signature.parameters
        if reads_others and OTHER_REWARDS in names:
            raise RewardError(
                f"reward function {name!r} takes {OTHER_REWARDS!r}, the values of other rewards, "
                "and the data has a column of that name too: rename the column"
            )
        if name in self._inputs:
            available[OTHER_REWARDS] = OtherRewards(
                {other: [known[other][row] for row in task.rows] for other in self._inputs[name]}
            )
        ends = isinstance(function, RewardFunction) and function.ends_by_itself
        arguments = chosen_arguments(name, signature, available, filled_by_python(function))
        arguments |= _own_images(arguments)
        return Call(name, function, arguments, unlimited=self._spares_some and ends)

    def _combine(
        self,
        results: Sequence[_Result],
        weights: Float[Tensor, "B K"],
        groups: Int[Tensor, " B"],
        failed: Mapping[int, str],
        *,
        limited: bool,
    ) -> RewardResult:
        per_function = torch.full(weights.shape, math.nan, dtype=torch.float32)
        declined = torch.zeros(weights.shape, dtype=torch.bool)
        metrics, extras = self._logged(results, len(weights))
        failures: dict[str, str] = {}
        if failed:
            reason = first_failure(failed, f"{len(failed)} episodes failed")
            failures["environment"] = f"environment: {reason}"
            self._failures.log(failures["environment"])
        for result in results:
            name, rows = result.task.bound.name, result.task.rows
            column = self.names.index(name)
            per_function[rows, column] = torch.tensor(result.values, dtype=torch.float32)
            declined[rows, column] = torch.tensor(result.declined)
            if result.failure:
                failures[name] = f"{name}: {result.failure}"
                self._failures.log(failures[name])
        score = weighted_sum(
            per_function, weights, optional=self._optional, declined=declined, groups=groups
        )
        self._report_inapplicable(score, failures)
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
        called = weights.isfinite()
        missing = (per_function.isnan() & called).sum(dim=0) / called.sum(dim=0).clamp(min=1)
        mixed = score.mixed.double().mean(0)
        for kind, fractions in (("unscored_fraction", missing), ("mixed_fraction", mixed)):
            for name, fraction in zip(self.names, fractions.tolist(), strict=True):
                metrics[f"{name}/{kind}"] = fraction
        steps = None
        if self._has_steps:
            returned = [
                Returned(self.names.index(bound.name), bound.name, rows, result.outcome.value)
                for result in results
                for bound, rows, _ in [result.task]
            ]
            steps = weighted_steps(returned, weights)
        return RewardResult(
            scores=score.sums,
            per_function=per_function,
            names=self.names,
            metrics=metrics,
            extras=extras,
            failures=[*failures.values()],
            seconds={result.task.bound.name: result.outcome.seconds for result in results},
            weights=weights,
            turn_weights=(weights.nan_to_num(nan=0.0) * self._of_turns).sum(dim=1),
            step_rewards=steps,
        )

    def _report_inapplicable(self, score: Score, failures: dict[str, str]) -> None:
        """Report functions that apply to a part of a group, and responses that have none.

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

    def _read(self, task: _Task, outcome: Outcome, *, lost: bool) -> _Result:
        """Return the values of a function, what it logged, and what went wrong.

        Where responses were lost before, others may be without siblings by accident.
        """
        logged = task.journal.close()
        if lost and isinstance(outcome.error, NoSiblingsError):
            outcome = Outcome(PartialValues([math.nan] * len(task.rows), "", failed=0), None)
        name, error = task.bound.name, outcome.error
        if isinstance(error, RewardError):
            # a class of the user's own may have another constructor
            kind = MissingColumnError if isinstance(error, MissingColumnError) else RewardError
            raise kind(f"reward function {name!r}: {error}") from error
        if error is not None:
            self._failures.count(name, 1.0)
            own = type(error).__module__.startswith("lrlhf.")  # whose message suffices
            failure = str(error) if own else "".join(traceback.format_exception(error)).rstrip()
            missing, declined = [math.nan] * len(task.rows), [False] * len(task.rows)
            return _Result(task, missing, declined, failure, logged, outcome)
        values, declined, bad, failure = check_values(outcome.value, function=name, rows=task.rows)
        if isinstance(task.bound.function, RewardFunction):
            declined = [row and not task.bound.function.none_is_missing for row in declined]
        if isinstance(outcome.value, PartialValues):
            failure = "\n".join(filter(None, (failure, outcome.value.failure)))
            bad += outcome.value.failed
        self._failures.count(name, bad / len(task.rows))
        return _Result(task, values, declined, failure, logged, outcome)

    def _logged(
        self, results: Sequence[_Result], count: int
    ) -> tuple[dict[str, float], dict[str, list[Any]]]:
        """Return the means of all metrics, and every column spread over all responses."""
        metrics: dict[str, list[float]] = defaultdict(list)
        extras: dict[str, list[Any]] = {}
        prefixes = metric_prefixes(self._functions)
        for task, _, _, _, logged, _ in results:
            for metric, numbers in logged.metrics.items():
                metrics[prefixes[task.bound.name] + metric] += numbers
            for column, values in logged.extras.items():
                # a second column of a name gets its function's
                name = column if column not in extras else f"{task.bound.name}/{column}"
                extras[name] = [None] * count
                for row, value in zip(task.rows, values, strict=True):
                    extras[name][row] = value
        means = {name: math.fsum(numbers) / len(numbers) for name, numbers in metrics.items()}
        return means, extras


_WINDOW = 100
"""Responses of which more than half must not have failed: batches may be small, and a single
accident is no reason to stop."""
_ENOUGH = 20
"""Responses before their share means something."""
_COMPLETE_BATCH = 4
"""Responses of a call that do not all fail by accident."""


class NoRewards(Rewards):
    """Scores every response 0; those whose episode failed have none.

    There is no limit such as ``max_unscorable_fraction`` of `Rewards`. It refuses only an
    environment that is broken: where more than half of the last 100 responses failed, as soon as
    20 are known, or all of a call with 4 or more.
    """

    def __init__(self) -> None:
        self.names = ()
        self._functions = []
        self._failures = Failures(None)
        self._recent: list[bool] = []
        """Of the last responses: whether their episodes failed."""

    def with_own_failures(self) -> NoRewards:
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
            reason = first_failure(failed, f"{len(failed)} episodes failed")
            failures.append(f"environment: {reason}")
            self._failures.log(failures[0])
        if limited:
            self._check([row in failed for row in range(len(prompts))], failures)
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

    def _check(self, failed: list[bool], failures: Sequence[str]) -> None:
        """Count the responses of a call, and check whether too many of the last ones failed."""
        self._recent = [*self._recent, *failed][-max(_WINDOW, len(failed)) :]
        recent = self._recent
        if len(failed) >= _COMPLETE_BATCH and all(failed):
            recent = failed
        elif not any(failed) or len(recent) < _ENOUGH or 2 * sum(recent) <= len(recent):
            return
        raise RewardError(
            f"{sum(recent)} of the last {len(recent)} episodes failed, and a teacher sees none of "
            f"them. Repair the environment. First failure of this batch: {failures[0]}"
        )


def _copied(value: Any) -> Any:
    """Return text as it is, and the turns of a chat or token ids as a list that may be changed."""
    if isinstance(value, str):
        return value
    # with the parts of messages, which rows and records share: functions put images into them
    copied = [copy.deepcopy({**entry}) if isinstance(entry, Mapping) else entry for entry in value]
    return with_segments(copied, getattr(value, "segments", None))


def _own_images(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Give a function images that it may change: rows, functions and the rollout share theirs.

    The pixels are copied by Pillow, and only of an image that is drawn on.
    """
    views: dict[int, Any] = {}

    def view(image: Any) -> Any:
        if not isinstance(image, Image.Image):
            return image
        if id(image) not in views:
            views[id(image)] = own = Image.Image()
            image.load()
            vars(own).update(vars(image), info={**image.info})
            own.readonly = 1
        return views[id(image)]

    own: dict[str, Any] = {}
    if "images" in arguments:
        own["images"] = [
            [*map(view, row)] if isinstance(row, list | tuple) else row
            for row in arguments["images"]
        ]
    if "episodes" in arguments:
        own["episodes"] = [
            replace(one, images=tuple(map(view, one.images))) if isinstance(one, Episode) else one
            for one in arguments["episodes"]
        ]
    return own


def as_rewards(rewards: object) -> Rewards:
    """Return `Rewards` as they are, and of a function, or several, with weight 1 for each."""
    if isinstance(rewards, list | tuple | dict):
        return Rewards(dict(rewards) if isinstance(rewards, dict) else list(rewards))
    if callable(rewards) and not hasattr(rewards, "names"):
        return Rewards([rewards])
    return cast(Rewards, rewards)


def metric_prefixes(functions: Sequence[BoundFunction]) -> dict[str, str]:
    """Return the prefix of the metrics of each function, often empty.

    It depends on the functions alone and not on what they log, which differs between batches and
    processes: a name must not change its owner there.

    Args:
        functions: All that log together.

    Returns:
        The function's name where another one may log the same: both are of one class, or both are
        the user's own and take ``log_metric``.
    """

    def can_log(function: Callable[..., Any]) -> bool:
        parameters = inspect.signature(function).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        return takes_all or "log_metric" in parameters

    def is_own(function: Callable[..., Any]) -> bool:
        """Whether a function is the user's or calls one, so that its metrics are unknown."""
        if isinstance(function, RewardFunction) and function.forwards_columns:
            return True
        return not type(function).__module__.startswith("lrlhf.")

    plain = [(name, unwrapped(function)) for name, function in functions if can_log(function)]
    shared = {
        name
        for index, (name, a) in enumerate(plain)
        for _, b in plain[:index] + plain[index + 1 :]
        if isinstance(a, type(b)) or isinstance(b, type(a)) or (is_own(a) and is_own(b))
    }
    return {name: f"{name}/" if name in shared else "" for name, _ in functions}


class OtherRewards(dict[str, list[float | None]]):
    """Values of other rewards for a function: one per response under each name."""

    def __missing__(self, name: str) -> list[float | None]:
        raise RewardError(
            f"it reads the values of {name!r}{did_you_mean(name, self)}, and has those of "
            f"{', '.join(self) or 'no other reward'}: list that function before it, or name it in "
            "inputs"
        )

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, ({**self},)  # other processes need not have this library


def complete_inputs(
    functions: Sequence[BoundFunction], chosen: Mapping[str, Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """Return for each function that reads values of others their names.

    Args:
        functions: In the order of the configuration.
        chosen: By the user; others whose signature names ``rewards`` read all before them.

    Raises:
        ValueError: A name is unknown, a chosen function takes no values of others, or one that
            needs them has none before it.
    """
    names = [name for name, _ in functions]
    check_known(chosen, names, "inputs")
    inputs: dict[str, tuple[str, ...]] = {}
    for index, (name, function) in enumerate(functions):
        parameters = inspect.signature(function).parameters
        argument = parameters.get(OTHER_REWARDS)
        if name in chosen:
            check_known(chosen[name], names, f"inputs[{name!r}]")
            takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
            # in a class of rewards `**columns` only means that it ignores the others
            uses_all = not isinstance(function, RewardFunction) or function.forwards_columns
            if argument is None and not (takes_all and uses_all):
                raise ValueError(
                    f"inputs[{name!r}]: the function has no argument {OTHER_REWARDS!r} that could "
                    "take the values of other rewards: add it, or drop the entry"
                )
            inputs[name] = tuple(chosen[name])
        elif argument is not None and index:
            inputs[name] = tuple(names[:index])
        elif argument is not None and argument.default is argument.empty:
            raise ValueError(
                f"reward function {name!r} takes {OTHER_REWARDS!r}, the values of the functions "
                "before it, and it is the first: list it after them, or name them in inputs (a "
                "data column of that name needs another one)"
            )
    return inputs


def in_waves(names: Sequence[str], inputs: Mapping[str, Sequence[str]]) -> list[list[int]]:
    """Order the functions: each wave can be called at once, after those before it.

    Returns:
        Indices in ``names``, ascending in each wave.

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


class Failures:
    """Counts the failures of each function over a run, and logs every kind of them once.

    Args:
        limit: See ``max_failures`` of `Rewards`.

    Raises:
        ValueError: It is below 1.
    """

    def __init__(self, limit: int | None) -> None:
        if limit is not None and limit < 1:
            raise ValueError(f"max_failures is {limit}; it must be 1 or more, or null")
        self.limit = limit
        self.counts: dict[str, float] = defaultdict(float)
        """Batches in which a function failed, less what was forgiven."""
        self._logged: set[str] = set()

    def count(self, name: str, part: float) -> None:
        """Note the part of a batch for which a function failed, from 0 to 1."""
        count = self.counts[name] + part - (1 - part) * _FORGIVEN
        self.counts[name] = max(0.0, round(count, 9))  # ten tenths are one

    def log(self, failure: str) -> None:
        """Log a failure that was not there before; it begins with the function's name."""
        name, _, text = failure.partition(": ")
        summary = f"{name}: {summed_up(text)}"
        if summary not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(summary)
            logger.error("reward function %s", failure)

    def warn(self, text: str) -> None:
        """Log what is no failure, once."""
        if text not in self._logged:
            self._logged.add(text)
            logger.warning("%s", text)

    def check(self, failures: Mapping[str, str]) -> None:
        """Check the counts of the functions that failed now.

        Raises:
            RewardError: One has failed too often.
        """
        for name, failure in failures.items():
            if self.limit is not None and self.counts[name] >= self.limit:
                raise RewardError(
                    f"reward function {name!r} failed in {self.limit} batches of this "
                    f"run, less one for every ten without failure. Repair it, or raise "
                    f"max_failures. The last failure: {summed_up(failure, of=name)}"
                )


def summed_up(failure: str, *, of: str = "") -> str:
    """Return what sums a failure up, its last line: the exception, whose traceback was logged."""
    last = failure.splitlines()[-1]
    return last if not of or last.startswith(f"{of}: ") else f"{of}: {last}"


def check_quota(
    score: Score,
    per_function: Float[Tensor, "B K"],
    weights: Float[Tensor, "B K"],
    *,
    names: Sequence[str],
    failures: Sequence[str],
    allowed: float,
) -> None:
    """Check whether enough responses of a batch have a score, of those that a function applies to.

    Args:
        score: Of the responses.
        per_function: Values of the functions; NaN: none.
        weights: NaN: a function was not called.
        names: Of the functions.
        failures: What went wrong.
        allowed: Part of the batch that may lack a score.

    Raises:
        RewardError: More of it does.
    """
    unscorable = score.sums.isnan() & ~score.inapplicable
    count = int(unscorable.sum())
    if count <= allowed * len(unscorable):
        return
    counted = weights.isfinite() & (weights != 0)
    missing = (per_function.isnan() & counted & unscorable[:, None]).sum(dim=0)
    functions = ", ".join(
        f"{name} ({count} without a value)"
        for name, count in zip(names, missing.tolist(), strict=True)
        if count
    )
    first = "none: the functions had no value"
    if failures:
        name, _, text = failures[0].partition(": ")
        first = summed_up(text, of=name)
    several = len(names) > 1
    # which may return None for a response to which they do not apply
    advice = "list those whose value may be missing under optional, " if several else ""
    raise RewardError(
        f"{'not every' if several else 'no'} reward could score {count} of {len(unscorable)} "
        f"responses (the first is response {int(unscorable.nonzero()[0])}; allowed: "
        f"{allowed:.0%}). Functions: {functions}. Repair them, give them "
        f"more time with timeout, {advice}or accept more with max_unscorable_fraction. First "
        f"failure: {first}"
    )
