"""Values and logs of reward functions: how they are checked, weighed and added up."""

from __future__ import annotations

import itertools
import math
import numbers
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lrlhf.rewards.function import PartialValues, RewardError, StepReward, StepValues, did_you_mean

_LARGEST = torch.finfo(torch.float32).max
_MAX_SHOWN = 60


class CheckedValues(NamedTuple):
    """One number per response, NaN where there is none."""

    values: list[float]
    declined: list[bool]
    """Where the function returned None."""
    bad: int
    """Number of values that were no finite numbers, and not None."""
    malformed: str
    """Which values were no finite numbers; empty: none."""


def check_values(returned: Any, *, function: str, rows: Sequence[int]) -> CheckedValues:
    """Read the values that a reward function returned.

    Args:
        returned: A list, tuple, or one-dimensional tensor or array of numbers and None.
        function: Name for the errors.
        rows: Indices in the batch of the responses that it scored, for the errors.

    Returns:
        NaN for None, and for what is no finite number, which is reported as malformed unless it is
        a missing one of `PartialValues`.

    Raises:
        RewardError: There is not exactly one value per response, so that no value can be
            attributed to a response.
    """
    entries = _entries(returned, function, len(rows))
    if len(entries) != len(rows):
        raise RewardError(
            f"reward function {function!r} returned {len(entries)} values for {len(rows)} "
            f"responses (position {min(len(entries), len(rows))} has no counterpart); return one "
            "number or None per response, in their order"
        )
    declined = [entry is None for entry in entries]
    values = [math.nan if entry is None else finite_number(entry) for entry in entries]
    bad = [row for row, value in enumerate(values) if value is None]
    if isinstance(returned, PartialValues):
        bad = [row for row in bad if entries[row] == entries[row]]  # NaN alone is not itself
    malformed = ""
    if bad:
        first = entries[bad[0]]
        malformed = (
            f"returned {len(bad)} of {len(entries)} values that are no finite float32 number, the "
            f"first at position {rows[bad[0]]}: {shorten(first)} ({type(first).__name__})"
        )
    checked = [math.nan if value is None else value for value in values]
    return CheckedValues(checked, declined, len(bad), malformed)


def _entries(returned: Any, function: str, count: int) -> Sequence[Any]:
    if isinstance(returned, Tensor | np.ndarray):
        if returned.ndim == 1 and not _without_values(returned):
            return returned.tolist()
        description = f"{type(returned).__name__} of shape {tuple(returned.shape)}"
    elif isinstance(returned, Sequence) and not isinstance(returned, str | bytes):
        return returned
    else:
        description = f"{type(returned).__name__} {shorten(returned)}"
    raise RewardError(
        f"reward function {function!r} returned {description}, not a list of {count} numbers; "
        "return one number or None per response, in their order"
    )


class Returned(NamedTuple):
    """The values that a function returned for the responses of ``rows``."""

    column: int
    function: str
    rows: Sequence[int]
    values: Any


def weighted_steps(
    returned: Sequence[Returned], weights: Float[Tensor, "B K"]
) -> tuple[tuple[StepReward, ...], ...]:
    """Weigh the contributions of the steps of each response as its score is weighed.

    Args:
        returned: Values that are no `StepValues` have no steps.
        weights: Of each function for each response.

    Raises:
        RewardError: A function gave no list of steps for a response, or no finite reward.
    """
    weighted: list[list[StepReward]] = [[] for _ in weights]
    for column, function, rows, values in returned:
        if not isinstance(values, StepValues):
            continue
        if len(values.steps) != len(values):
            raise RewardError(
                f"reward function {function!r} returned the steps of {len(values.steps)} "
                f"responses and {len(values)} values; return both for every response"
            )
        for step in itertools.chain.from_iterable(values.steps):
            if finite_number(step.value) is None:
                raise RewardError(
                    f"reward function {function!r} gave {shorten(step.value)} for the step that "
                    f"ends after {step.end} characters; give a finite number"
                )
        for row, value, steps in zip(rows, values, values.steps, strict=True):
            weight = float(weights[row, column])
            if value is not None and weight:
                weighted[row] += [step._replace(value=weight * step.value) for step in steps]
    return tuple(map(tuple, weighted))


def finite_number(value: Any) -> float | None:
    """Return the value as a float, or None where it is no finite float32 number.

    Args:
        value: A number of Python or NumPy, or a tensor with one element and no axis.
    """
    if isinstance(value, Tensor | np.ndarray | np.generic) and value.ndim == 0:
        value = None if _without_values(value) else value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= _LARGEST else None  # also None for NaN


def _without_values(value: object) -> bool:
    """Whether it is a tensor whose numbers cannot be listed: sparse, or of the meta device."""
    return isinstance(value, Tensor) and (value.is_meta or value.layout != torch.strided)


