"""All reward functions at once, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from lrlhf.functional.names import import_function
from lrlhf.rewards.builtin import BUILTIN_REWARDS
from lrlhf.rewards.completions import Completion
from lrlhf.rewards.functions import (
    NamedReward,
    RewardFunction,
    checked_values,
    default_name,
    named_reward,
)
from lrlhf.rewards.result import RewardError, RewardResult

_log = logging.getLogger(__name__)


class Rewards:
    """Scores responses with one or more functions, all of them at the same time.

    A function that raises or runs out of time scores nothing in that call: its values are NaN, its
    traceback is kept. A response that no function could score has no score and is left out of
    training; too many of those stop the run.

    Args:
        functions: Callables (see `lrlhf.rewards.functions.RewardFunction`), names of built-in
            rewards, or import paths.
        weights: Weight of each function in the score; None: 1 each.
        names: Name of each function in logs; None: the functions' own.
        timeout: Seconds that one call of a function may take; None: as long as it likes.
        max_unscorable_fraction: Stop when more than this share of a batch has no score.
        recipes: Weights by function name for each label: a row is scored with the recipe of its
            label in place of ``weights``; functions that a recipe leaves out weigh 0 there.
        label_column: Column that holds the label.

    Raises:
        RewardError: A name is unknown or appears twice, or the lists differ in length.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction | str],
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
        timeout: float | None = 60.0,
        max_unscorable_fraction: float = 0.1,
        recipes: Mapping[str, Mapping[str, float]] | None = None,
        label_column: str = "label",
    ) -> None:
        if not functions:
            raise RewardError("rewards.functions is empty; name at least one reward")
        callables = [_resolved(function) for function in functions]
        chosen = list(names) if names is not None else [default_name(c) for c in callables]
        factors = list(weights) if weights is not None else [1.0] * len(callables)
        for option, values in (("weights", factors), ("names", chosen)):
            if len(values) != len(callables):
                raise RewardError(
                    f"rewards.{option} has {len(values)} entries for {len(callables)} functions"
                )
        if len(set(chosen)) != len(chosen):
            twice = next(name for name in chosen if chosen.count(name) > 1)
            raise RewardError(
                f"two rewards are called {twice!r}; tell them apart with rewards.names"
            )
        if not 0 <= max_unscorable_fraction <= 1:
            raise RewardError(
                f"rewards.max_unscorable_fraction is {max_unscorable_fraction}; it lies in [0, 1]"
            )
        if timeout is not None and timeout <= 0:
            raise RewardError(f"rewards.timeout is {timeout}; it must be above 0 seconds")
        self.timeout = timeout
        self.max_unscorable_fraction = max_unscorable_fraction
        self.label_column = label_column
        self._rewards = [
            named_reward(function, name=name, weight=weight)
            for function, name, weight in zip(callables, chosen, factors, strict=True)
        ]
        self.recipes = self._checked_recipes(recipes)
        self._said: set[str] = set()

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each function."""
        return tuple(reward.name for reward in self._rewards)

    def score(
        self,
        *,
        prompts: Sequence[Any],
        completions: Sequence[Completion],
        completion_ids: Sequence[Sequence[int]],
        columns: Sequence[Mapping[str, Any]],
    ) -> RewardResult:
        """Score ``B`` responses.

        Args:
            prompts: Prompt of each response, text or chat.
            completions: The responses, text or chat turns.
            completion_ids: Token ids of the responses.
            columns: Other columns of each response's row.

        Raises:
            RewardError: A function returned something that is no list of numbers, needs a column
                that is missing, or too many responses have no score.
        """
        rows = len(completions)
        notes = _Notes(rows)
        offered: dict[str, Any] = {
            **_by_column(columns),
            "prompts": list(prompts),
            "completions": list(completions),
            "completion_ids": [list(ids) for ids in completion_ids],
        }
        answers = self._call_all(offered, notes)
        failures: list[str] = []
        table = torch.full((rows, len(self._rewards)), math.nan)
        for column, (reward, answer) in enumerate(zip(self._rewards, answers, strict=True)):
            if isinstance(answer, _Failure):
                failures.append(f"reward {reward.name!r}: {answer.text}")
                self._say_once(reward.name, answer)
                continue
            table[:, column] = torch.tensor(checked_values(answer, name=reward.name, rows=rows))
        scores = self._weighted(table, columns)
        self._check_quota(scores, table, failures)
        metrics, extras = notes.close()
        return RewardResult(
            scores=scores,
            per_function=table,
            names=self.names,
            metrics=metrics,
            extras=extras,
            failures=tuple(failures),
        )

    def _weighted(self, table: Tensor, columns: Sequence[Mapping[str, Any]]) -> Tensor:
        weights = torch.tensor([[reward.weight for reward in self._rewards]])
        if self.recipes:
            weights = torch.stack([self._recipe(row, index) for index, row in enumerate(columns)])
        weights = weights.expand_as(table)
        known = ~table.isnan() & ((weights != 0) | (table.shape[1] == 1))
        scores = (table.nan_to_num(nan=0.0) * weights).sum(dim=1)
        return torch.where(known.any(dim=1), scores, torch.full_like(scores, math.nan))

    def _recipe(self, row: Mapping[str, Any], index: int) -> Tensor:
        label = row.get(self.label_column)
        if label not in self.recipes:
            close = get_close_matches(str(label), list(self.recipes), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise RewardError(
                f"row {index} has {self.label_column} {label!r}, which no recipe names{hint} "
                f"(recipes: {', '.join(self.recipes)})"
            )
        recipe = self.recipes[label]
        return torch.tensor([recipe.get(reward.name, 0.0) for reward in self._rewards])

    def _checked_recipes(
        self, recipes: Mapping[str, Mapping[str, float]] | None
    ) -> dict[str, dict[str, float]]:
        checked = {label: dict(recipe) for label, recipe in (recipes or {}).items()}
        for label, recipe in checked.items():
            for name in recipe:
                if name not in self.names:
                    raise RewardError(
                        f"rewards.recipes[{label!r}] names {name!r}, which is none of the rewards: "
                        f"{', '.join(self.names)}"
                    )
        return checked

    def _check_quota(self, scores: Tensor, table: Tensor, failures: Sequence[str]) -> None:
        missing = int(scores.isnan().sum())
        if missing <= self.max_unscorable_fraction * len(scores):
            return
        counts = ", ".join(
            f"{name}: {int(table[:, column].isnan().sum())}"
            for column, name in enumerate(self.names)
        )
        cause = f"\nfirst failure: {failures[0]}" if failures else ""
        raise RewardError(
            f"no reward could score {missing} of {len(scores)} responses, more than "
            f"rewards.max_unscorable_fraction ({self.max_unscorable_fraction}) allows; values that "
            f"are None or failed, by reward: {counts}.{cause}"
        )

    def _call_all(self, offered: Mapping[str, Any], notes: _Notes) -> list[Any]:
        # a pool of its own per call: a function that never returns must not block the next one
        pool = ThreadPoolExecutor(len(self._rewards), thread_name_prefix="reward")
        try:
            futures = [
                pool.submit(self._call, reward, reward.select(_with_notes(offered, notes, reward)))
                for reward in self._rewards
            ]
            return [self._answer(future) for future in futures]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def _call(reward: NamedReward, keywords: dict[str, Any]) -> Any:
        answer = reward.function(**keywords)
        if inspect.isawaitable(answer):
            return asyncio.run(_awaited(answer))
        return answer

    def _answer(self, future: Future[Any]) -> Any:
        try:
            return future.result(timeout=self.timeout)
        except FutureTimeoutError:
            return _Failure(f"gave no answer within {self.timeout} s (rewards.timeout)", "timeout")
        except RewardError:
            raise
        except Exception as error:  # noqa: BLE001  foreign code: whatever it raises is its failure
            text = "".join(traceback.format_exception(error)).strip()
            return _Failure(text, f"{type(error).__name__}: {error}")

    def _say_once(self, name: str, failure: _Failure) -> None:
        message = f"reward {name!r} failed and scored nothing: {failure.summary}"
        if message not in self._said:
            self._said.add(message)
            _log.warning(message)


class _Failure:
    def __init__(self, text: str, summary: str) -> None:
        self.text = text
        self.summary = summary


class _Notes:
    """Collects log_metric and log_extra of one call; deaf to functions that answer too late."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._lock = threading.Lock()
        self._open = True
        self._metrics: dict[str, float] = {}
        self._extras: dict[str, list[Any]] = {}

    def metric(self, name: str, value: float) -> None:
        with self._lock:
            if self._open:
                self._metrics[name] = float(value)

    def extra(self, column: str, values: Sequence[Any]) -> None:
        if len(values) != self._rows:
            raise RewardError(
                f"log_extra({column!r}) got {len(values)} values for {self._rows} completions"
            )
        with self._lock:
            if self._open:
                self._extras[column] = list(values)

    def close(self) -> tuple[dict[str, float], dict[str, list[Any]]]:
        with self._lock:
            self._open = False
            return dict(self._metrics), dict(self._extras)


def _with_notes(offered: Mapping[str, Any], notes: _Notes, reward: NamedReward) -> dict[str, Any]:
    def log_metric(name: str, value: float) -> None:
        notes.metric(f"{reward.name}/{name}", value)

    return {**offered, "log_metric": log_metric, "log_extra": notes.extra}


async def _awaited(answer: Any) -> Any:
    return await answer


def _by_column(columns: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = {name for row in columns for name in row}
    return {name: [row.get(name) for row in columns] for name in names}


def _resolved(function: RewardFunction | str) -> RewardFunction:
    if not isinstance(function, str):
        if not callable(function):
            raise RewardError(f"a reward must be callable, got {type(function).__name__}")
        return function
    if function in BUILTIN_REWARDS:
        builtin: RewardFunction = BUILTIN_REWARDS[function]()
        return builtin
    try:
        found = import_function("reward", function, BUILTIN_REWARDS)
    except ValueError as error:
        raise RewardError(str(error)) from error
    if inspect.isclass(found):
        instance: RewardFunction = found()
        return instance
    return found
