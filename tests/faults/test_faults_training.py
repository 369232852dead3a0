"""Faults in rewards, in the engine, in the update, and signals: see faults_table.csv."""

import signal
import time
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch

from lrlhf.rollout import TransformersEngine
from tests.faults.faults_table_runs import (
    STEPS,
    Run,
    Table,
    assert_intact,
    assert_same_end,
    case,
    sends,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("_own_log"),
    pytest.mark.filterwarnings("ignore:.*"),
]

# ---- rewards


REWARDS = [
    case("reward_raises", {"way": "raise"}, "faulty", "the reward is broken"),
    case("reward_calls_exit", {"way": "exit"}, "faulty"),
    case("reward_hangs", {"way": "hang", "timeout": 0.2}, "faulty", "no result after 0.2 s"),
    case("reward_returns_too_few", {"way": "few"}, "'faulty' returned 1 values", exhaustive=True),
    case("reward_returns_nan", {"way": "nan"}, "could score", "nan", exhaustive=True),
    case("reward_is_infinite", {"way": "inf"}, "could score", "inf", exhaustive=True),
    case("reward_returns_none_for_all", {"way": "none"}, "could score 8 of 8", exhaustive=True),
]


@pytest.mark.parametrize(("reward", "culprits"), REWARDS)
def test_a_reward_goes_wrong_for_good(
    run: Run, table: Table, reward: dict[str, Any], culprits: tuple[str, ...]
) -> None:
    run.set_reward(first=3, **reward)
    ended = run.fit()
    assert_intact(run, 2)
    table.stopped(ended, *culprits, traceback=reward["way"] in ("raise", "exit"))


def test_reward_raises_once(run: Run, table: Table) -> None:
    run.set_reward("raise", first=1, last=2, max_unscorable_fraction=1.0)
    ended = run.fit()
    assert ended.status == 0, ended.err
    assert_intact(run, STEPS)
    unscored = [record["step"] for record in run.records() if record["score"] is None]
    assert unscored == [1] * 8
    table.recovered("its 8 responses got no score and no weight; the run went on to its end")


@pytest.mark.exhaustive
def test_reward_returns_none_for_some(run: Run, table: Table) -> None:
    run.set_reward("some", max_unscorable_fraction=0.5)
    ended = run.fit()
    assert ended.status == 0, ended.err
    unscored = [r for r in run.records() if r["score"] is None]
    assert len(unscored) == STEPS
    assert all(torch.isfinite(value).all() for value in run.weights().values())
    table.recovered("those responses are left out; the run went on to its end")


# ---- the update


def poisons(times: int) -> Callable[[L.Trainer], None]:
    """Makes so many gradients NaN, from now on."""

    def poison(trainer: L.Trainer) -> None:
        left = [times]

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            left[0] -= 1
            return gradient * float("nan") if left[0] >= 0 else gradient

        weight = next(p for p in trainer.lightning_module.parameters() if p.requires_grad)
        weight.register_hook(spoil)

    return poison


def test_gradient_is_nan_once(run: Run, table: Table, undisturbed: Run) -> None:
    ended = run.fit(step_2=poisons(1))
    assert ended.status == 0, ended.err
    assert run.last()["global_step"] == STEPS
    assert all(torch.isfinite(value).all() for value in run.weights().values())
    # iterations 0 to 2 drew from the same weights in both runs, and 3 did not
    same = [a == b for a, b in zip(run.records(), undisturbed.records(), strict=True)]
    assert same[:24] == [True] * 24
    assert not all(same[24:])
    table.recovered("that step was left out; the run went on to its end")


def test_gradient_is_nan_for_ever(run: Run, table: Table) -> None:
    run.config["model"]["init_args"]["guard"]["max_skipped"] = 1
    ended = run.fit(step_2=poisons(10**9))
    assert_intact(run, 3)
    table.stopped(ended, "max_skipped", "gradient")


@pytest.mark.exhaustive
def test_loss_is_infinite(run: Run, table: Table) -> None:
    run.config["model"]["init_args"]["guard"]["max_skipped"] = 1

    def infinite(trainer: L.Trainer) -> None:
        module: Any = trainer.lightning_module
        module.policy.get_input_embeddings().register_forward_hook(
            lambda _, __, output: output * float("inf") if torch.is_grad_enabled() else None
        )

    ended = run.fit(step_2=infinite)
    assert_intact(run, 3)
    table.stopped(ended, "max_skipped")


@pytest.mark.exhaustive
def test_weight_is_nan(run: Run, table: Table) -> None:
    def poison(trainer: L.Trainer) -> None:
        with torch.no_grad():
            next(trainer.lightning_module.parameters()).fill_(float("nan"))

    run.config["model"]["init_args"]["guard"]["max_skipped"] = 0
    ended = run.fit(phase_logprob_3=poison)
    assert_intact(run, 2)
    table.stopped(ended, "max_skipped")


@pytest.mark.exhaustive
def test_memory_exhausted_in_an_update(run: Run, table: Table) -> None:
    def exhaust(_: L.Trainer) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    ended = run.fit(phase_update_3=exhaust)
    assert_intact(run, 2)
    table.stopped(ended, "out of memory", traceback=True)


def test_engine_raises(run: Run, table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("the engine is gone")

    def breaks(_: L.Trainer) -> None:
        monkeypatch.setattr(TransformersEngine, "generate", fail)

    ended = run.fit(step_2=breaks)
    assert_intact(run, 2)
    table.stopped(ended, "the engine is gone", traceback=True)


# ---- signals and clocks

FLAG = "--ckpt_path=last"


def test_interrupt(run: Run, table: Table, undisturbed: Run) -> None:
    # a shell starts what runs in its background with the signal ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ended = run.fit(phase_update_3=sends(signal.SIGINT))
    assert (ended.status, ended.message) == (
        130,
        "interrupted; --ckpt_path last continues from the last checkpoint",
    )
    assert run.fit(FLAG).status == 0
    assert_same_end(run, undisturbed)
    table.recovered("exit 130; the resumed run ended byte for byte like an undisturbed one")


MOMENTS = [
    case("termination_while_generating", "phase_generate_2", exhaustive=True),
    case("termination_while_scoring", "phase_reward_3", exhaustive=True),
    case("termination_while_updating", "phase_update_2"),
    case("termination_in_validation", "validation", exhaustive=True),
]


@pytest.mark.parametrize(("moment", "_"), MOMENTS)
def test_termination(run: Run, table: Table, undisturbed: Run, moment: str, _: object) -> None:
    plan: dict[str, Any] = {moment: sends(signal.SIGTERM)}
    ended = run.fit(**plan)
    assert (ended.status, ended.message) == (143, "terminated; --ckpt_path last continues")
    again = run.fit(FLAG)
    assert again.status == 0, again.err
    assert_same_end(run, undisturbed)
    table.recovered("saved, exit 143; the resumed run ended byte for byte like an undisturbed one")


@pytest.mark.exhaustive
def test_clock_jumps(
    run: Run, table: Table, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, offset, year = time.time, [0.0], 365 * 86400.0
    monkeypatch.setattr(time, "time", lambda: clock() + offset[0])

    def jump(seconds: float) -> Callable[[L.Trainer], None]:
        return lambda _: offset.__setitem__(0, seconds)

    ended = run.fit(step_1=jump(year), step_2=jump(-year), phase_update_4=jump(3 * year))
    assert ended.status == 0, ended.err
    assert_same_end(run, undisturbed)
    table.recovered("no difference: the run ended byte for byte like an undisturbed one")
