"""How long an engine takes for responses of given lengths."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class DecodingStep(NamedTuple):
    """Seconds of a step that adds one token to each running sequence.

    Memory is read while the processor computes: the slower of the two counts.

    Attributes:
        weights: To read the weights.
        context: To read the keys and values of one token.
        compute: To compute one sequence.
        fixed: Beside it, for a step.
        sequence: Beside it, for each sequence.
    """

    weights: float = 0.0
    context: float = 0.0
    compute: float = 0.0
    fixed: float = 0.0
    sequence: float = 0.0

    def run(self, sequences: int, context: float, steps: int) -> float:
        """Return the seconds of steps of the same sequences, which begin with so many tokens."""
        reading = self.weights + self.context * context  # of the first step
        growth = self.context * sequences
        computing = self.compute * sequences
        beside = steps * (self.fixed + self.sequence * sequences)
        # reading grows with each step, and from some step on takes longer than computing
        if reading >= computing:
            first = 0
        else:
            first = steps if growth == 0 else min(steps, math.ceil((computing - reading) / growth))
        after = steps - first
        read = after * reading + growth * (first + steps - 1) * after / 2
        return beside + first * computing + read

    def least(self, steps: float, tokens: float, context: float) -> float:
        """Return the seconds that steps of any sequences take at least.

        Args:
            steps: Their number.
            tokens: That all of them add.
            context: Tokens whose keys and values all of them read.
        """
        reading = self.weights * steps + self.context * context
        return self.fixed * steps + self.sequence * tokens + max(reading, self.compute * tokens)


class _Sequence(NamedTuple):
    batch: int
    length: int
    cache: float
    """Tokens that need room until it ends: its own, and its share of the prompt's."""
    begins_group: bool


class Engine(NamedTuple):
    """A replica that generates.

    Attributes:
        step: Of decoding.
        prompt_token: Seconds to compute a token of a prompt.
        max_sequences: Sequences that run at the same time.
        cache_tokens: Tokens whose keys and values have room.
    """

    step: DecodingStep
    prompt_token: float = 0.0
    max_sequences: int = 256
    cache_tokens: float = math.inf


class Replica:
    """An engine that begins a waiting sequence whenever one has ended (continuous batching).

    The keys and values of a group's prompt are there once. A sequence begins when all of its own
    have room, so that none is ever put off.

    Args:
        engine: What it takes for a step.
        prompt: Tokens of each prompt.
    """

    def __init__(self, engine: Engine, prompt: int) -> None:
        self._engine, self._prompt = engine, prompt
        self.time = 0.0
        """When the last step ended, in seconds in which the engine did not stand still."""
        self._step = self._context = 0
        self._reserved = 0.0
        self._waiting: deque[_Sequence] = deque()
        self._running: list[tuple[int, _Sequence]] = []  # by the step that ends each of them
        self._planned = math.inf

    @property
    def next_end(self) -> float:
        """When a sequence ends next, if nothing is added before; infinite: none runs."""
        return self._planned

    def add(self, now: float, batch: int, lengths: NDArray[np.int64]) -> None:
        """Have responses of a batch wait from ``now`` on; lengths are `[groups, copies]`."""
        self._go_on_until(now)
        copies = lengths.shape[1]
        share = self._prompt / copies
        self._waiting += [
            _Sequence(batch, length, share + length, begins_group=number % copies == 0)
            for number, length in enumerate(lengths.ravel().tolist())
        ]
        self._fill()

    def take_weights(self, now: float) -> None:
        """Compute the keys and values of all running sequences anew, with other weights."""
        self._go_on_until(now)
        shared = sum(self._prompt - (one.cache - one.length) for _, one in self._running)
        self.time += (self._context - shared) * self._engine.prompt_token
        self._plan()

    def end_next(self) -> list[int]:
        """Go on until sequences end, and return the batch of each that did."""
        steps = self._left
        self.time, self._step = self._planned, self._step + steps
        self._context += steps * len(self._running)
        ended = []
        while self._running and self._running[0][0] == self._step:
            _, one = heapq.heappop(self._running)
            self._context -= self._prompt + one.length
            self._reserved -= one.cache
            ended.append(one.batch)
        self._fill()
        return ended

    @property
    def _left(self) -> int:
        """Steps until a sequence ends."""
        return self._running[0][0] - self._step

    def _go_on_until(self, now: float) -> None:
        """Complete the step that runs by then."""
        if not self._running:
            self.time = max(self.time, now)
        elif now > self.time:
            steps = bisect_left(range(self._left + 1), now - self.time, key=self._seconds)
            self.time, self._step = self.time + self._seconds(steps), self._step + steps
            self._context += steps * len(self._running)

    def _seconds(self, steps: int) -> float:
        return self._engine.step.run(len(self._running), self._context, steps)

    def _fill(self) -> None:
        engine = self._engine
        while self._waiting and len(self._running) < engine.max_sequences:
            one = self._waiting[0]
            if self._running and self._reserved + one.cache > engine.cache_tokens:
                break
            self._waiting.popleft()
            self.time += one.begins_group * self._prompt * engine.prompt_token
            heapq.heappush(self._running, (self._step + one.length, one))
            self._context += self._prompt
            self._reserved += one.cache
        self._plan()

    def _plan(self) -> None:
        self._planned = self.time + self._seconds(self._left) if self._running else math.inf


def continuous_batching(engine: Engine, prompt: int, lengths: NDArray[np.int64]) -> float:
    """Return the seconds of a `Replica` for responses to prompts, `[groups, copies]`."""
    replica = Replica(engine, prompt)
    replica.add(0.0, 0, lengths)
    while replica.next_end < math.inf:
        replica.end_next()
    return replica.time


def batch_after_batch(engine: Engine, prompt: int, lengths: NDArray[np.int64]) -> float:
    """Return the seconds of an engine whose batches run until their longest response ends.

    Responses that have ended stay in the batch, as with `lrlhf.rollout.TransformersEngine`.

    Args:
        engine: What generates.
        prompt: Tokens of each prompt.
        lengths: Of responses, `[groups, copies]`; groups stay together.
    """
    groups, copies = lengths.shape
    rows = min(engine.max_sequences, engine.cache_tokens / (prompt + int(lengths.max())))
    at_once = max(1, int(rows // copies))
    seconds = 0.0
    for first in range(0, groups, at_once):
        batch = lengths[first : first + at_once]
        seconds += len(batch) * prompt * engine.prompt_token
        seconds += engine.step.run(batch.size, batch.size * prompt, int(batch.max()))
    return seconds
