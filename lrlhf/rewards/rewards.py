"""The reward functions of a run, and how they become one score per response."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lrlhf.rewards.dispatch import Call, Dispatcher, Outcome
from lrlhf.rewards.failures import FailureCount
from lrlhf.rewards.function import (
    Completion,
    PartialValues,
    RewardError,
    RewardFunction,
    did_you_mean,
)
from lrlhf.rewards.function_weights import same_weights, weights_by_label
from lrlhf.rewards.functions.builtins import BUILTINS
from lrlhf.rewards.journal import Journal, Logged
from lrlhf.rewards.lookup import BoundFunction, NamedFunction, bind_functions, chosen_arguments
from lrlhf.rewards.result import RewardResult, weighted_sum
from lrlhf.rewards.reward_values import check_values
from lrlhf.types import Prompt

logger = logging.getLogger(__name__)

_MAX_LOGGED = 50
_TIMEOUT_S = 1800.0
"""For functions that may hang; far more than work takes."""


class _Responses(NamedTuple):
    """What is scored, one entry per response in each."""

    prompts: Sequence[Prompt]
    completions: Sequence[Completion]
    completion_ids: Sequence[Sequence[int]]
    columns: Sequence[Mapping[str, Any]]

    def arguments(self, rows: Sequence[int]) -> dict[str, Any]:
        """Return the given rows as keyword arguments, in lists that nobody else holds."""
        names = {name: None for row in rows for name in self.columns[row]}
        data = {name: [self.columns[row].get(name) for row in rows] for name in names}
        return data | {
            "prompts": [self.prompts[row] for row in rows],
            "completions": [self.completions[row] for row in rows],
            "completion_ids": [self.completion_ids[row] for row in rows],
        }


class _Asked(NamedTuple):
    """A function, the rows it is asked about, and what it logs."""

    bound: BoundFunction
    rows: list[int]
    journal: Journal


class Rewards:
    """Scores responses with several functions at once.

    The score of a response is the weighted sum of what the functions return for it. A response
    for which a function returns None has no score, as its sum would lack a part, unless the
    function is among ``optional``: then the others count alone. A function that raises, runs out
    of time or returns no number leaves its responses without its value in the same way, and is
    reported. Functions with weight 0, and those that the recipe does not ask, are never missed.

    Args:
        functions: List of reward functions: an import path (``my_rewards.brevity``), the short
            name of a built-in one (``exact_match``), or ``class_path`` with ``init_args``. A
            mapping gives them names.
        weights: One per function, as a list or by name; all 1 by default. 0: only logged.
        names: Under which the functions are logged; by default their own.
        timeout: Seconds that each function may take for a batch; null: no limit. ``auto`` is half
            an hour, and no limit for those that end by themselves: learned, remote and isolated
            rewards.
        max_unscorable_fraction: Stop if more than this part of a batch has no score.
        max_failures_in_a_row: Stop if a function fails as a whole in so many batches without a
            success; null: never.
        max_failures: Stop if a function fails in so many batches of the run, where a batch that
            fails in part counts as that part, and ten without failure make up for one; null:
            never. A resumed run counts anew.
        recipe: Weights by label instead of ``weights``: label, reward name, weight. A function is
            asked only about the responses whose label gives it a weight.
        label_column: Data column that holds the label for ``recipe``.
        optional: Names of functions that may have no value for a response.

    Raises:
        ValueError: The functions, names, weights or recipe do not fit together.
    """

    def __init__(  # noqa: PLR0913  the keys of a user's config
        self,
        functions: list[NamedFunction] | dict[str, NamedFunction],
        weights: list[float] | dict[str, float] | None = None,
        names: list[str] | None = None,
        timeout: float | Literal["auto"] | None = "auto",
        max_unscorable_fraction: float = 0.1,
        max_failures_in_a_row: int | None = 5,
        recipe: dict[str, dict[str, float]] | None = None,
        label_column: str = "label",
        max_failures: int | None = 10,
        optional: list[str] | None = None,
    ) -> None:
        if isinstance(timeout, int | float) and not timeout > 0:
            raise ValueError(f"timeout is {timeout}; give seconds above 0, or null for no limit")
        if not 0 <= max_unscorable_fraction <= 1:
            raise ValueError(
                f"max_unscorable_fraction is {max_unscorable_fraction}; it must lie in [0, 1]"
            )
        if recipe is not None and weights is not None:
            raise ValueError("weights and recipe exclude each other: drop one of the two")
        self._functions = bind_functions(functions, names, BUILTINS)
        self.names: tuple[str, ...] = tuple(name for name, _ in self._functions)
        self._weights = (
            same_weights(self.names, weights)
            if recipe is None
            else weights_by_label(self.names, recipe, label_column)
        )
        self._optional = _members(self.names, optional or [])
        self._max_unscorable_fraction = max_unscorable_fraction
        self._failures = FailureCount(self.names, max_failures_in_a_row, max_failures)
        self._spares_some = timeout == "auto"
        self._dispatcher = Dispatcher(_TIMEOUT_S if timeout == "auto" else timeout)
        self._logged: set[str] = set()

    def prepare(self) -> None:
        """Load what the functions need, so that it does not count as their time.

        :meth:`score` does so itself; call it earlier to fail before anything was generated.
        """
        for _, function in self._functions:
            if isinstance(function, RewardFunction):
                function.prepare()

    def score(
        self,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]],
        columns: Sequence[Mapping[str, Any]],
        *,
        limited: bool = True,
    ) -> RewardResult:
        """Score responses.

        Args:
            prompts: Text or chat turns, one per response.
            completions: Text, or the assistant's turns where the prompt is a chat.
            completion_ids: Token ids of each response as the engine returned them.
            columns: The other data columns of each response's row; where a column has the name of
                an argument of :class:`RewardFunction`, the argument wins.
            limited: Whether ``max_unscorable_fraction`` holds for these responses by themselves.

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
        responses = _Responses(prompts, completions, completion_ids, columns)
        asked = [
            _Asked(bound, rows, Journal(bound.name, len(rows)))
            for bound, weight in zip(self._functions, weights.T, strict=True)
            if (rows := weight.isfinite().nonzero()[:, 0].tolist())
        ]
        calls = [_call(entry, responses, spared=self._spares_some) for entry in asked]
        outcomes = self._dispatcher.run(calls)
        return self._combine(asked, outcomes, weights, limited=limited)

    def _combine(
        self,
        asked: Sequence[_Asked],
        outcomes: Sequence[Outcome],
        weights: Float[Tensor, "B K"],
        *,
        limited: bool,
    ) -> RewardResult:
        journals = [(entry, entry.journal.close()) for entry in asked]
        per_function = torch.full(weights.shape, math.nan, dtype=torch.float32)
        failures: list[str] = []
        for entry, outcome in zip(asked, outcomes, strict=True):
            values, failure = self._read(entry, outcome)
            column = self.names.index(entry.bound.name)
            per_function[entry.rows, column] = torch.tensor(values, dtype=torch.float32)
            if failure:
                failures.append(f"{entry.bound.name}: {failure}")
        self._log(failures)
        scores = weighted_sum(per_function, weights, optional=self._optional)
        self._failures.check(failures)
        if limited:
            self._check_quota(scores, per_function, weights, failures)
        return RewardResult(
            scores=scores,
            per_function=per_function,
            names=self.names,
            metrics=_metrics(journals) | self._unscored(per_function, weights),
            extras=_extras(journals, len(weights)),
            failures=failures,
        )

    def _read(self, entry: _Asked, outcome: Outcome) -> tuple[list[float], str]:
        """Return the values of a function, NaN where there is none, and what went wrong."""
        name, error = entry.bound.name, outcome.error
        if isinstance(error, RewardError):
            raise RewardError(f"reward function {name!r}: {error}") from error
        if error is not None:
            self._failures.add(name, 1.0)
            return [math.nan] * len(entry.rows), _explain(error)
        values, bad, failure = check_values(outcome.value, function=name, rows=entry.rows)
        if isinstance(outcome.value, PartialValues):
            failure = "\n".join(filter(None, (failure, outcome.value.failure)))
            bad += outcome.value.failed
        self._failures.add(name, bad / len(entry.rows))
        return values, failure

    def _log(self, failures: Sequence[str]) -> None:
        for failure in failures:
            summary = _summary(failure)
            if summary not in self._logged and len(self._logged) < _MAX_LOGGED:
                self._logged.add(summary)
                logger.error("reward function %s", failure)

    def _check_quota(
        self,
        scores: Float[Tensor, " B"],
        per_function: Float[Tensor, "B K"],
        weights: Float[Tensor, "B K"],
        failures: Sequence[str],
    ) -> None:
        unscorable = scores.isnan()
        count = int(unscorable.sum())
        if count <= self._max_unscorable_fraction * len(scores):
            return
        wanted = weights.isfinite() & (weights != 0)
        silent = (per_function.isnan() & wanted & unscorable[:, None]).sum(dim=0)
        blame = ", ".join(
            f"{name} ({missing} without a value)"
            for name, missing in zip(self.names, silent.tolist(), strict=True)
            if missing
        )
        first = failures[0] if failures else "none: the functions returned None"
        several = len(self.names) > 1
        # which may return None for a response that they have nothing to say about
        advice = "list those whose value may be missing under optional, " if several else ""
        raise RewardError(
            f"{'not every' if several else 'no'} reward could score {count} of {len(scores)} "
            f"responses (the first is response {int(unscorable.nonzero()[0])}; allowed: "
            f"{self._max_unscorable_fraction:.0%}). Functions: {blame}. Repair them, give them "
            f"more time with timeout, {advice}or accept more with max_unscorable_fraction. First "
            f"failure: {first}"
        )

    def _unscored(
        self, per_function: Float[Tensor, "B K"], weights: Float[Tensor, "B K"]
    ) -> dict[str, float]:
        asked = weights.isfinite()
        missing = (per_function.isnan() & asked).sum(dim=0) / asked.sum(dim=0).clamp(min=1)
        return {
            f"{name}/unscored_fraction": fraction
            for name, fraction in zip(self.names, missing.tolist(), strict=True)
        }


