"""Who waits for whom: responses, weights and updates over several iterations."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lrlhf.planning.simulation.engines import Replica


class Phases(NamedTuple):
    """Seconds of one iteration's parts, each by itself.

    Attributes:
        generate: All responses.
        transfer: The weights, from trainers to replicas.
        reward: Scores of the responses.
        logprob: Passes without gradients.
        update: Optimizer steps.
    """

    generate: float
    transfer: float
    reward: float
    logprob: float
    update: float

    @property
    def trainer(self) -> float:
        """What comes after generation."""
        return self.reward + self.logprob + self.update


def seconds_in_turns(draws: Sequence[Phases]) -> float:
    """Return the mean seconds of iterations that push the weights, generate and train in turns."""
    return sum(sum(one) for one in draws) / len(draws)


class Queue:
    """Replicas that generate whole batches ahead of the iterations that train on them.

    Args:
        replicas: Each idle; they share the prompts of a batch.
        lengths: Of the responses of some iterations, `[prompts, copies]` each; repeated.
    """

    def __init__(self, replicas: Sequence[Replica], lengths: Sequence[NDArray[np.int64]]) -> None:
        self._replicas, self._lengths = replicas, lengths
        self._left: dict[int, int] = {}
        """Responses of each batch that have not ended."""
        self._ends: list[tuple[float, int]] = []
        """When a replica's next sequence ends, as it was planned when it was noted."""

    def begin(self, batch: int, now: float) -> None:
        """Hand out the prompts of a batch."""
        lengths = self._lengths[batch % len(self._lengths)]
        self._left[batch] = lengths.size
        for number, replica in enumerate(self._replicas):
            if len(part := lengths[number :: len(self._replicas)]):
                replica.add(now, batch, part)
                self._note(number)

    def take_weights(self, now: float) -> None:
        """Have what is in the making go on with other weights."""
        for number, replica in enumerate(self._replicas):
            replica.take_weights(now)
            self._note(number)

    def complete(self, batch: int) -> float:
        """Go on until all of a batch's responses are there, and return when that was."""
        now = 0.0
        while self._left[batch]:
            now = self._go_on()
        return now

    def go_on_until(self, now: float) -> None:
        """Go on with whatever ends before a time."""
        while self._ends and self._ends[0][0] <= now:
            self._go_on()

    def _go_on(self) -> float:
        planned, number = heapq.heappop(self._ends)
        replica = self._replicas[number]
        if replica.next_end == planned:  # else another batch has come since
            for batch in replica.end_next():
                self._left[batch] -= 1
            self._note(number)
        return planned

    def _note(self, number: int) -> None:
        end = self._replicas[number].next_end
        if end < math.inf:
            heapq.heappush(self._ends, (end, number))


def batches_in_the_making(max_staleness: int) -> int:
    """Return how many batches are generated at the same time at most."""
    return max_staleness + 1 if max_staleness > 1 else 1


def seconds_ahead(queue: Queue, draws: Sequence[Phases], *, max_staleness: int) -> float:
    """Return the mean seconds of an iteration whose responses were begun up to K iterations before.

    With the push of an iteration's weights the batch of K iterations later is begun, so that its
    responses come from weights that are at most K updates old. With K of 1 the push waits for the
    responses of its iteration; above, it comes with the end of the update before it, and what is in
    the making goes on with the new weights, from keys and values that are computed anew. Batches in
    the making share the replicas, the earlier first. A push makes the replicas stand still.

    Args:
        queue: Nothing of it was begun.
        draws: Parts of the iterations whose lengths the queue has.
        max_staleness: K, above 0.
    """
    paused = 0.0  # seconds in which replicas stood still
    ends, waited, in_turns = [0.0], 0.0, max_staleness == 1
    for batch in range(max_staleness):
        queue.begin(batch, 0.0)
    # where long responses limit, all batches in the making are complete at nearly the same time,
    # and then none for long: the mean is over whole rounds of them
    round_of = batches_in_the_making(max_staleness)
    counted = math.lcm(len(draws), round_of)
    for index in range(round_of + 1 + counted):
        one = draws[index % len(draws)]
        # a batch may be complete before its turn
        if in_turns:
            waited = max(waited, queue.complete(index) + paused)
        push = max(waited, ends[-1])
        queue.go_on_until(push - paused)
        queue.take_weights(push - paused)
        queue.begin(index + max_staleness, push - paused)
        paused += one.transfer
        begin = push + one.transfer
        if not in_turns:
            begin = max(begin, queue.complete(index) + paused)
        ends.append(begin + one.trainer)
    last = [after - before for before, after in pairwise(ends)][-counted:]
    return sum(last) / len(last)
