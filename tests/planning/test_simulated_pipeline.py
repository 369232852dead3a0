"""Iterations that wait for each other, in whole seconds."""

import numpy as np
import pytest

from lrlhf.planning.simulation.engines import DecodingStep, Engine, Replica
from lrlhf.planning.simulation.pipeline import (
    Phases,
    Queue,
    seconds_ahead,
    seconds_in_turns,
)


def _parts(generate: float, *, transfer: float = 0.0, train: float = 0.0) -> Phases:
    return Phases(generate, transfer, reward=0.0, logprob=0.0, update=train)


def _queue(*lengths: list[int], replicas: int = 1, slots: int = 100) -> Queue:
    """Replicas whose steps take a second; a response per prompt."""
    engine = Engine(DecodingStep(fixed=1.0), max_sequences=slots)
    batches = [np.array(batch)[:, None] for batch in lengths]
    return Queue([Replica(engine, 0) for _ in range(replicas)], batches)


def test_parts_add_up_in_turns() -> None:
    one = Phases(generate=10, transfer=1, reward=2, logprob=3, update=4)
    assert seconds_in_turns([one, one._replace(update=8)]) == 22


@pytest.mark.parametrize(
    ("train", "expected"), [(3.0, 11.0), (10.0, 11.0), (17.0, 18.0), (0.0, 11.0)]
)
def test_one_iteration_ahead_takes_as_long_as_the_slower_side_and_a_push(
    train: int, expected: int
) -> None:
    parts = _parts(10, transfer=1, train=train)
    seconds = seconds_ahead(_queue([10, 4]), [parts], max_staleness=1)
    assert seconds == expected


def test_the_next_batch_fills_what_a_long_response_leaves_free() -> None:
    # two slots, responses of 6 and 2 tokens: alone 6 s a batch, and half of the second slot is
    # idle; with the next batch in the queue 8 tokens take 4 s
    parts = _parts(6)
    alone = seconds_ahead(_queue([6, 2], slots=2), [parts], max_staleness=1)
    beside = seconds_ahead(_queue([6, 2], [2, 6], slots=2), [parts, parts], max_staleness=4)
    assert alone == 6
    assert beside == 4


def test_batches_in_the_making_stand_still_during_a_push() -> None:
    # generation is the slower side: a batch of 4 s and the push of the iteration before
    parts = _parts(4, transfer=3, train=0.0)
    for staleness in (1, 2, 3):
        queue = _queue([4], slots=1)
        assert seconds_ahead(queue, [parts], max_staleness=staleness) == 7


def test_a_push_has_what_is_in_the_making_computed_anew() -> None:
    # two responses to a prompt of 4 tokens, which is computed once: 4 s; 3 steps take 3 s
    engine = Engine(DecodingStep(fixed=1.0), prompt_token=1.0)
    queue = Queue([Replica(engine, 4)], [np.array([[5, 5]])])
    queue.begin(0, 0.0)
    queue.take_weights(7.0)
    # the prompt and twice three tokens: 10 s; then the other two steps
    assert queue.complete(0) == 7 + 10 + 2


def test_no_batch_is_begun_before_its_weights_are_there() -> None:
    # training takes 20 s, and batches of 4 s are soon complete
    begun: list[tuple[int, float]] = []

    class Noting(Queue):
        def begin(self, batch: int, now: float) -> None:
            begun.append((batch, now))
            super().begin(batch, now)

    engine = Engine(DecodingStep(fixed=1.0))
    queue = Noting([Replica(engine, 0)], [np.array([[4]])])
    assert seconds_ahead(queue, [_parts(4, train=20)], max_staleness=2) == 20
    # pushes of iterations 0, 1, 2, … at 0, 24, 44, … begin batches 2, 3, 4, …
    assert begun[:5] == [(0, 0), (1, 0), (2, 0), (3, 24), (4, 44)]


def test_replicas_share_the_prompts_of_a_batch_and_wait_for_the_last() -> None:
    # prompts 0 and 2 go to the first replica, 1 and 3 to the second: 5 + 5 and 1 + 1 steps
    queue = _queue([5, 1, 5, 1], replicas=2, slots=1)
    queue.begin(0, 0.0)
    assert queue.complete(0) == 10


def test_responses_that_come_later_wait_for_the_end_of_a_step() -> None:
    queue = _queue([4], [2], slots=2)
    queue.begin(0, 0.0)
    queue.begin(1, 1.5)  # from 2 to 4
    assert queue.complete(1) == 4
    assert queue.complete(0) == 0.0  # is there already


def test_several_batches_that_are_complete_at_once_count_with_the_wait_for_the_next() -> None:
    # responses of 12 s beside each other. With K of 2 a push comes with each end of an update:
    # three batches are complete one second after the other, each trains for a second and begins
    # another, and the first of those is complete 13 s after the first of these
    parts = [_parts(12, train=1.0)] * 3
    for staleness, seconds in ((1, 12), (2, 13 / 3), (4, 13 / 5)):
        queue = _queue([12], [12], [12])
        assert seconds_ahead(queue, parts, max_staleness=staleness) == pytest.approx(seconds)
