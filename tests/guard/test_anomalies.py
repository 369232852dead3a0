"""What each measurement finds, and what it leaves alone."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from lrlhf.guard.anomalies import IterationSums, RunningLength, judge, locate_in, measure
from lrlhf.guard.guard_settings import Guard
from lrlhf.types import Experience
from tests.guard.batches import NAN, experience, filled


def kinds(batch: Experience, guard: Guard = Guard(), mean_length: float | None = None) -> set[str]:  # noqa: B008
    lengths = RunningLength()
    if mean_length is not None:
        lengths.load_state_dict({"iterations": 5, "mean": mean_length})
    sums = IterationSums(*measure(batch).tolist())
    return {one.kind for one in judge(sums, guard, lengths)}


def test_each_measurement_finds_its_own_kind_and_no_other() -> None:
    assert kinds(experience()) == set()
    assert kinds(experience(scores=torch.tensor([0.0, NAN]))) == set()  # cannot be scored
    assert kinds(experience(scores=torch.tensor([0.0, -math.inf]))) == {"scores"}
    assert kinds(experience(old_logprobs=filled(-math.inf))) == {"logprobs"}
    assert kinds(experience(ref_logprobs=filled(NAN))) == {"logprobs"}
    assert kinds(experience(ref_logprobs=filled(NAN, column=0))) == set()  # of the prompt
    assert kinds(experience(advantages=filled(NAN))) == {"advantages"}
    assert kinds(experience(values=filled(math.inf))) == {"values"}
    apart = experience(ref_logprobs=filled(-6.0))  # 6 nats over 2 responses
    assert kinds(apart, Guard(max_kl=3.1)) == set()
    assert kinds(apart, Guard(max_kl=2.9)) == {"kl"}
    other = experience(sampling_logprobs=filled(-4.0))  # 4 nats over 4 tokens
    assert kinds(other, Guard(max_mismatch=1.1)) == set()
    assert kinds(other, Guard(max_mismatch=0.9)) == {"mismatch"}
    long = Guard(max_length_factor=2.0)
    assert kinds(experience(), long) == set()  # too early to say
    assert kinds(experience(), long, mean_length=1.1) == set()
    assert kinds(experience(), long, mean_length=0.9) == {"length"}


def test_stored_responses_are_no_fault_of_the_engine() -> None:
    batch = experience(sampling_logprobs=filled(-4.0))
    for source in ("recorded", "engine"):
        sums = IterationSums(*measure(replace(batch, old_source=source)).tolist())
        assert sums.mismatch == 0


def test_the_first_bad_entry_is_named_with_row_token_and_prompt(tokenizer: Any) -> None:
    place = locate_in(experience(ref_logprobs=filled(NAN, column=4)), tokenizer)
    prompt = tokenizer.decode([0, 1, 2])
    token = tokenizer.decode([4])
    name = "the reference's log-probabilities"
    assert place == f"first in {name} of row 1, token 4 ({token!r}), whose prompt is {prompt!r}"
    assert locate_in(experience(), tokenizer) == ""


def test_a_running_length_is_a_mean_that_forgets() -> None:
    lengths = RunningLength()
    for length in (2.0, 4.0, 6.0):
        lengths.update(length)
    assert lengths.mean == pytest.approx(4.0)
    for _ in range(60):
        lengths.update(100.0)
    assert lengths.mean == pytest.approx(100.0, rel=0.01)


@pytest.mark.parametrize(
    ("settings", "culprit"),
    [
        ({"max_ratio": 1.0}, "guard.max_ratio is 1.0; it must be above 1"),
        ({"max_mismatch": -1.0}, "guard.max_mismatch"),
        ({"max_skipped": -1}, "guard.max_skipped"),
        ({"window": 0}, "guard.window"),
        ({"dump": -1}, "guard.dump"),
    ],
)
def test_a_limit_out_of_range_names_itself(settings: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ValueError, match=culprit):
        Guard(**settings)
