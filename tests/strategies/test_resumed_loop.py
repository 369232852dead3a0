"""A run that goes on from a checkpoint of any instant does what the run without a break did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lrlhf.run import count_iterations_as_steps, resume_where_it_stopped
from lrlhf.run.checkpoints.checkpoint_reader import NotACheckpointError
from lrlhf.run.lightning_loops import NoProgressError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(smaller than the logging interval|many workers)"),
    pytest.mark.filterwarnings("ignore:.*max_epochs` was not set"),
]


class Numbers:
    """An endless stream 0, 1, 2, ... cut into epochs, whose position is in the checkpoint."""

    def __init__(self, size: int, *, exhausted: bool = False) -> None:
        self.size = size
        self.position = 0
        self.resumed = False
        self.exhausted = exhausted

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Tensor]:
        left = self.size - self.position % self.size if self.resumed else self.size
        if self.resumed and self.exhausted:
            return
        self.resumed = False
        while left:
            self.position += 1
            left -= 1
            yield torch.tensor([float(self.position - 1)])

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]
        self.resumed = True


class Toy(L.LightningModule):
    """Its weight is the sum of the batches it has seen."""

    def __init__(self, trace: list[str], *, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.weight = nn.Parameter(torch.zeros(1))
        self.trace = trace

    def setup(self, stage: str) -> None:
        if not self.automatic_optimization:
            count_iterations_as_steps(self.trainer)
        resume_where_it_stopped(self.trainer)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.weight], lr=1.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        self.trace.append(f"batch {int(batch)} is number {batch_idx} of the epoch")
        self.log("train", batch.sum())
        loss = -(self.weight * batch).sum()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return None

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.weight.sum())


class Rows(DummyLogger):
    def __init__(self, trace: list[str]) -> None:
        super().__init__()
        self.trace = trace

    def log_metrics(self, metrics: Any = None, step: Any = None, *_: Any, **__: Any) -> None:
        values = {name: float(value) for name, value in sorted(metrics.items())}
        self.trace.append(f"row {step}: {values}")


SAVES = [
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
]


class Saver(Checkpoint):
    """Notes each hook, and saves a checkpoint in it."""

    def __init__(self, trace: list[str], folder: Path | None) -> None:
        self.trace = trace
        self.folder = folder
        self.saved: list[tuple[Path, int]] = []

    def note(self, hook: str, trainer: L.Trainer) -> None:
        self.trace.append(f"{hook}: step {trainer.global_step}, epoch {trainer.current_epoch}")
        if self.folder is not None:
            path = self.folder / f"{len(self.saved):03d}_{hook}.ckpt"
            trainer.save_checkpoint(path)
            self.saved.append((path, len(self.trace)))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.trace.append(f"epoch {trainer.current_epoch}")


for _hook in SAVES:
    setattr(Saver, _hook, lambda self, trainer, *_, hook=_hook: self.note(hook, trainer))


def run(
    root: Path,
    *,
    manual: bool,
    size: int,
    saves: Path | None = None,
    ckpt_path: Path | None = None,
    exhausted: bool = False,
    sets: int = 1,
    **options: Any,
) -> tuple[list[str], list[tuple[Path, int]]]:
    """Train; returns what happened, and the checkpoints with the number of what came before."""
    trace: list[str] = []
    saver = Saver(trace, saves)
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": Rows(trace),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "default_root_dir": root,
        "callbacks": [saver],
    }
    module = Toy(trace, manual=manual)
    trainer = L.Trainer(**(settings | options))
    validation = DataLoader(torch.arange(2.0), batch_size=1)
    trainer.fit(
        module,
        Numbers(size, exhausted=exhausted),
        [validation] * sets,
        ckpt_path=ckpt_path,
        weights_only=True,
    )
    trace.append(f"ended at step {trainer.global_step} with {module.weight.item()}")
    return trace, saver.saved


def still_to_come(trace: list[str], saved: Path, position: int) -> list[str]:
    """What a run that goes on from a checkpoint has to do."""
    hook = saved.stem.split("_", 1)[1]
    if hook in ("on_validation_start", "on_validation_batch_end"):
        # a validation that was broken off starts anew
        while not trace[position - 1].startswith("on_validation_start"):
            position -= 1
        return trace[position - 1 :]
    if hook == "on_train_batch_end" and "'train'" in trace[position]:
        return trace[position + 1 :]  # the row of the step is the loggers' business
    if hook == "on_train_end":
        return trace[position - 1 :]  # the end of a run is told again
    return trace[position:]


RUNS: dict[str, dict[str, Any]] = {
    "inside epochs": {"max_epochs": 2, "val_check_interval": 2, "size": 3},
    "of two sets": {"max_epochs": 2, "val_check_interval": 2, "size": 3, "sets": 2},
    "at their ends": {"max_epochs": 2, "size": 2},
    "by steps": {"max_steps": 5, "max_epochs": -1, "size": 3},
    "at the last step": {"max_steps": 2, "max_epochs": -1, "val_check_interval": 2, "size": 6},
    "without": {"max_steps": 3, "max_epochs": -1, "limit_val_batches": 0, "size": 2},
    "across epochs": {
        "max_steps": 4,
        "max_epochs": -1,
        "val_check_interval": 3,
        "check_val_every_n_epoch": None,
        "size": 2,
    },
    "every second epoch": {"max_epochs": 2, "check_val_every_n_epoch": 2, "size": 2},
    "accumulating": {
        "max_epochs": 2,
        "accumulate_grad_batches": 2,
        "val_check_interval": 2,
        "size": 4,
    },
}


SHORT = ("inside epochs", "of two sets", "at the last step", "across epochs", "accumulating")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("validation", "manual"),
    [
        pytest.param(name, manual, marks=() if short else pytest.mark.exhaustive)
        for name in RUNS
        for manual in ((False,) if name == "accumulating" else (True, False))
        # each kind of run once, by either kind of optimization
        for short in [name in SHORT and manual == (name not in ("inside epochs", "accumulating"))]
    ],
)
def test_a_run_goes_on_from_any_instant(validation: str, manual: bool, tmp_path: Path) -> None:
    options = RUNS[validation]
    trace, saved = run(tmp_path, manual=manual, saves=tmp_path, **options)
    assert len(saved) >= 6
    for path, position in saved:
        in_a_step = validation == "accumulating" and "train_batch_end" in path.name
        if in_a_step and trace[position].startswith("batch"):
            continue  # gradients of half a step are in no checkpoint
        resumed, _ = run(tmp_path, manual=manual, ckpt_path=path, **options)
        assert resumed == still_to_come(trace, path, position), path.name


def test_the_validation_that_was_due_is_done_first(tmp_path: Path) -> None:
    options = RUNS["at the last step"]
    _, saved = run(tmp_path, manual=True, saves=tmp_path, **options)
    at_the_end = next(path for path, _ in saved[1:] if "on_train_batch_end" in path.name)
    resumed, _ = run(tmp_path, manual=True, ckpt_path=at_the_end, **options)
    # steps are counted from 0 in rows: the second one trained, and was then validated
    assert "row 1: {'epoch': 0.0, 'val': 1.0}" in resumed
    assert "on_train_end: step 2, epoch 1" in resumed
    assert not any(line.startswith("batch") for line in resumed)


class Stop(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 2


@pytest.mark.parametrize(
    ("options", "validated"),
    [
        pytest.param({"max_steps": 5, "val_check_interval": 2}, [2, 4, 5], id="by steps"),
        pytest.param({"max_steps": 4, "val_check_interval": 2}, [2, 4], id="once where it is due"),
        pytest.param({"max_epochs": 1, "val_check_interval": 4}, [4, 6], id="by epochs"),
        pytest.param({"max_steps": 2, "limit_val_batches": 0}, [], id="where it is wanted"),
        pytest.param(
            {"max_steps": 9, "val_check_interval": 4, "callbacks": [Stop()]}, [2], id="stopped"
        ),
    ],
)
def test_a_run_ends_with_a_validation(
    options: dict[str, Any], validated: list[int], tmp_path: Path
) -> None:
    options = {"max_epochs": -1, "check_val_every_n_epoch": None, **options}
    trace: list[str] = []
    run(tmp_path, manual=True, size=6, **{**options, "logger": Rows(trace)})
    rows = [line.split(":")[0] for line in trace if "'val'" in line]
    assert rows == [f"row {step - 1}" for step in validated]  # rows here count from 0


@pytest.mark.parametrize("stop", [2, 3])
def test_a_run_that_is_made_longer_goes_on_with_the_next_batch(stop: int, tmp_path: Path) -> None:
    longer: dict[str, Any] = {"manual": True, "max_epochs": -1, "size": 3, "limit_val_batches": 0}
    straight, _ = run(tmp_path, max_steps=5, **longer)
    _, saved = run(tmp_path, saves=tmp_path, max_steps=stop, **longer)
    resumed, _ = run(tmp_path, ckpt_path=saved[-1][0], max_steps=5, **longer)

    def kept(trace: list[str]) -> list[str]:
        batches = [line.split(" is")[0] for line in trace if line.startswith("batch")]
        rows = [line.split(":")[0] for line in trace if line.startswith("row")]
        return [*batches[stop - 5 :], *rows[stop - 5 :], trace[-1]]

    assert kept(resumed) == kept(straight)
    assert len([line for line in resumed if line.startswith("batch")]) == 5 - stop


def test_data_that_give_nothing_after_a_resume_are_an_error(tmp_path: Path) -> None:
    options: dict[str, Any] = {"manual": True, "max_epochs": -1, "size": 2, "limit_val_batches": 0}
    _, saved = run(tmp_path, saves=tmp_path, max_steps=3, **options)
    first = saved[0][0]
    with pytest.raises(NoProgressError, match=r"gave no batch in epoch 1, after step 1 "):
        run(tmp_path, ckpt_path=first, exhausted=True, max_steps=3, **options)


def test_weights_alone_are_no_place_to_go_on_from(tmp_path: Path) -> None:
    options: dict[str, Any] = {"manual": True, "max_epochs": -1, "size": 2, "limit_val_batches": 0}
    _, saved = run(tmp_path, saves=tmp_path, max_steps=1, **options)
    stored = torch.load(saved[0][0], weights_only=True)
    for name in ("optimizer_states", "lr_schedulers", "callbacks"):
        del stored[name]
    torch.save(stored, tmp_path / "weights.ckpt")
    with pytest.raises(NotACheckpointError, match=r"weights\.ckpt holds weights only"):
        run(tmp_path, ckpt_path=tmp_path / "weights.ckpt", max_steps=3, **options)
