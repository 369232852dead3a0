"""A run that is asked to end saves and ends, on every rank, after the same step."""

import inspect
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

from lrlhf.callbacks import AtomicCheckpointIO, RLCheckpoint
from lrlhf.modules.policy.iteration import Iteration
from lrlhf.run.supervision.signals import Terminated, answering_sigterm
from lrlhf.run.supervision.watch import Watch, watch_over
from tests.callbacks.fakes import ToyPolicy, batches, trainer
from tests.distributed.runs import ROOT, fit, members, pid_of, running, wait_for, write_config

TERMINATED = "error: terminated; --ckpt_path last continues from "


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    # whatever runs the tests may have handlers of its own
    kept = {n: signal.signal(n, signal.SIG_DFL) for n in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


class Told(ToyPolicy):
    """Sends its own process a signal in the middle of a step or of a validation."""

    def __init__(
        self, *, step: int = -1, validation: int = -1, number: int = signal.SIGTERM
    ) -> None:
        super().__init__()
        self.step, self.validation, self.number = step, validation, number
        self.validated = 0

    def setup(self, stage: str) -> None:
        super().setup(stage)
        watch_over(self.trainer)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if self.global_step == self.step:
            os.kill(os.getpid(), self.number)
        super().training_step(batch, batch_idx)

    def validation_step(
        self, batch: torch.Tensor, batch_idx: int, dataloader_idx: int = 0
    ) -> dict[str, Any]:
        self.validated += 1
        if batch_idx == self.validation:
            os.kill(os.getpid(), self.number)
        return super().validation_step(batch, batch_idx, dataloader_idx)


def run(tmp_path: Path, module: L.LightningModule, steps: int = 6, **options: Any) -> L.Trainer:
    validation, ckpt_path = options.pop("validation", None), options.pop("ckpt_path", None)
    settings = {"enable_checkpointing": True, "plugins": [AtomicCheckpointIO()], **options}
    made = trainer(tmp_path, RLCheckpoint(tmp_path / "ck"), **settings)
    made.fit(module, batches(steps), validation, ckpt_path=ckpt_path, weights_only=True)
    return made


def last(tmp_path: Path) -> float:
    saved = torch.load(tmp_path / "ck" / "last.ckpt", weights_only=True)
    return float(saved["state_dict"]["policy.trained"])


def test_the_running_step_is_finished_and_saved(tmp_path: Path) -> None:
    # told in step 3 of 6: the weight counts finished steps
    with pytest.raises(Terminated) as raised:
        run(tmp_path, Told(step=2))
    assert raised.value.code == 143
    assert last(tmp_path) == 3.0

    module = Told()
    run(tmp_path, module, ckpt_path=tmp_path / "ck" / "last.ckpt")
    assert module.weight == 6.0


def test_a_validation_of_one_process_ends_early_and_the_run_goes_on_from_there(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"val_check_interval": 2, "validation": batches(3)}
    module = Told(validation=0)
    with pytest.raises(SystemExit):
        run(tmp_path, module, **options)
    assert (module.validated, last(tmp_path)) == (1, 2.0)

    again = Told()
    run(tmp_path, again, ckpt_path=tmp_path / "ck" / "last.ckpt", **options)
    assert again.weight == 6.0


@pytest.mark.parametrize("limit", [{"max_steps": 4}, {"max_epochs": 1}])
@pytest.mark.parametrize("told", [{"step": 3}, {"validation": 0}])
def test_a_run_that_is_asked_in_its_last_step_ends_as_if_it_were_not(
    tmp_path: Path, limit: dict[str, int], told: dict[str, int]
) -> None:
    module = Told(**told)
    options = {"val_check_interval": 4, "validation": batches(3), **limit}
    made = run(tmp_path, module, steps=4 if "max_epochs" in limit else 9, **options)
    assert made.state.finished
    assert module.validated == 3
    assert (module.weight, last(tmp_path)) == (4.0, 4.0)


class Accumulating(L.LightningModule):
    """Steps once in three batches, and is told in the first batch of the second step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen = 0

    def setup(self, stage: str) -> None:
        watch_over(self.trainer)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen += 1
        if batch_idx == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return -self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_accumulated_gradients_are_not_lost(tmp_path: Path) -> None:
    module = Accumulating()
    with pytest.raises(Terminated):
        run(tmp_path, module, steps=12, accumulate_grad_batches=3)
    saved = torch.load(tmp_path / "ck" / "last.ckpt", weights_only=True)
    # three batches of gradient 1/3 each make a step of 1; the window that was open is finished
    assert module.seen == 6
    torch.testing.assert_close(saved["state_dict"]["weight"], torch.tensor([2.0]))


def test_slurm_requeues_at_the_end_of_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = tmp_path / "called"
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f"#!/bin/sh\necho $@ > {called}\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    for name, value in {"JOB_ID": "4711", "NTASKS": "1", "PROCID": "0", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_NODEID", "0")

    # told in the middle of step 2; the run goes on until SLURM ends it
    run(tmp_path, Told(step=1, number=signal.SIGUSR1), plugins=[SLURMEnvironment()])

    assert called.read_text() == "requeue 4711\n"
    requeued = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)
    assert float(requeued["state_dict"]["policy.trained"]) == 2.0


def test_a_signal_outside_training_ends_the_run_too() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), answering_sigterm(None):
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_lightning_still_has_what_the_handlers_replace() -> None:
    """Fails when Lightning changes what `Termination` leans on."""
    registered = inspect.getsource(_SignalConnector.register_signal_handlers)
    assert "[self._sigterm_notifier_fn]" in registered
    assert "append(self._slurm_sigusr_handler_fn)" in registered
    assert "self.received_sigterm = True" in inspect.getsource(_SignalConnector)
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(_TrainingEpochLoop.advance)
    order = inspect.getsource(L.Trainer._run)
    setup, registering = "_call_setup_hook(self)", "register_signal_handlers()"
    assert order.index(setup) < order.index(registering)


def test_phases_are_told_to_the_watch(tmp_path: Path) -> None:
    made, module = trainer(tmp_path), ToyPolicy()
    made.strategy._lightning_module, module.trainer = module, made
    watch_over(made)
    (watch,) = [callback for callback in made.callbacks if isinstance(callback, Watch)]
    iteration = Iteration(module)
    with iteration.phase("generate"):
        assert watch.whereabouts == "in phase 'generate' of iteration 1"
    assert watch.whereabouts == "in phase 'between phases' of iteration 1"


# ---- real processes


def ended(process: "subprocess.Popen[str]", seconds: float = 180) -> str:
    output, _ = process.communicate(timeout=seconds)
    return output


def saved_at(folder: Path) -> tuple[int, float]:
    saved = torch.load(folder / "ck" / "last.ckpt", weights_only=True)
    return saved["global_step"], float(saved["state_dict"]["policy.weight"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "to"),
    [
        ("ddp_find_unused_parameters_true", "group"),
        pytest.param("ddp_find_unused_parameters_true", "rank 1", marks=pytest.mark.exhaustive),
        pytest.param(
            "ddp_fork_find_unused_parameters_true", "launcher", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_two_processes_save_and_end(tmp_path: Path, strategy: str, to: str) -> None:
    config = write_config(tmp_path, strategy=strategy)
    with running(fit(config), ROOT) as process:
        wait_for(process, tmp_path, 0, 4, "update")
        if to == "group":
            os.killpg(process.pid, signal.SIGTERM)
        else:
            os.kill(process.pid if to == "launcher" else pid_of(tmp_path, 1), signal.SIGTERM)
        output = ended(process)
        last = output.splitlines()[-1]
        assert process.returncode == 143, output
        assert last.startswith(TERMINATED), output
        assert last.endswith("last.ckpt"), output
        assert members(process.pid) == []
    step, weight = saved_at(tmp_path)
    # the end of the step that ran, or of the next one where the signal took its time
    assert step in {4, 5, 6}
    assert weight == step


@pytest.mark.slow
def test_a_rank_that_hangs_ends_all_at_its_deadline(tmp_path: Path) -> None:
    # rank 0 sleeps, rank 1 waits for it in a collective; the group would wait for half an hour
    deadlines = {"class_path": "Deadlines", "init_args": {"generate": 10.0, "grace": 5.0}}
    config = write_config(tmp_path, callbacks=[deadlines])
    with running(fit(config, "--model.stuck_at=2"), ROOT) as process:
        wait_for(process, tmp_path, 0, 2, "stuck")
        output = ended(process)
        assert process.returncode == 1, output
        deadline = time.monotonic() + 30
        while members(process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert members(process.pid) == []
    assert "error: rank 0 has been in phase 'generate' of iteration 2 for " in output
    assert "in phase 'generate' of iteration 2" in output.partition("rank 1 ")[2]
    assert "training_step" in (tmp_path / "stacks_rank0.txt").read_text()
    assert "collectives.py" in (tmp_path / "stacks_rank1.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("fork", ["", "fork_"])
def test_a_rank_that_was_stopped_ends_with_its_run(tmp_path: Path, fork: str) -> None:
    # rank 0 waits in a collective until its deadline; rank 1 hears of nothing
    limits = dict.fromkeys(("generate", "reward", "logprob", "update", "train", "data"), 10.0)
    deadlines = {"class_path": "Deadlines", "init_args": {**limits, "grace": 3.0}}
    strategy = f"ddp_{fork}find_unused_parameters_true"
    config = write_config(tmp_path, callbacks=[deadlines], strategy=strategy)
    with running(fit(config), ROOT) as process:
        wait_for(process, tmp_path, 0, 2, "update")
        stopped = pid_of(tmp_path, 1)
        os.kill(stopped, signal.SIGSTOP)
        output = ended(process)
        assert process.returncode == 1, output
        deadline = time.monotonic() + 30
        while members(process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert members(process.pid) == []
