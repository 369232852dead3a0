"""Rows of turns as tensors, and the credit of turns by plain loops over lists."""

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lrlhf.functional import EstimatorInputs

NAN = float("nan")
KL_COEF = 0.1


class Turn(NamedTuple):
    """KL and value of each token, and what the turn earned on its last one."""

    kl: list[float]
    values: list[float]
    reward: float


Row = list[Turn]

# two prompts with three responses each, of one to three turns
ROWS: list[Row] = [
    [Turn([1, 0], [0.5, 1], 1), Turn([2], [2], 0.5), Turn([0, 1, 1], [1, 0, 2], 2)],
    [Turn([0], [1], -1), Turn([1, 1], [0, 3], 0.25)],
    [Turn([3, 1], [0.25, 1], 0)],
    [Turn([1], [1], 2), Turn([0, 2], [1, 1], 0)],
    [Turn([1, 1, 1], [2, 1, 0], 1), Turn([4], [3], 1)],
    [Turn([0], [0], 3), Turn([2], [2], -2)],
]
SCORES = [4.0, 0.0, 1.0, 2.0, 5.0, -1.0]


def laid_out(rows: list[Row], column: str, *, gap: int = 2, padding: int = 1) -> Tensor:
    """A prompt token, the turns with tokens of the environment between them, and padding.

    NaN stands wherever the policy has not sampled: nothing may read it.
    """
    lines = []
    for row in rows:
        line = [NAN]
        for number, turn in enumerate(row):
            line += [NAN] * gap * (number > 0)
            rewards = [0.0] * (len(turn.kl) - 1) + [turn.reward]
            line += {"kl": turn.kl, "values": turn.values, "rewards": rewards}[column]
        lines.append(line)
    width = max(map(len, lines)) + padding
    return torch.tensor([line + [NAN] * (width - len(line)) for line in lines]).double()


def inputs_of(
    rows: list[Row], scores: list[float], *, gap: int = 2, padding: int = 1, **changes: Any
) -> EstimatorInputs:
    layout = {"gap": gap, "padding": padding}
    kl = laid_out(rows, "kl", **layout)
    inputs = EstimatorInputs(
        scores=torch.tensor(scores).double(),
        kl=kl,
        response_mask=~kl.isnan(),
        num_generations=3,
        kl_coef=KL_COEF,
        baseline_mask=torch.ones(len(rows), dtype=torch.bool),
        values=laid_out(rows, "values", **layout),
        turn_rewards=laid_out(rows, "rewards", **layout),
        # turns with the same number were preceded by the same
        observations=torch.tensor([[k if k < len(row) else -1 for k in range(3)] for row in rows]),
    )
    return inputs._replace(**changes)


def sampled(advantages: Tensor, inputs: EstimatorInputs) -> list[list[float]]:
    """The advantages of the sampled tokens of each row; those of the others are 0."""
    assert (advantages[~inputs.response_mask] == 0).all()
    rows = zip(advantages, inputs.response_mask, strict=True)
    return [line[mask].tolist() for line, mask in rows]


def assert_rows(advantages: Tensor, inputs: EstimatorInputs, expected: list[list[float]]) -> None:
    found = sampled(advantages, inputs)
    assert [len(row) for row in found] == [len(row) for row in expected]
    for line, wanted in zip(found, expected, strict=True):
        assert line == pytest.approx(wanted, abs=1e-9)


# ---- the same by loops over lists


def rewards_by_token(row: Row, score: float) -> list[float]:
    rewards = []
    for turn in row:
        rewards += [-KL_COEF * kl for kl in turn.kl]
        rewards[-1] += turn.reward
    rewards[-1] += score - sum(turn.reward for turn in row)
    return rewards


def ends_by_token(row: Row) -> list[bool]:
    return [place == len(turn.kl) for turn in row for place in range(1, len(turn.kl) + 1)]


def gae_by_sums(
    row: Row, score: float, *, gamma: float, lam: float, turns: bool, cut_off: bool = False
) -> list[float]:
    """``Σ_s δ_s`` over what follows, each weighed by gamma and lam once for each step between."""
    rewards, values = rewards_by_token(row, score), [v for turn in row for v in turn.values]
    steps = ends_by_token(row) if turns else [True] * len(rewards)
    following = [*values[1:], values[-1] if cut_off else 0.0]
    deltas = [
        reward + (gamma if step else 1.0) * after - value
        for reward, step, after, value in zip(rewards, steps, following, values, strict=True)
    ]
    return [
        sum(
            (gamma * lam) ** sum(steps[start:place]) * deltas[place]
            for place in range(start, len(deltas))
        )
        for start in range(len(deltas))
    ]


def earned_by_turn(row: Row, score: float) -> list[float]:
    """What each turn earned, its KL penalty off, and the rest of the score in the last one."""
    earned = [turn.reward - KL_COEF * sum(turn.kl) for turn in row]
    earned[-1] += score - sum(turn.reward for turn in row)
    return earned


def spread(per_turn: list[list[float]], rows: list[Row]) -> list[list[float]]:
    return [
        [value for value, turn in zip(values, row, strict=True) for _ in turn.kl]
        for values, row in zip(per_turn, rows, strict=True)
    ]


def rloo_turn_by_loops(rows: list[Row], scores: list[float], gamma: float) -> list[list[float]]:
    returns = []
    for row, score in zip(rows, scores, strict=True):
        earned = earned_by_turn(row, score)
        returns.append(
            [
                sum(gamma ** (later - turn) * earned[later] for later in range(turn, len(earned)))
                for turn in range(len(earned))
            ]
        )
    advantages = []
    for index, own in enumerate(returns):
        first = index - index % 3
        siblings = [returns[j] for j in range(first, first + 3) if j != index]
        line = []
        for turn, value in enumerate(own):
            others = [other[turn] for other in siblings if len(other) > turn]
            line.append(value - sum(others) / len(others) if others else 0.0)
        advantages.append(line)
    return spread(advantages, rows)


def z_score(value: float, group: list[float], eps: float) -> float:
    if len(group) < 2:
        return 0.0
    mean = sum(group) / len(group)
    variance = sum((one - mean) ** 2 for one in group) / (len(group) - 1)
    return (value - mean) / (math.sqrt(variance) + eps)


def mt_grpo_by_loops(
    rows: list[Row], scores: list[float], coef: float, eps: float
) -> list[list[float]]:
    outcomes, advantages = [], []
    for row, score in zip(rows, scores, strict=True):
        penalty = KL_COEF * sum(sum(turn.kl) for turn in row)
        outcomes.append(score - penalty - sum(turn.reward for turn in row[:-1]))
    for index, row in enumerate(rows):
        first = index - index % 3
        group = rows[first : first + 3]
        outcome = z_score(outcomes[index], outcomes[first : first + 3], eps)
        line = [outcome] * len(row)
        for number, turn in enumerate(row[:-1]):
            others = [other[number].reward for other in group if len(other) > number + 1]
            line[number] += coef * z_score(turn.reward, others, eps)
        advantages.append(line)
    return spread(advantages, rows)
