"""Counting, the quota and its window, without a model."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lrlhf.guard.anomalies import Anomaly, Guard, TrainingDivergedError
from lrlhf.guard.dump import StepBundle
from lrlhf.guard.step_guard import StepGuard

LOSS, KL = Anomaly("loss", "the loss is not finite"), Anomaly("kl", "too far")


EMPTY = StepBundle(stage="policy", batches={}, seeds=[], context={})


def never() -> StepBundle:
    raise AssertionError("asked for although nothing is written")


def at(step: int) -> Any:
    """A module in its first step, its second, …, alone."""
    done = step - 1
    return SimpleNamespace(trainer=SimpleNamespace(world_size=1, global_rank=0, global_step=done))


def guard(**settings: Any) -> StepGuard:
    return StepGuard(Guard(**{"dump": 0, **settings}))


def test_more_steps_than_the_quota_stop_the_run_and_name_the_kinds() -> None:
    watched = guard(max_skipped=2)
    watched.report([LOSS], never, at(4))
    watched.report([KL, LOSS, LOSS], never, at(5))
    assert watched.metrics() == {"train/skipped_steps": 2, "guard/kl": 1, "guard/loss": 2}
    with pytest.raises(
        TrainingDivergedError,
        match=r"3 optimizer steps were left out within 1000 steps \(in the whole run kl 1, loss 3\)"
        r".*guard.max_skipped is 2 \(last at step 7\)",
    ):
        watched.report([LOSS], never, at(7))


@pytest.mark.parametrize(("window", "stops"), [(2, False), (None, True)])
def test_steps_that_were_left_out_long_ago_do_not_count(window: int | None, stops: bool) -> None:
    watched = guard(max_skipped=1, window=window)
    watched.report([LOSS], never, at(0))
    if stops:
        with pytest.raises(TrainingDivergedError, match="2 optimizer steps were left out so far"):
            watched.report([LOSS], never, at(2))
    else:
        watched.report([LOSS], never, at(2))
        with pytest.raises(TrainingDivergedError):
            watched.report([LOSS], never, at(3))


def test_a_resumed_run_goes_on_counting() -> None:
    first = guard(max_skipped=1, window=2)
    first.lengths.update(7.0)
    first.report([LOSS], never, at(3))
    state = json.loads(json.dumps(first.state_dict()))
    second, later = guard(max_skipped=1, window=2), guard(max_skipped=1, window=2)
    for one in (second, later):
        one.load_state_dict(state)
    assert (second.skipped, second.kinds, second.lengths.mean) == (1, {"loss": 1}, 7.0)
    later.report([LOSS], never, at(5))
    with pytest.raises(TrainingDivergedError):
        second.report([LOSS], never, at(4))


def test_so_many_steps_are_dumped_each_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written: list[str] = []

    def write(_: Any, folder: Path, *__: Any) -> str:
        written.append(folder.name)
        return "OSError: full" if folder.name == "step_000004" else ""

    monkeypatch.setattr("lrlhf.guard.step_guard.write_dump", write)
    watched = guard(dump=2, dirpath=str(tmp_path))
    with watched.collecting() as found:  # what is collected counts for nothing
        watched.report([LOSS, KL], never, at(3))
    assert (found, watched.skipped) == ([LOSS, KL], 0)

    def report(watched: StepGuard, step: int) -> None:
        module = at(step)
        module.trainer.strategy = SimpleNamespace(broadcast=lambda path: path)
        watched.report([LOSS], lambda: EMPTY, module)

    report(watched, 3)
    report(watched, 3)
    again = guard(dump=2, dirpath=str(tmp_path))
    again.load_state_dict(watched.state_dict())
    for step in (3, 4, 5):
        report(again, step)
    assert written == ["step_000003", "step_000004"]
