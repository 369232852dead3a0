"""What each measurement finds, and what it leaves alone."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lrlhf.guard.anomalies import (
    Guard,
    IterationSums,
    RunningLength,
    StepWatch,
    judge,
    locate_in,
    measure,
)
from lrlhf.run import Collectives
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


# ---- what one rank sees of an optimizer step


def alone() -> Collectives:
    return Collectives(SimpleNamespace(world_size=1, global_rank=0))  # type: ignore[arg-type]


class Other:
    """A second process that has seen a loss which is not finite."""

    world_size, rank = 2, 0

    def sum(self, value: Tensor) -> Tensor:
        return value + torch.tensor([1.0, 0, 0, 0])


def watch(rows: int = 4, device: str = "cpu") -> StepWatch:
    return StepWatch(Guard(), rows=rows, device=torch.device(device))


def test_losses_and_ratios_are_not_read_before_the_verdict() -> None:
    # on the meta device every read fails
    seen = watch(device="meta")
    seen.see_loss(torch.empty((), device="meta"), lambda: "nowhere")
    seen.see_ratios(torch.empty(4, device="meta"))
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        seen.judge(alone())


def test_the_place_of_a_bad_loss_is_asked_for_with_what_its_micro_batch_had() -> None:
    seen = watch()
    asked: list[tuple[list[int], list[str]]] = []

    def place() -> str:
        asked.append((seen.rows.tolist(), list(seen.outputs)))
        return "here"

    # a place that knows nothing gives way to the next
    seen.turn_to(torch.tensor([1]))
    seen.see_loss(torch.tensor(torch.nan), lambda: "")
    for rows, loss in (([3, 1], 0.5), ([0], torch.inf), ([2], torch.nan)):
        seen.turn_to(torch.tensor(rows))
        seen.outputs[f"of {rows}"] = torch.zeros(1)
        seen.see_loss(torch.tensor(loss), place)
    assert asked == []
    verdict = seen.judge(alone())
    assert verdict.skips
    assert [anomaly.text for anomaly in verdict.anomalies] == ["the loss is not finite (here)"]
    assert asked == [([0], ["of [0]"])]


def test_all_ranks_leave_out_what_one_of_them_finds() -> None:
    seen = watch()
    seen.see_loss(torch.tensor(1.0), lambda: "nowhere")
    assert seen.judge(Other()) == (True, [])  # type: ignore[arg-type]  the other one says why


def test_moves_are_those_of_the_rows_in_their_order() -> None:
    seen = watch()
    moves: dict[tuple[int, ...], Tensor] = {
        (2, 0): torch.tensor([0.5, -0.25]),
        (3,): torch.tensor([20.0]),
    }
    for rows, log_ratios in moves.items():
        seen.turn_to(torch.tensor(rows))
        seen.see_ratios(log_ratios)
    expected = torch.tensor([0.25, torch.nan, 0.5, 20.0])
    torch.testing.assert_close(seen.log_ratios, expected, equal_nan=True)
    verdict = seen.judge(alone())
    # e^20 is above the guard's 1e4
    assert verdict.skips
    assert "row 3 have moved by 20 nats" in verdict.anomalies[0].text
