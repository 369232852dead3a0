"""An interrupt in any phase leaves a process and a module that can be used again."""

import csv
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from lrlhf.callbacks import RLCheckpoint
from lrlhf.datamodules import PromptDataModule
from lrlhf.loggers import ResumingCSVLogger
from lrlhf.modules import RLOO
from lrlhf.rewards import IsolatedReward, Rewards
from lrlhf.rollout import RolloutListener
from lrlhf.run.run_folder import LOCK_FILE
from lrlhf.run.supervision.signals import Interrupted, ReusableTrainer
from tests.modules.policy_runs import letters, weights
from tests.modules.reward_runs import ONE_HEAD, loader


def press_stop(times: int = 2, *, pause: float = 0.01) -> None:
    """Press the stop button of a notebook: once for the end of the step, twice for now."""
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(pause)


class StopsIn(L.Callback, RolloutListener):
    """Interrupts the first run in one of its phases."""

    def __init__(self, phase: str, step: int = 1) -> None:
        self.phase, self.step, self.pressed = phase, step, False
        self.trainer: L.Trainer | None = None

    def maybe(self, phase: str) -> None:
        assert self.trainer is not None
        if phase == self.phase and self.trainer.global_step == self.step and not self.pressed:
            self.pressed = True
            press_stop()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.trainer = trainer
        if self.phase == "set-up" and not self.pressed:
            self.pressed = True
            press_stop()

    def on_phase(self, phase: str) -> None:
        self.maybe(phase)

    def on_validation_batch_start(self, *_: Any) -> None:
        self.maybe("validation")

    def on_train_batch_start(self, *_: Any) -> None:
        self.maybe("batch start")

    def on_train_batch_end(self, *_: Any) -> None:
        self.maybe("batch end")


def run(folder: Path, *callbacks: L.Callback, steps: int = 4, **options: Any) -> ReusableTrainer:
    return ReusableTrainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        default_root_dir=folder,
        callbacks=list(callbacks),
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **{
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        },
    )


def modes(module: nn.Module) -> dict[str, bool]:
    return {name: part.training for name, part in module.named_modules()}


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    # a shell has its background jobs ignore it
    outside = signal.signal(signal.SIGINT, signal.default_int_handler)
    handlers = {
        one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGURG)
    }
    threads = {thread.name for thread in threading.enumerate()}
    yield
    assert {one: signal.getsignal(one) for one in handlers} == handlers
    deadline = time.monotonic() + 5
    while left := {thread.name for thread in threading.enumerate()} - threads:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
    signal.signal(signal.SIGINT, outside)


PHASES = ["set-up", "batch start", "generate", "reward", "logprob", "update", "validation"]


@pytest.mark.parametrize("phase", [*PHASES, "batch end"])
def test_a_policy_goes_on_after_an_interrupt(
    build: Callable[..., RLOO], prompts: Path, tmp_path: Path, phase: str
) -> None:
    module = build()
    module.policy.model.layers[0].train()  # whatever it is, it stays
    before = modes(module)
    step = {"set-up": 0, "batch end": 2, "validation": 2}.get(phase, 1)
    data = PromptDataModule(train=str(prompts), val=str(prompts), batch_size=4)
    stops, saves = StopsIn(phase, step), RLCheckpoint(tmp_path / "saved", every_n_train_steps=1)
    log = ResumingCSVLogger(tmp_path)
    trainer = run(
        tmp_path, stops, saves,
        enable_checkpointing=True, logger=log, log_every_n_steps=1, val_check_interval=2,
    )  # fmt: skip
    with pytest.raises(Interrupted, match=f"interrupted after step {step}"):
        trainer.fit(module, datamodule=data)
    assert modes(module) == before
    assert all(weight.grad is None for weight in module.parameters())
    assert all(bool(weight.isfinite().all()) for weight in module.parameters())
    assert not list(tmp_path.rglob(LOCK_FILE))
    # the same trainer, then a new one: every step is counted once
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == 4
    with (tmp_path / "metrics.csv").open() as file:
        steps = [int(row["step"]) for row in csv.DictReader(file) if row["kl/coef"]]
    # the row of a step comes after its callbacks: one that is interrupted there has none
    missing = {1} if phase == "batch end" else set()
    assert [step - steps[0] for step in steps] == [one for one in range(4) if one not in missing]
    saves = RLCheckpoint(tmp_path / "saved", every_n_train_steps=1)
    another = run(tmp_path, saves, steps=5, enable_checkpointing=True)
    another.fit(module, datamodule=data, ckpt_path="last")
    assert another.global_step == 5


