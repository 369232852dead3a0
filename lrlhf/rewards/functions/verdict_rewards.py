"""Rewards for training a judge: whether its verdict on a pair is right and well formed."""

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


class _Observed(NamedTuple):
    """The verdict of a response, for the shares of an evaluation."""

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

    Evaluations have further metrics, each with a 95 % interval in which answers to one pair are
    dependent: ``accuracy``; ``malformed``, the share without a verdict; ``accuracy_first`` and
    ``accuracy_second``, of pairs whose better candidate stands first or second, which are equal
    for a judge without position bias; and of pairs in both orders ``swap_consistency``, the share
    whose verdicts are both clear and name the same candidate.

    Args:
        form: Format of the verdict: ``line``, ``direct`` or ``answer``, as of the data.
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
        gold = [self._checked(right) for right in gold]
        texts = [completion_text(completion) for completion in completions]
        verdicts = [*map(self._verdict, texts, truncated or [False] * len(texts))]
        correct = [
            None if right is None else right == verdict
            for right, verdict in zip(gold, verdicts, strict=True)
        ]
        log_extra("verdict", verdicts)
        log_extra("correct", correct)
        log_extra("reasoning", [self._form.reasoning(text) for text in texts])
        return [None if value is None else float(value) for value in correct]

    def answer_of(self, text: str, *, truncated: bool = False) -> str | None:
        """Return the verdict, for majority votes."""
        return self._verdict(text, truncated)

    def observed(
        self, text: str, columns: Mapping[str, Any], *, truncated: bool, row: Hashable
    ) -> _Observed:
        """Return what the shares need of a response."""
        pair, exchanged = columns.get("pair"), bool(columns.get("exchanged"))
        gold = self._checked(columns.get(self._gold_column))
        verdict = self._verdict(text, truncated)
        return _Observed(("row", row) if pair is None else str(pair), exchanged, gold, verdict)

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

    def shares(self, observed: Sequence[_Observed]) -> dict[str, Outcomes]:
        """Return the metrics over all responses, see the class."""
        shares = {}
        for name, golds in (
            ("accuracy", ("A", "B", "tie")),
            ("accuracy_first", ("A",)),
            ("accuracy_second", ("B",)),
        ):
            own = [each for each in observed if each.gold in golds]
            correct = [each.verdict == each.gold for each in own]
            shares[name] = Outcomes(correct, [each.pair for each in own])
        malformed = [each.verdict is None for each in observed]
        shares["malformed"] = Outcomes(malformed, [each.pair for each in observed])
        shares["swap_consistency"] = _consistency(observed)
        return {name: share for name, share in shares.items() if share.outcomes}


class VerdictFormat(RewardFunction):
    """1 where the response has a clear verdict in the right format and was not cut off, else 0.

    Args:
        form: Format of the verdict: ``line``, ``direct`` or ``answer``, as of the data.
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
        values: list[float | None] = []
        cut_off = truncated or [False] * len(completions)
        for text, cut in zip(map(completion_text, completions), cut_off, strict=True):
            reasoned = bool(self._form.reasoning(text)) or not self._reasoning
            values.append(float(not cut and self._form.read(text) is not None and reasoned))
        return values


def _consistency(observed: Sequence[_Observed]) -> Outcomes:
    """Compare each answer to a pair with that in the other order, the first with the first."""
    orders: defaultdict[Hashable, tuple[list[Choice | None], list[Choice | None]]]
    orders = defaultdict(lambda: ([], []))
    for each in observed:
        orders[each.pair][each.exchanged].append(each.verdict)
    compared = [
        (pair, a is not None and b is not None and SWAPPED[a] == b)
        for pair, both in orders.items()
        for a, b in zip(*both, strict=False)
    ]
    return Outcomes([same for _, same in compared], [pair for pair, _ in compared])
