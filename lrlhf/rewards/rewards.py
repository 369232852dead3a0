"""The reward functions of a run, and how they become one score per response."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from lrlhf.rewards.builtins import BUILTINS
from lrlhf.rewards.dispatch import Call, Dispatcher, Outcome
from lrlhf.rewards.function import Completion, PartialValues, RewardError, RewardFunction
from lrlhf.rewards.journal import Journal, Logged
from lrlhf.rewards.lookup import BoundFunction, NamedFunction, bind_functions, chosen_arguments
from lrlhf.rewards.result import RewardResult, weighted_sum
from lrlhf.rewards.values import check_values
from lrlhf.rewards.weights import same_weights, weights_by_label
from lrlhf.types import Prompt

logger = logging.getLogger(__name__)

_MAX_LOGGED = 50


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

    The score of a response is the weighted sum of what the functions return for it. A function
    that raises, runs out of time or returns no number leaves its responses without its value, and
    is reported; a response that is left without any value has no score.

    Args:
        functions: List of reward functions: an import path (``my_rewards.brevity``), the short
            name of a built-in one (``exact_match``), or ``class_path`` with ``init_args``. A
            mapping gives them names.
        weights: One per function, as a list or by name; all 1 by default. 0: only logged.
        names: Under which the functions are logged; by default their own.
        timeout: Seconds that each function may take for a batch; null: no limit.
        max_unscorable_fraction: Stop if more than this part of a batch has no score.
        max_failures_in_a_row: Stop if a function fails as a whole in so many batches without a
            success; null: never.
        recipe: Weights by label instead of ``weights``: label, reward name, weight. A function is
            asked only about the responses whose label gives it a weight.
        label_column: Data column that holds the label for ``recipe``.

    Raises:
        ValueError: The functions, names, weights or recipe do not fit together.
    """

    def __init__(
        self,
        functions: list[NamedFunction] | dict[str, NamedFunction],
        weights: list[float] | dict[str, float] | None = None,
        names: list[str] | None = None,
        timeout: float | None = 60.0,
        max_unscorable_fraction: float = 0.1,
        max_failures_in_a_row: int | None = 5,
        recipe: dict[str, dict[str, float]] | None = None,
        label_column: str = "label",
    ) -> None:
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout is {timeout}; give seconds above 0, or null for no limit")
        if not 0 <= max_unscorable_fraction <= 1:
            raise ValueError(
                f"max_unscorable_fraction is {max_unscorable_fraction}; it must lie in [0, 1]"
            )
        if max_failures_in_a_row is not None and max_failures_in_a_row < 1:
            raise ValueError(
                f"max_failures_in_a_row is {max_failures_in_a_row}; it must be 1 or more, or null"
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
        self._max_unscorable_fraction = max_unscorable_fraction
        self._max_failures_in_a_row = max_failures_in_a_row
        self._failures_in_a_row = dict.fromkeys(self.names, 0)
        self._dispatcher = Dispatcher(timeout)
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
    ) -> RewardResult:
        """Score responses.

        Args:
            prompts: Text or chat turns, one per response.
            completions: Text, or the assistant's turns where the prompt is a chat.
            completion_ids: Token ids of each response as the engine returned them.
            columns: The other data columns of each response's row; where a column has the name of
                an argument of :class:`RewardFunction`, the argument wins.

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
        calls = [_call(entry, responses) for entry in asked]
        outcomes = self._dispatcher.run(calls)
        return self._combine(asked, outcomes, weights)

    def _combine(
        self,
        asked: Sequence[_Asked],
        outcomes: Sequence[Outcome],
        weights: Float[Tensor, "B K"],
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
        scores = weighted_sum(per_function, weights)
        self._check_repeated(failures)
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
            self._failures_in_a_row[name] += 1
            return [math.nan] * len(entry.rows), _explain(error)
        self._failures_in_a_row[name] = 0
        values, failure = check_values(outcome.value, function=name, rows=entry.rows)
        if isinstance(outcome.value, PartialValues):
            failure = "\n".join(filter(None, (failure, outcome.value.failure)))
        return values, failure

    def _log(self, failures: Sequence[str]) -> None:
        for failure in failures:
            summary = _summary(failure)
            if summary not in self._logged and len(self._logged) < _MAX_LOGGED:
                self._logged.add(summary)
                logger.error("reward function %s", failure)

    def _check_repeated(self, failures: Sequence[str]) -> None:
        limit = self._max_failures_in_a_row
        for name, count in self._failures_in_a_row.items():
            if limit is not None and count >= limit:
                last = next(text for text in failures if text.startswith(f"{name}: "))
                raise RewardError(
                    f"reward function {name!r} failed in {count} batches in a row, so that the "
                    f"policy is trained on something else. Repair it, or raise "
                    f"max_failures_in_a_row. The last failure: {last}"
                )

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
        silent = (per_function.isnan() & weights.isfinite() & unscorable[:, None]).sum(dim=0)
        blame = ", ".join(
            f"{name} ({missing} without a value)"
            for name, missing in zip(self.names, silent.tolist(), strict=True)
            if missing
        )
        first = failures[0] if failures else "none: the functions returned None"
        raise RewardError(
            f"no reward could score {count} of {len(scores)} responses (the first is response "
            f"{int(unscorable.nonzero()[0])}; allowed: {self._max_unscorable_fraction:.0%}). "
            f"Functions: {blame}. Repair them, give them more time with timeout, or accept more "
            f"with max_unscorable_fraction. First failure: {first}"
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


def _call(entry: _Asked, responses: _Responses) -> Call:
    available = responses.arguments(entry.rows) | {
        "log_metric": entry.journal.log_metric,
        "log_extra": entry.journal.log_extra,
    }
    return Call(entry.bound.name, entry.bound.function, chosen_arguments(entry.bound, available))


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
