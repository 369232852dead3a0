"""What the guard takes down of micro-batches, and when it looks at it."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lrlhf.guard.guard_settings import Guard
from lrlhf.guard.step_watch import StepWatch
from lrlhf.run import Collectives


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
    assert [anomaly.text for anomaly in verdict.found] == ["the loss is not finite (here)"]
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
    assert "row 3 have moved by 20 nats" in verdict.found[0].text