def shorten(value: Any) -> str:
    """Return the value as Python writes it, cut for a message."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


class Logged(NamedTuple):
    """Everything logged until the journal was closed."""

    metrics: dict[str, list[float]]
    extras: dict[str, list[Any]]


@dataclass(frozen=True, kw_only=True)
class RewardResult:
    """Scores of a batch of responses, and their parts."""

    scores: Float[Tensor, " B"]
    """Weighted sum of what the functions returned; NaN: a part of it is missing."""
    per_function: Float[Tensor, "B K"]
    """Values of each function, unweighted; NaN: none."""
    names: tuple[str, ...]
    """Names of the functions, one per column of ``per_function``."""
    metrics: dict[str, float]
    """Logged by the functions, and for each the fraction of responses that it left unscored."""
    extras: dict[str, list[Any]]
    """Columns that the functions logged, one value per response."""
    failures: list[str]
    """What went wrong in this batch, tracebacks included; begins with the function's name."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Of each function for the batch, concurrently with the others; NaN where it failed."""
    weights: Float[Tensor, "B K"] | None = None
    """Of the values in the score; NaN: the function was not called; None: unknown."""
    turn_weights: Float[Tensor, " B"] | None = None
    """Of the rewards of single turns in the score; None: unknown."""
    step_rewards: tuple[tuple[StepReward, ...], ...] | None = None
    """Contributions of single steps to each score; None: no function has steps."""

    def with_metrics(self, other: RewardResult) -> RewardResult:
        """Return the same scores, with the values of further functions that do not count."""
        unweighted = torch.zeros_like(other.per_function, dtype=torch.float64)
        return replace(
            self,
            weights=None if self.weights is None else torch.cat([self.weights, unweighted], dim=1),
            per_function=torch.cat([self.per_function, other.per_function], dim=1),
            names=(*self.names, *other.names),
            metrics={**self.metrics, **other.metrics},
            extras={**other.extras, **self.extras},
            failures=[*self.failures, *other.failures],
        )


class Journal:
    """Collects the metrics and columns of one call, from any thread, until it is closed.

    A function that timed out may go on for minutes; what it logs then is dropped.

    Args:
        count: Responses that the function scores.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._lock = threading.Lock()
        self._closed = False
        self._logged = Logged({}, {})

    def log_metric(self, name: str, value: float) -> None:
        """Log a number; of several under the same name in one call, the mean counts.

        Raises:
            ValueError: It is no finite number.
        """
        number = finite_number(value)
        if number is None:
            raise ValueError(f"log_metric({name!r}, {value!r}): the value must be a finite number")
        with self._lock:
            if not self._closed:
                self._logged.metrics.setdefault(str(name), []).append(number)

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Add a column to the log of responses.

        Raises:
            ValueError: There is not exactly one value per response.
        """
        entries = list(values)
        if len(entries) != self._count:
            raise ValueError(
                f"log_extra({column!r}): {len(entries)} values for {self._count} responses; give "
                "one value per response"
            )
        with self._lock:
            if not self._closed:
                self._logged.extras[str(column)] = entries

    def close(self) -> Logged:
        """Return what was logged, and drop whatever comes later."""
        with self._lock:
            self._closed = True
            return self._logged


Recipe = Mapping[str, Mapping[str, float]]
"""Label -> reward name -> weight."""


@dataclass(frozen=True)
class Weights:
    """Weights of the functions, by label where there is a recipe."""

    names: Sequence[str]
    by_label: Mapping[str, Sequence[float]]
    """One per function; NaN: it does not score this label's responses."""
    label_column: str | None

    def rows(self, columns: Sequence[Mapping[str, object]]) -> Float[Tensor, "B K"]:
        """Return the weight of every function for every response; NaN: it is not called.

        Args:
            columns: The data columns of each response.

        Raises:
            RewardError: A response has no label or one that is not in the recipe.
        """
        table = [self._row(row, values) for row, values in enumerate(columns)]
        return torch.tensor(table, dtype=torch.float64).view(len(columns), len(self.names))

    @property
    def of_all(self) -> list[str]:
        """The functions that score every response, whatever its label."""
        return [
            name
            for name, *own in zip(self.names, *self.by_label.values(), strict=True)
            if all(map(math.isfinite, own))
        ]

    def _row(self, row: int, values: Mapping[str, object]) -> Sequence[float]:
        if self.label_column is None:
            return self.by_label[""]
        if self.label_column not in values:
            raise RewardError(
                f"response {row} has no column {self.label_column!r}"
                f"{did_you_mean(self.label_column, values)} (columns: "
                f"{', '.join(sorted(values)) or 'none'}); set label_column to the column that "
                "holds the label of the recipe"
            )
        label = str(values[self.label_column])
        if label not in self.by_label:
            raise RewardError(
                f"response {row} has the label {label!r} (column {self.label_column!r}), which is "
                f"not in the recipe{did_you_mean(label, self.by_label)} (labels: "
                f"{', '.join(sorted(self.by_label))})"
            )
        return self.by_label[label]


