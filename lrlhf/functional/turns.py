"""Turns: runs of sampled tokens, with tokens between them that the environment gave."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lrlhf.functional.masking import masked_sum
from lrlhf.functional.names import unknown_name

DISCOUNTS = ("token", "turn")
"""What counts as a step of time for gamma and lam."""


def turn_numbers(response_mask: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Number the turns of each row from 0; -1 outside the sampled tokens.

    Args:
        response_mask: The sampled tokens. Whatever interrupts a run of them ends a turn; two turns
            without a token between them count as one.
    """
    before = torch.nn.functional.pad(response_mask[:, :-1], (1, 0))
    begun = (response_mask & ~before).cumsum(dim=1)
    return torch.where(response_mask, begun - 1, -1)


def turn_ends(response_mask: Bool[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
    """Return the last sampled token of every turn.

    Args:
        response_mask: As for `turn_numbers`.
    """
    after = torch.nn.functional.pad(response_mask[:, 1:], (0, 1))
    return response_mask & ~after


def step_ends(response_mask: Bool[Tensor, "B T"], discount: str = "token") -> Bool[Tensor, "B T"]:
    """Return the tokens after which time has passed, so that what follows is discounted.

    Args:
        response_mask: The sampled tokens.
        discount: "token": every token is a step. "turn": a turn is one.

    Raises:
        ValueError: Neither of the two.

    Reference:
        Chen et al. 2025 (Verlog), https://openreview.net/forum?id=GmodkWwMV3, which separates the
        discount between turns from that between tokens; the latter is 1 here.
    """
    if discount == "token":
        return response_mask
    if discount == "turn":
        return turn_ends(response_mask)
    raise unknown_name("discount", discount, DISCOUNTS)


def turn_sums(x: Float[Tensor, "B T"], numbers: Int[Tensor, "B T"]) -> Float[Tensor, "B K"]:
    """Sum the tokens of every turn; K is the largest number of turns in a row, at least 1.

    Args:
        x: What stands outside the turns is not read.
        numbers: From `turn_numbers`.

    Returns:
        The sums; NaN where a row has no such turn.
    """
    turns = range(max(int(numbers.max()) + 1, 1))
    # no scatter_add, which adds in any order on a GPU: results would differ from run to run
    sums = torch.stack([masked_sum(x, numbers == turn, dim=1) for turn in turns], dim=1)
    exists = torch.arange(len(turns), device=x.device) <= numbers.amax(dim=1, keepdim=True)
    return torch.where(exists, sums, torch.nan)


def spread_over_turns(
    per_turn: Float[Tensor, "B K"], numbers: Int[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Give every token the value of its turn; 0 outside the turns.

    Args:
        per_turn: As many columns as `turn_sums` returns.
        numbers: From `turn_numbers`.
    """
    return torch.where(numbers >= 0, per_turn.gather(1, numbers.clamp(min=0)), 0.0)


def observation_numbers(
    input_ids: Int[Tensor, "B T"],
    attention_mask: Bool[Tensor, "B T"],
    response_mask: Bool[Tensor, "B T"],
) -> Int[Tensor, "B K"]:
    """Number what a policy read before each of its turns since its turn before; -1: no such turn.

    Equal tokens have equal numbers, in all rows: those are the anchor states of GiGPO. The first
    turn's are the prompt.

    Args:
        input_ids: The rows.
        attention_mask: False on padding.
        response_mask: The sampled tokens.
    """
    numbers = turn_numbers(response_mask)
    known: dict[tuple[int, ...], int] = {}
    result = torch.full((len(input_ids), max(int(numbers.max()) + 1, 1)), -1)
    read = attention_mask & ~response_mask
    rows = zip(input_ids.tolist(), read.tolist(), numbers.tolist(), strict=True)
    for row, columns in enumerate(rows):
        seen: list[int] = []
        last = -1
        for token, is_read, turn in zip(*columns, strict=True):
            if is_read:
                seen.append(token)
            elif turn > last:
                result[row, turn] = known.setdefault(tuple(seen), len(known))
                seen, last = [], turn
    return result.to(input_ids.device)