def _members(names: Sequence[str], optional: Sequence[str]) -> Bool[Tensor, " K"]:
    for name in optional:
        if name not in names:
            raise ValueError(
                f"optional: there is no reward {name!r}{did_you_mean(name, names)} (rewards: "
                f"{', '.join(names)})"
            )
    return torch.tensor([name in optional for name in names])


def _call(entry: _Asked, responses: _Responses, *, spared: bool) -> Call:
    """Return what is called; ``spared``: without a time limit if it needs none."""
    function = entry.bound.function
    available = responses.arguments(entry.rows) | {
        "log_metric": entry.journal.log_metric,
        "log_extra": entry.journal.log_extra,
    }
    return Call(
        entry.bound.name,
        function,
        chosen_arguments(entry.bound, available),
        unlimited=spared and isinstance(function, RewardFunction) and function.ends_by_itself,
    )


def _explain(error: BaseException) -> str:
    if type(error).__module__.startswith("lrlhf."):  # says itself what went wrong
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()


def _summary(failure: str) -> str:
    """Return the name and the last line, which says what was raised."""
    name, _, text = failure.partition(": ")
    return f"{name}: {text.splitlines()[-1]}"


def _metrics(journals: Sequence[tuple[_Asked, Logged]]) -> dict[str, float]:
    logged: dict[str, list[float]] = {}
    for _, (metrics, _) in journals:
        for name, values in metrics.items():
            logged.setdefault(name, []).extend(values)
    return {name: math.fsum(values) / len(values) for name, values in logged.items()}


def _extras(journals: Sequence[tuple[_Asked, Logged]], count: int) -> dict[str, list[Any]]:
    """Spread every column over all responses; a second one of a name gets its function's."""
    extras: dict[str, list[Any]] = {}
    for entry, (_, columns) in journals:
        for column, values in columns.items():
            name = column if column not in extras else f"{entry.bound.name}/{column}"
            extras[name] = [None] * count
            for row, value in zip(entry.rows, values, strict=True):
                extras[name][row] = value
    return extras
