"""Which replica a request goes to."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

BLOCK = 64
"""Tokens that are looked up together; a prefix counts as cached by whole blocks."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request went, and what was expected of it there."""

    replica: int
    tokens: int


class Router:
    """Sends requests to the replica that has the least to do with them.

    Requests with one prompt go together. They cost a replica the tokens of the prompt that it has
    no keys and values of yet, and they go where that and the tokens that it still has to compute
    for others are the least in sum. So the next turn of an episode goes where its history is, until
    other work there outweighs what the history saves. NVIDIA Dynamo's router adds up the same two,
    blocks to prefill and blocks in use; routers such as those of SGLang and Ray Serve instead
    follow the prefix until the loads are too far apart.

    What a replica has keys and values of is not asked of it, but remembered: what was sent there,
    and what it answered, since its cache was last emptied. What it has thrown away since then, for
    lack of room, counts as there.

    Every rank has a router of its own and knows of no other rank's requests. Between equals each
    begins with another replica, so that ranks which all begin at once do not meet.

    Args:
        replicas: Their numbers.
        first: Which of them comes first between equals, by its place in the order.
    """

    def __init__(self, replicas: Collection[int], *, first: int = 0) -> None:
        order = sorted(replicas)
        turn = first % len(order)
        self._order = order[turn:] + order[:turn]
        self._load = dict.fromkeys(order, 0)
        self._cached: dict[int, set[int]] = {number: set() for number in order}
        self._lock = threading.Lock()

    def place(
        self, prompt: Sequence[int], most: Sequence[int], *, among: Collection[int]
    ) -> list[Placement]:
        """Choose a replica for requests with one prompt.

        Args:
            prompt: Token ids.
            most: How many tokens each request may get.
            among: Replicas that may be chosen.

        Returns:
            One placement per request, which `finished` takes back.
        """
        blocks = list(_blocks(prompt))
        with self._lock:
            missing = {one: len(prompt) - self._length(one, blocks) for one in among}
            chosen = min(
                (one for one in self._order if one in among),
                key=lambda one: self._load[one] + missing[one],
            )
            # the first of them computes the prompt, and the others find it
            tokens = [most[0] + missing[chosen], *most[1:]]
            self._load[chosen] += sum(tokens)
            self._cached[chosen].update(blocks)
        return [Placement(chosen, each) for each in tokens]

    def finished(self, placement: Placement, sequence: Sequence[int] = ()) -> None:
        """Take a request off a replica's load.

        Args:
            placement: Of the request.
            sequence: Prompt and response, which the replica has keys and values of now.
        """
        blocks = list(_blocks(sequence))
        with self._lock:
            self._load[placement.replica] -= placement.tokens
            self._cached[placement.replica].update(blocks)

    def forget(self) -> None:
        """Hear that all caches were emptied."""
        with self._lock:
            for cached in self._cached.values():
                cached.clear()

    def _length(self, replica: int, blocks: Sequence[int]) -> int:
        """Tokens of a prompt that a replica has keys and values of."""
        cached = self._cached[replica]
        for count, block in enumerate(blocks):
            if block not in cached:
                return count * BLOCK
        return len(blocks) * BLOCK


def _blocks(tokens: Sequence[int]) -> Iterator[int]:
    """Name every whole block by what is in it and in all before it."""
    chain = 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        chain = hash((chain, *tokens[start : start + BLOCK]))
        yield chain