def same_weights(
    names: Sequence[str], weights: Sequence[float] | Mapping[str, float] | None
) -> Weights:
    """Weigh all responses alike, by the position or the name of a function; None: all 1.

    Raises:
        ValueError: They do not fit the functions.
    """
    if weights is None:
        weights = [1.0] * len(names)
    if isinstance(weights, Mapping):
        check_known(weights, names, "weights")
        if missing := [name for name in names if name not in weights]:
            raise ValueError(f"weights lacks {', '.join(map(repr, missing))}; 0 only logs a reward")
        weights = [weights[name] for name in names]
    if len(weights) != len(names):
        raise ValueError(
            f"weights has {len(weights)} entries for {len(names)} reward functions "
            f"({', '.join(names)}); give one per function, in their order"
        )
    _check_numbers(dict(zip(names, weights, strict=True)), "weights")
    return Weights(names, {"": weights}, None)


def weights_by_label(names: Sequence[str], recipe: Recipe, label_column: str) -> Weights:
    """Weigh each response by the entry of the recipe that its label, in a data column, names.

    Raises:
        ValueError: The recipe names an unknown function, or leaves one or a label without use.
    """
    if not recipe:
        raise ValueError("recipe is empty: give every label its rewards and their weights")
    for label, entry in recipe.items():
        check_known(entry, names, f"recipe[{label!r}]")
        _check_numbers(entry, f"recipe[{label!r}]")
    unused = [name for name in names if not any(name in entry for entry in recipe.values())]
    if unused:
        raise ValueError(
            f"recipe: no label uses {', '.join(map(repr, unused))}; add a weight or drop the "
            "function"
        )
    by_label = {
        str(label): [entry.get(name, math.nan) for name in names] for label, entry in recipe.items()
    }
    return Weights(names, by_label, label_column)


class Score(NamedTuple):
    """Sums of responses, and why some have none."""

    sums: Float[Tensor, " B"]
    """NaN: a value is missing, or nothing counts."""
    inapplicable: Bool[Tensor, " B"]
    """Every function that was called for the response declined, and none failed."""
    mixed: Bool[Tensor, "B K"]
    """A function declined some responses of the group and scored others."""


def weighted_sum(
    per_function: Float[Tensor, "B K"],
    weights: Float[Tensor, "B K"],
    *,
    optional: Bool[Tensor, " K"],
    declined: Bool[Tensor, "B K"],
    groups: Int[Tensor, " B"],
) -> Score:
    """Add up the weighted values of each response.

    A function that declines all responses to a prompt does not apply to it, and the others decide.
    Otherwise a sum without one of its parts cannot be compared with those of the same prompt:
    beside a penalty, it would rank a response that a reward model failed to score above those that
    it scored low. So a group has no scores in which a function declines some responses and scores
    others.

    Args:
        per_function: Values, NaN where a function has none.
        weights: NaN where a function was not called; a weight of 0 only logs.
        optional: The functions whose value may be missing, so that the others count alone.
        declined: Where a function does not apply.
        groups: Index of the prompt of each response, from 0.

    Returns:
        Float32 sums, NaN where there is none.

    Raises:
        RewardError: A sum is too large for float32.
    """
    counted = weights.isfinite() & (weights != 0)
    counts = per_function.isfinite() & counted
    silent = declined & counted

    def in_group(flags: Bool[Tensor, "B K"]) -> Bool[Tensor, "B K"]:
        """Return for each response whether a flag is set for any response of its group."""
        number = int(groups.max()) + 1 if len(groups) else 0
        sums = torch.zeros(number, flags.shape[1]).index_add(0, groups, flags.float())
        return sums[groups] > 0

    mixed = in_group(counts) & in_group(silent) & ~optional
    terms = torch.where(counts, per_function.double() * weights, 0.0)
    scores = terms.sum(dim=1).float()
    if scores.isinf().any():
        row = int(scores.isinf().nonzero()[0])
        raise RewardError(
            f"the weighted rewards of response {row} add up to more than float32 can hold: "
            f"{per_function[row].tolist()}; scale the reward functions down"
        )
    complete = (counts | ~counted | optional | silent).all(dim=1) & ~mixed.any(dim=1)
    inapplicable = counted.any(dim=1) & (silent | ~counted).all(dim=1) & ~mixed.any(dim=1)
    sums = torch.where(complete & counts.any(dim=1), scores, torch.nan)
    return Score(sums, inapplicable, mixed)


def check_known(chosen: Iterable[str], names: Sequence[str], option: str) -> None:
    """Refuse names that are none of a reward function.

    Raises:
        ValueError: There is one; begins with the option.
    """
    for name in chosen:
        if name not in names:
            raise ValueError(
                f"{option}: there is no reward {name!r}{did_you_mean(name, names)} (rewards: "
                f"{', '.join(names)})"
            )


def _check_numbers(weights: Mapping[str, float], option: str) -> None:
    for name, weight in weights.items():
        if not math.isfinite(weight):
            raise ValueError(f"{option}: the weight of {name!r} is {weight}; it must be finite")
    if all(weight == 0 for weight in weights.values()):
        raise ValueError(f"{option}: every weight is 0, so that nothing would be scored")
