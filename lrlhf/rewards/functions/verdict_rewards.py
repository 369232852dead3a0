"""Rewards of a judge in training: whether its verdict on a pair is right, and whether it is one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lrlhf.rewards.function import (
    Completion,
    LogExtra,
    RewardError,
    RewardFunction,
    column_of,
    completion_text,
)
from lrlhf.rewards.judge.verdicts import SWAPPED, Choice, FormName, verdict_form
from lrlhf.rewards.reward_values import shorten
from lrlhf.statistics.intervals import Outcomes


class _Said(NamedTuple):
    """What is kept of a response."""

    pair: Hashable
    """Responses of one pair depend on each other; without a pair, those of one row."""
    exchanged: bool
    gold: Choice | None
    verdict: Choice | None


class VerdictCorrect(RewardFunction):
    """1 where the verdict in the response is the right one, else 0, as without a clear verdict.

    A response that was cut off has none, whatever its last line says. No value where the row has no
    right one. The rows are those of `VerdictTasks`. Responses are
    logged with ``verdict``, ``correct`` and ``reasoning``.

    Evaluations also say, each with a 95 % interval that holds answers to one pair for dependent:
    ``accuracy``; ``malformed``, the share without a verdict; ``accuracy_first`` and
    ``accuracy_second``, of pairs whose better candidate stands first or second, which are equal
    for a judge that does not mind positions; and of pairs that are asked about in both orders
    ``swap_consistency``, the share whose verdicts are both clear and name the same candidate.

    Args:
        form: Of the verdict: ``line``, ``direct`` or ``answer``, as of the data.
        gold_column: Data column with the right verdict: ``A``, ``B`` or ``tie``.
    """

    share_names = ("accuracy", "malformed", "accuracy_first", "accuracy_second", "swap_consistency")

    @classmethod
    def columns_read(cls, options: Mapping[str, Any]) -> Iterable[str]:
        return (str(options.get("gold_column", "gold")),)

    def __init__(self, form: FormName = "line", gold_column: str = "gold") -> None:
        self._form = verdict_form(form)
        self._gold_column = gold_column

    def __call__(
        self,
        *,
        completions: Sequence[Completion],
        log_extra: LogExtra,
        truncated: Sequence[bool] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        gold = column_of(columns, self._gold_column, setting="gold_column")
        gold = [self._checked(one) for one in gold]
        texts = [completion_text(completion) for completion in completions]
        verdicts = [*map(self._verdict, texts, _all_of(truncated, texts))]
        correct = [
            None if right is None else right == verdict
            for right, verdict in zip(gold, verdicts, strict=True)
        ]
        log_extra("verdict", verdicts)
        log_extra("correct", correct)
        log_extra("reasoning", [self._form.reasoning(text) for text in texts])
        return [None if one is None else float(one) for one in correct]

    def answer_of(self, text: str, *, truncated: bool = False) -> str | None:
        """Return the verdict, for majority votes."""
        return self._verdict(text, truncated)

    def observed(
        self, text: str, columns: Mapping[str, Any], *, truncated: bool, row: Hashable
    ) -> _Said:
        """Return what the shares need of a response."""
        pair, exchanged = columns.get("pair"), bool(columns.get("exchanged"))
        gold = self._checked(columns.get(self._gold_column))
        verdict = self._verdict(text, truncated)
        return _Said(("row", row) if pair is None else str(pair), exchanged, gold, verdict)

    def _verdict(self, text: str, truncated: bool) -> Choice | None:
        return None if truncated else self._form.read(text)

    def _checked(self, gold: Any) -> Choice | None:
        if gold is None or gold in [*SWAPPED]:
            right: Choice | None = gold
            return right
        raise RewardError(
            f"gold_column: column {self._gold_column!r} holds {shorten(gold)}, no verdict; it must "
            f"be {', '.join(SWAPPED)}, or null where there is no right one"
        )

    def shares(self, observed: Sequence[_Said]) -> dict[str, Outcomes]:
        """Return what all responses say, see the class."""
        judged = [one for one in observed if one.gold is not None]
        right = {
            name: [one for one in judged if one.gold in golds]
            for name, golds in (
                ("accuracy", ("A", "B", "tie")),
                ("accuracy_first", ("A",)),
                ("accuracy_second", ("B",)),
            )
        }
        found = {
            name: Outcomes([one.verdict == one.gold for one in own], [one.pair for one in own])
            for name, own in right.items()
        }
        malformed = [one.verdict is None for one in observed]
        found["malformed"] = Outcomes(malformed, [one.pair for one in observed])
        found["swap_consistency"] = _consistency(observed)
        return {name: one for name, one in found.items() if one.outcomes}


class VerdictFormat(RewardFunction):
    """1 where the response has a clear verdict of the wanted form and was not cut off, else 0.

    Args:
        form: Of the verdict: ``line``, ``direct`` or ``answer``, as of the data.
        reasoning: Whether some reasoning must stand before it.
    """

    def __init__(self, form: FormName = "line", reasoning: bool = False) -> None:
        self._form = verdict_form(form)
        self._reasoning = reasoning

    def __call__(
        self,
        *,
        completions: Sequence[Completion],
        truncated: Sequence[bool] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        cut = _all_of(truncated, completions)
        return [
            float(not ended and self._is_one(completion_text(one)))
            for one, ended in zip(completions, cut, strict=True)
        ]

    def _is_one(self, text: str) -> bool:
        if self._form.read(text) is None:
            return False
        return bool(self._form.reasoning(text)) or not self._reasoning


def _all_of(truncated: Sequence[bool] | None, responses: Sequence[Any]) -> Sequence[bool]:
    """Return which responses were cut off; where nobody knows, none was."""
    return [False] * len(responses) if truncated is None else truncated


def _consistency(observed: Sequence[_Said]) -> Outcomes:
    """Compare each answer to a pair with that in the other order, the first with the first."""
    orders: defaultdict[Hashable, tuple[list[_Said], list[_Said]]] = defaultdict(lambda: ([], []))
    for one in observed:
        orders[one.pair][one.exchanged].append(one)
    met = [
        (pair, given.verdict, exchanged.verdict)
        for pair, both in orders.items()
        for given, exchanged in zip(*both, strict=False)
    ]
    same = [
        one is not None and other is not None and SWAPPED[one] == other for _, one, other in met
    ]
    return Outcomes(same, [pair for pair, _, _ in met])
