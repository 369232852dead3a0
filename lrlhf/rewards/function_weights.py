"""How much each reward function counts, for all responses alike or by their label."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lrlhf.rewards.function import RewardError, did_you_mean

Recipe = Mapping[str, Mapping[str, float]]
"""Label -> reward name -> weight."""


@dataclass(frozen=True)
class Weights:
    """Weights of the functions, by label where there is a recipe."""

    names: Sequence[str]
    by_label: Mapping[str, Sequence[float]]
    """One per function; NaN: it is not asked about this label's responses."""
    label_column: str | None

    def rows(self, columns: Sequence[Mapping[str, object]]) -> Float[Tensor, "B K"]:
        """Return the weight of every function for every response; NaN: not asked.

        Args:
            columns: The data columns of each response.

        Raises:
            RewardError: A response has no label or one that is not in the recipe.
        """
        table = [self._weights_of(row, values) for row, values in enumerate(columns)]
        return torch.tensor(table, dtype=torch.float64).view(len(columns), len(self.names))

    @property
    def of_all(self) -> list[str]:
        """The functions that are asked about every response, whatever its label."""
        return [
            name
            for name, *own in zip(self.names, *self.by_label.values(), strict=True)
            if all(map(math.isfinite, own))
        ]

    def _weights_of(self, row: int, values: Mapping[str, object]) -> Sequence[float]:
        if self.label_column is None:
            return self.by_label[""]
        if self.label_column not in values:
            raise RewardError(
                f"response {row} has no column {self.label_column!r}"
                f"{did_you_mean(self.label_column, values)} (columns: "
                f"{', '.join(sorted(values)) or 'none'}); set label_column to the column that "
                "says which entry of the recipe applies"
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
        missing = [name for name in names if name not in weights]
        if missing:
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
    """Every function that was asked about the response declined, and none failed."""
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
    """Add up what counts, per response.

    A function that declines all responses to a prompt does not apply to it, and the others decide.
    Otherwise a sum without one of its parts cannot be compared with those of the same prompt:
    beside a penalty, it would rank a response that a reward model failed to score above those that
    it scored low. So a group has no scores in which a function declines some responses and scores
    others.

    Args:
        per_function: Values, NaN where a function has none.
        weights: NaN where a function was not asked; a weight of 0 only logs.
        optional: The functions whose value may be missing, so that the others' count alone.
        declined: Where a function says that it does not apply.
        groups: Numbers of the prompts that the responses belong to, from 0.

    Returns:
        Float32 sums, NaN where there is none.

    Raises:
        RewardError: A sum is too large for float32.
    """
    wanted = weights.isfinite() & (weights != 0)
    counts = per_function.isfinite() & wanted
    silent = declined & wanted
    mixed = _in_group(counts, groups) & _in_group(silent, groups) & ~optional
    terms = torch.where(counts, per_function.double() * weights, 0.0)
    scores = terms.sum(dim=1).float()
    if scores.isinf().any():
        row = int(scores.isinf().nonzero()[0])
        raise RewardError(
            f"the weighted rewards of response {row} add up to more than float32 can hold: "
            f"{per_function[row].tolist()}; scale the reward functions down"
        )
    complete = (counts | ~wanted | optional | silent).all(dim=1) & ~mixed.any(dim=1)
    inapplicable = wanted.any(dim=1) & (silent | ~wanted).all(dim=1) & ~mixed.any(dim=1)
    sums = torch.where(complete & counts.any(dim=1), scores, torch.nan)
    return Score(sums, inapplicable, mixed)


def _in_group(found: Bool[Tensor, "B K"], groups: Int[Tensor, " B"]) -> Bool[Tensor, "B K"]:
    """Return what is true of any response of each one's group."""
    number = int(groups.max()) + 1 if len(groups) else 0
    sums = torch.zeros(number, found.shape[1]).index_add(0, groups, found.float())
    return sums[groups] > 0


def check_known(given: Iterable[str], names: Sequence[str], where: str) -> None:
    """Refuse names that are none of a reward function.

    Raises:
        ValueError: There is one; begins with ``where`` it stands.
    """
    for name in given:
        if name not in names:
            raise ValueError(
                f"{where}: there is no reward {name!r}{did_you_mean(name, names)} (rewards: "
                f"{', '.join(names)})"
            )


def _check_numbers(weights: Mapping[str, float], where: str) -> None:
    for name, weight in weights.items():
        if not math.isfinite(weight):
            raise ValueError(f"{where}: the weight of {name!r} is {weight}; it must be finite")
    if all(weight == 0 for weight in weights.values()):
        raise ValueError(f"{where}: every weight is 0, so that nothing would be scored")
