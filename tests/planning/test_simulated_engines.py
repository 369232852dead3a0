"""Small engines whose times can be counted by hand."""

import math

import numpy as np
import pytest

from lrlhf.planning.simulation.engines import (
    DecodingStep,
    Engine,
    batch_after_batch,
    continuous_batching,
)

SECOND = DecodingStep(fixed=1.0)


def _lengths(*groups: list[int]) -> np.ndarray:
    return np.array(groups)


def test_equal_responses_take_as_many_steps_as_they_have_tokens() -> None:
    # three rounds of two responses of five tokens
    engine = Engine(SECOND, max_sequences=2)
    assert continuous_batching(engine, 7, _lengths(*[[5]] * 6)) == 15


def test_a_response_begins_when_one_has_ended() -> None:
    # slots: 4 then 1; 1, 2 then nothing: 0-4, 0-1, 1-3, 3-4
    engine = Engine(SECOND, max_sequences=2)
    assert continuous_batching(engine, 0, _lengths([4], [1], [2], [1])) == 4


def test_a_batch_waits_for_its_longest_response() -> None:
    engine = Engine(SECOND, max_sequences=2)
    # batches of two: 4 and 2 steps
    assert batch_after_batch(engine, 0, _lengths([4], [1], [2], [1])) == 6


def test_groups_stay_together_in_a_batch() -> None:
    engine = Engine(SECOND, max_sequences=5)
    # five rows hold two groups of two: 9 steps, then 3
    assert batch_after_batch(engine, 1, _lengths([9, 1], [2, 2], [3, 1])) == 12


def test_the_longest_response_is_a_bound_however_many_run_at_once() -> None:
    engine = Engine(SECOND, max_sequences=1000)
    assert continuous_batching(engine, 3, _lengths([2, 2, 2, 1000])) == 1000


def test_a_prompt_is_computed_once_for_its_group() -> None:
    engine = Engine(SECOND, prompt_token=0.5)
    # two prompts of ten tokens take 5 s each, the responses 3 s
    assert continuous_batching(engine, 10, _lengths([3, 3, 3], [3, 3, 3])) == 13
    assert batch_after_batch(engine, 10, _lengths([3, 3, 3], [3, 3, 3])) == 13


def test_reading_and_computing_go_on_together() -> None:
    # reading takes 2 + 0.1 s per token, computing 1.5 s per sequence, and 0.25 + 0.01 s beside
    step = DecodingStep(weights=2.0, context=0.1, compute=1.5, fixed=0.25, sequence=0.01)
    # 3 sequences of 4 tokens: contexts 12, 15, 18, …, reading 3.2, 3.5, 3.8, …; computing 4.5
    reading = [3.2 + 0.3 * index for index in range(10)]
    expected = sum(max(each, 4.5) for each in reading) + 10 * 0.28
    assert step.run(3, 12, 10) == pytest.approx(expected)
    assert step.run(3, 12, 2) == pytest.approx(2 * (4.5 + 0.28))  # computing alone
    assert step.run(3, 100, 2) == pytest.approx(12.0 + 12.3 + 2 * 0.28)  # reading alone


def test_no_more_responses_run_than_their_keys_and_values_have_room() -> None:
    # a group's prompt of 4 tokens is there once: 2 + 6 tokens for each of two responses
    lengths = _lengths([6, 6])
    assert continuous_batching(Engine(SECOND, cache_tokens=16), 4, lengths) == 6
    assert continuous_batching(Engine(SECOND, cache_tokens=15), 4, lengths) == 12
    # one that has no room by itself runs alone, rather than never
    assert continuous_batching(Engine(SECOND, cache_tokens=1), 4, lengths) == 12


def test_a_reading_step_grows_with_what_was_generated() -> None:
    # one token of context is read per second, from a prompt of 3: 3 + 4 + 5 + 6
    engine = Engine(DecodingStep(context=1.0))
    assert continuous_batching(engine, 3, _lengths([4])) == 18


@pytest.mark.parametrize("name", ["weights", "context", "compute", "fixed", "sequence"])
def test_nothing_slower_makes_it_faster(name: str) -> None:
    lengths = np.random.default_rng(0).integers(1, 40, (20, 4))
    step = DecodingStep(1.0, 0.01, 0.3, 0.2, 0.05)
    times = []
    for factor in (0.0, 0.5, 1.0, 2.0):
        slower = step._replace(**{name: factor * getattr(step, name)})
        times.append(continuous_batching(Engine(slower, 0.01, 16, math.inf), 8, lengths))
    assert times == sorted(times)
    assert times[0] < times[-1]