@pytest.mark.parametrize("word", ["last", None])
def test_one_interrupt_lets_the_step_end_saves_it_and_has_its_row(
    build: Callable[..., RLOO], prompts: Path, tmp_path: Path, word: str | None
) -> None:
    class PressesOnce(L.Callback, RolloutListener):
        def on_phase(self, phase: str) -> None:
            if phase == "reward" and not pressed:
                pressed.append(phase)
                press_stop(1)

    pressed: list[str] = []
    module = build()
    data = PromptDataModule(train=str(prompts), batch_size=4)
    saves = RLCheckpoint(tmp_path / "saved", every_n_train_steps=100)
    options: dict[str, Any] = {"logger": ResumingCSVLogger(tmp_path), "log_every_n_steps": 1}
    trainer = run(tmp_path, PressesOnce(), saves, enable_checkpointing=True, **options)
    with pytest.raises(
        Interrupted, match=r'ckpt_path="last".* from the state saved in .*last.ckpt'
    ):
        trainer.fit(module, datamodule=data)
    assert trainer.global_step == 1
    trainer.fit(module, datamodule=data, ckpt_path=word)
    assert trainer.global_step == 4
    with (tmp_path / "metrics.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == [1, 2, 3, 4]


def test_an_interrupt_ends_what_a_reward_is_doing(
    build: Callable[..., RLOO], prompts: Path, tmp_path: Path
) -> None:
    reward = IsolatedReward("tests.modules.slow_rewards.waits", timeout=60)
    module = build(rewards=Rewards([reward]))
    timer = threading.Timer(0, lambda: None)

    class PressesLater(L.Callback, RolloutListener):
        def on_phase(self, phase: str) -> None:
            if phase == "reward":
                timer.function = lambda: press_stop(pause=1.0)
                timer.interval = 1.0
                timer.start()

    start = time.monotonic()
    with pytest.raises(Interrupted):
        run(tmp_path, PressesLater()).fit(
            module, datamodule=PromptDataModule(train=str(prompts), batch_size=4)
        )
    assert time.monotonic() - start < 30
    assert not any(worker.alive for worker in reward._workers)


def test_an_interrupt_while_data_are_read(
    build: Callable[..., RLOO], prompts: Path, tmp_path: Path
) -> None:
    data = PromptDataModule(train=str(prompts), batch_size=4)

    class Impatient(PromptDataModule):
        def train_dataloader(self) -> Any:
            press_stop()
            return super().train_dataloader()

    module = build()
    with pytest.raises(Interrupted, match="after step 0"):
        run(tmp_path).fit(module, datamodule=Impatient(train=str(prompts), batch_size=4))
    trainer = run(tmp_path, steps=1)
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == 1


def test_a_reward_model_goes_on_after_an_interrupt(
    reward_model: Callable[..., Any], collate: Callable[..., Any], tmp_path: Path
) -> None:
    module = reward_model()
    batches = [collate(ONE_HEAD[:5]), collate(ONE_HEAD[5:])]
    trainer = run(tmp_path, StopsIn("batch end", 3), steps=4, logger=ResumingCSVLogger(tmp_path))
    before = modes(module)
    with pytest.raises(Interrupted, match="after step 3"):
        trainer.fit(module, loader(batches))
    assert modes(module) == before
    trainer.fit(module, loader(batches))
    assert trainer.global_step == 4


def test_a_trainer_trains_on_with_more_steps(
    build: Callable[..., RLOO], prompts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = build()
    trainer = run(tmp_path, steps=1)
    data = PromptDataModule(train=str(prompts), batch_size=4)
    trainer.fit(module, datamodule=data)
    trained = weights(module)
    with caplog.at_level(logging.INFO, "lrlhf"):
        trainer.fit(module, datamodule=data)
        assert trainer.global_step == 1
        assert "raise trainer.max_steps" in caplog.text
        torch.testing.assert_close(weights(module), trained, rtol=0, atol=0)
        trainer.max_steps = 3
        trainer.fit(module, datamodule=data)
        assert "goes on after step 1" in caplog.text
    assert trainer.global_step == 3


def test_another_fit_after_all_epochs_says_what_to_raise(
    build: Callable[..., RLOO], prompts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = run(tmp_path, steps=-1)
    trainer.fit_loop.max_epochs = 1
    data = PromptDataModule(train=str(prompts), batch_size=4)
    trainer.fit(module := build(), datamodule=data)
    done = trainer.global_step
    with caplog.at_level(logging.INFO, "lrlhf"):
        trainer.fit(module, datamodule=data)
    assert trainer.global_step == done
    assert "raise trainer.fit_loop.max_epochs" in caplog.text
    assert "goes on" not in caplog.text


def test_what_ended_a_run_is_raised_also_where_the_teardown_fails(
    build: Callable[..., RLOO], prompts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = build()

    def fails(stage: str) -> None:
        assert stage == "fit"
        raise AttributeError("there is no engine yet")

    def breaks() -> None:
        raise RuntimeError("of the user's own hook")

    module.teardown, module.on_train_start = fails, breaks  # type: ignore[method-assign]
    data = PromptDataModule(train=str(prompts), batch_size=4)
    with pytest.raises(RuntimeError, match="own hook"):
        run(tmp_path).fit(module, datamodule=data)
    assert "there is no engine yet" in caplog.text


def test_a_validation_can_be_interrupted_too(
    build: Callable[..., RLOO], prompts: Path, tmp_path: Path
) -> None:
    module = build()
    data = PromptDataModule(train=str(prompts), val=str(prompts), batch_size=4)
    stops = StopsIn("validation", 0)
    with pytest.raises(Interrupted, match=r"^interrupted$"):
        run(tmp_path, stops).validate(module, datamodule=data, verbose=False)
    (found,) = run(tmp_path).validate(module, datamodule=data, verbose=False)
    assert "eval/score" in found


def test_an_error_leaves_the_module_as_an_interrupt_does(
    build: Callable[..., RLOO], prompts: Path, tmp_path: Path
) -> None:
    class Fails(L.Callback):
        def on_validation_batch_start(self, *_: Any) -> None:
            raise RuntimeError("of the user's own callback")

    module = build()
    module.train()
    data = PromptDataModule(train=str(prompts), val=str(prompts), batch_size=4)
    with pytest.raises(RuntimeError, match="own callback"):
        run(tmp_path, Fails(), val_check_interval=1).fit(module, datamodule=data)
    assert all(modes(module).values())


# ---- what is said


def letters_with_a_warning(completions: Sequence[str]) -> list[float]:
    logging.getLogger("mine").warning("from my reward")
    warnings.warn("mine is old", FutureWarning, stacklevel=1)
    return letters(completions)


def test_remarks_of_others_are_left_out_and_the_users_own_come_through(
    build: Callable[..., RLOO],
    prompts: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LRLHF_DEBUG", raising=False)
    ours, filters = logging.getLogger("lrlhf"), list(warnings.filters)
    noisy = logging.getLogger("lightning.pytorch")
    before = (list(ours.handlers), ours.level, [list(one.filters) for one in noisy.handlers])
    bars = transformers_logging.is_progress_bar_enabled()

    class HasNone(L.Callback):
        def on_train_start(self, *_: Any) -> None:
            assert not transformers_logging.is_progress_bar_enabled()

    module = build(reward=letters_with_a_warning)
    trainer = run(tmp_path, HasNone(), steps=1)
    capfd.readouterr()  # of the constructor, which `Trainer` quietens
    data = PromptDataModule(train=str(prompts), batch_size=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, datamodule=data)
    told = {str(one.message) for one in caught}
    assert "mine is old" in told
    needless = ("workers", "eval mode", "LeafSpec", "have no `val_dataloader`")
    assert not any(part in text for text in told for part in needless)
    assert transformers_logging.is_progress_bar_enabled() == bars
    after = (list(ours.handlers), ours.level, [list(one.filters) for one in noisy.handlers])
    assert after == before
    assert list(warnings.filters) == filters
    printed = capfd.readouterr()
    assert "Tip" not in printed.out + printed.err
    assert "TPU" not in printed.out + printed.err
