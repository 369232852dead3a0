"""Which tokens of a packed row see each other, in as many numbers as it has tokens.

The tokens are a forest: each follows one token, and sees that one and all before it. Walked through
depth first, a token comes at ``enter``, and all that follow it come before ``leave``, so

    k is seen by q  ⟺  enter[k] ≤ enter[q] < leave[k]

No table of tokens by tokens is needed, which is what FlexAttention is made for (Dong et al. 2024,
https://arxiv.org/abs/2412.05496).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Tokens along each side of the blocks that FlexAttention computes or leaves out as a whole."""


class Chained(Protocol):
    """Consecutive tokens of a packed row each of which follows the one before."""

    @property
    def before(self) -> Int[Tensor, " P"]:
        """Places of the tokens that the first one follows, from the beginning on."""

    @property
    def own(self) -> Int[Tensor, " L"]:
        """Their places."""


@dataclass(frozen=True, eq=False)
class Tour:
    """The numbers of a depth-first walk over the tokens of a packed row."""

    enter: Int[Tensor, " N"]
    leave: Int[Tensor, " N"]
    depth: Int[Tensor, " N"]
    """Tokens before each, of those that it sees."""
    _masks: dict[int | None, BlockMask] = field(default_factory=dict)

    def mask(self, window: int | None) -> BlockMask:
        """Return what FlexAttention computes; all layers with the same window share it.

        Args:
            window: Keys that a query sees at most, itself included; None: all before it.
        """
        if window not in self._masks:
            self._masks[window] = self._new_mask(window)
        return self._masks[window]

    def _new_mask(self, window: int | None) -> BlockMask:
        """Find the blocks from the least and the greatest numbers in each.

        ``create_block_mask`` finds them from the whole table.
        """
        enter, leave, depth = self.enter, self.leave, self.depth
        # a tensor, because code is compiled anew for each number that it contains
        reach = None if window is None else depth + window

        def seen(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (enter[key] <= enter[query]) & (enter[query] < leave[key])

        def seen_in_window(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            assert reach is not None
            return seen(batch, head, query, key) & (depth[query] < reach[key])

        first, last = _extremes(enter)
        first_end, last_end = _extremes(leave)
        some = (first <= last[:, None]) & (first[:, None] < last_end)
        every = (last <= first[:, None]) & (last[:, None] < first_end)
        if reach is not None:
            (least, most), (least_reach, most_reach) = _extremes(depth), _extremes(reach)
            some &= least[:, None] < most_reach
            every &= most[:, None] < least_reach
        if len(enter) % BLOCK:  # what is behind the end is not seen
            every[-1], every[:, -1] = False, False
        return BlockMask.from_kv_blocks(
            *_listed(some & ~every),
            *_listed(every),
            BLOCK_SIZE=BLOCK,
            mask_mod=seen if window is None else seen_in_window,
            seq_lengths=(len(enter), len(enter)),
        )


def walk(chains: Sequence[Chained], device: torch.device) -> Tour:
    """Number the tokens of a packed row.

    Args:
        chains: In any order; together they hold every place once.
        device: Of the numbers.
    """
    chains = sorted(chains, key=lambda chain: int(chain.own[0]))
    starts = [int(chain.own[0]) for chain in chains]
    sizes = [len(chain.own) for chain in chains]  # with all that follows, in the end
    followers: list[list[tuple[int, int]]] = [[] for _ in chains]
    for number in reversed(range(len(chains))):  # what a chain follows is in front of it
        before = chains[number].before
        if len(before):
            place = int(before[-1])
            parent = bisect_right(starts, place) - 1
            followers[parent].append((place - starts[parent], number))
            sizes[parent] += sizes[number]
    enters, end = [-1] * len(chains), 0
    parts = []
    for number, chain in enumerate(chains):
        if enters[number] < 0:  # it follows nothing
            enters[number], end = end, end + sizes[number]
        numbers = torch.arange(len(chain.own), dtype=torch.int32)
        enter, free = numbers + enters[number], enters[number] + len(chain.own)
        leave = torch.full_like(numbers, free)
        # the deepest first: what follows a token includes what follows the tokens after it
        for offset, follower in sorted(followers[number], key=lambda one: (-one[0], one[1])):
            enters[follower], free = free, free + sizes[follower]
            leave[: offset + 1] += sizes[follower]
        parts.append(torch.stack([enter, leave, numbers + len(chain.before)]))
    enter, leave, depth = torch.cat(parts, dim=1).to(device)
    return Tour(enter, leave, depth)


def _extremes(numbers: Int[Tensor, " N"]) -> tuple[Int[Tensor, " C"], Int[Tensor, " C"]]:
    """Return the least and the greatest number in each block."""
    count = -(-len(numbers) // BLOCK)
    places = torch.arange(count * BLOCK, device=numbers.device).clamp(max=len(numbers) - 1)
    return numbers[places].view(count, BLOCK).aminmax(dim=1)


def _listed(blocks: Bool[Tensor, "C D"]) -> tuple[Int[Tensor, "1 1 C"], Int[Tensor, "1 1 C D"]]:
    """Return how many blocks there are in each row, and their columns first."""
    columns = blocks.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
    count = blocks.sum(dim=1)
    return count.to(torch.int32)[None, None], columns.to(torch.int32)[None, None]
