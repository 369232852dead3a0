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
                heapq.heappush(self._ends, (replica.next_end, number))

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
            if replica.next_end < float("inf"):
                heapq.heappush(self._ends, (replica.next_end, number))
        return planned


def seconds_ahead(queue: Queue, draws: Sequence[Phases], *, max_staleness: int) -> float:
    """Return the mean seconds of an iteration whose responses were begun up to K iterations before.

    When the responses of an iteration are complete, its weights are pushed and it trains. With the
    push the batch of K iterations later is begun, so that its responses come from weights that are
    at most K updates old. Batches in the making share the replicas, the earlier first. A push makes
    the replicas stand still.

    Args:
        queue: Nothing of it was begun.
        draws: Parts of the iterations whose lengths the queue has.
        max_staleness: K, above 0.
    """
    paused = 0.0  # seconds in which replicas stood still
    ends, waited = [0.0], 0.0
    for batch in range(max_staleness):
        queue.begin(batch, 0.0)
    # where long responses limit, K batches are complete at nearly the same time, and then none for
    # long: the mean is over whole rounds of K
    counted = math.lcm(len(draws), max_staleness)
    for index in range(max_staleness + 1 + counted):
        one = draws[index % len(draws)]
        # a batch may be complete before its turn
        waited = max(waited, queue.complete(index) + paused)
        push = max(waited, ends[-1])
        queue.go_on_until(push - paused)
        queue.begin(index + max_staleness, push - paused)
        paused += one.transfer
        ends.append(push + one.transfer + one.trainer)
    last = [after - before for before, after in pairwise(ends)][-counted:]
    return sum(last) / len(last)
