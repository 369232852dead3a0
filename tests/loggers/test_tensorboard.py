"""The events of a killed run are those of one that was not."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from lrlhf.loggers import ResumingTensorBoardLogger
from tests.loggers.runs import KilledAfterSaving, KilledError, Killer, Toy, run_stages, train


class Says(L.Callback):
    """Writes a text in the middle of every step, past the logger's own methods."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.loggers[0].experiment.add_text(
            "said", f"step {trainer.global_step}", trainer.global_step
        )


def go(folder: Path, *callbacks: L.Callback, **options: Any) -> None:
    module = Toy()
    module.save_hyperparameters({"lr": 0.1})
    train(folder, [ResumingTensorBoardLogger(folder)], *callbacks, Says(), module=module, **options)


def events_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    tags = read.Tags()
    scalars = {
        tag: [(event.step, event.value) for event in read.Scalars(tag)]
        for tag in tags["scalars"]
        if not tag.startswith("perf/")
    }
    texts = {tag: [(event.step, 0.0) for event in read.Tensors(tag)] for tag in tags["tensors"]}
    return scalars | texts


@pytest.mark.parametrize(
    "killer",
    [
        lambda folder: KilledAfterSaving(6, dirpath=folder / "checkpoints", every_n_train_steps=3),
        lambda _: Killer("on_train_batch_start", 8),
        lambda _: Killer("on_validation_end", 4),
    ],
)
def test_the_events_of_a_killed_run_are_those_of_a_whole_one(tmp_path: Path, killer: Any) -> None:
    go(tmp_path / "whole")
    folder = tmp_path / "killed"
    with pytest.raises(KilledError):
        go(folder, killer(folder))
    go(folder)
    assert events_of(folder / "tensorboard") == events_of(tmp_path / "whole" / "tensorboard")


def test_a_new_run_keeps_the_events_of_an_earlier_one(tmp_path: Path) -> None:
    for count in (2, 3):
        go(tmp_path, max_steps=count, save={"dirpath": tmp_path / str(count)})
    assert len(events_of(tmp_path / "tensorboard.1")["train/loss"]) == 2
    assert len(events_of(tmp_path / "tensorboard")["train/loss"]) == 3


def test_events_that_someone_removed_are_missed_aloud(tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        go(tmp_path, Killer("on_train_batch_start", 6))
    (file,) = (tmp_path / "tensorboard").glob("events*")
    file.unlink()
    with pytest.warns(UserWarning, match="has lost events from before the checkpoint"):
        go(tmp_path)


def test_an_evaluation_by_itself_has_a_folder_of_its_own(tmp_path: Path) -> None:
    go(tmp_path)
    before = {file: file.read_bytes() for file in (tmp_path / "tensorboard").glob("events*")}
    trainer = L.Trainer(
        accelerator="cpu",
        logger=ResumingTensorBoardLogger(tmp_path),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.test(Toy(), DataLoader(torch.zeros(4, 4), batch_size=2), verbose=False)
    after = {file: file.read_bytes() for file in (tmp_path / "tensorboard").glob("events*")}
    assert after == before
    assert events_of(tmp_path / "tensorboard" / "test")["test/loss"] == [(0, 0.0)]


def test_stages_of_one_trainer_keep_their_folders(tmp_path: Path) -> None:
    run_stages(tmp_path, ResumingTensorBoardLogger())
    events = events_of(tmp_path / "tensorboard")
    assert [step for step, _ in events["train/loss"]] == [1, 2, 3, 4]
    # written with the hyperparameters
    assert [step for step, _ in events["hp_metric"]] == [0, 0]
    evaluations = events_of(tmp_path / "tensorboard" / "validate")
    assert [step for step, _ in evaluations["eval/loss"]] == [0, 2]


def test_a_trainer_that_goes_back_to_a_checkpoint_cuts_its_own_events(tmp_path: Path) -> None:
    log = ResumingTensorBoardLogger(tmp_path)
    log.log_metrics({"a": 1.0}, step=1)
    position = log.log_position()
    log.log_metrics({"a": 2.0}, step=2)
    log.rewind(position)
    log.log_metrics({"a": 3.0}, step=2)
    assert events_of(tmp_path / "tensorboard")["a"] == [(1, 1.0), (2, 3.0)]
    # a second run of the same logger
    log.start_run()
    log.log_metrics({"a": 4.0}, step=1)
    assert events_of(tmp_path / "tensorboard")["a"] == [(1, 4.0)]
    assert events_of(tmp_path / "tensorboard.1")["a"] == [(1, 1.0), (2, 3.0)]
