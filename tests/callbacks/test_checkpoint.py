import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lrlhf.callbacks import AtomicCheckpointIO, RLCheckpoint
from tests.callbacks.fakes import ToyPolicy, batches, trainer


def fit(
    tmp_path: Path, callback: RLCheckpoint, module: ToyPolicy, steps: int, **options: Any
) -> None:
    settings = {"enable_checkpointing": True, "plugins": [AtomicCheckpointIO()]}
    validation = options.pop("validation", None)
    ckpt_path = options.pop("ckpt_path", None)
    run = trainer(tmp_path, callback, **(settings | options))
    run.fit(module, batches(steps), validation, ckpt_path=ckpt_path, weights_only=True)


def saved(folder: Path) -> dict[str, float]:
    """The trained weight, which is the number of finished steps, in each checkpoint."""
    return {
        path.name: float(torch.load(path, weights_only=True)["state_dict"]["policy.trained"])
        for path in folder.iterdir()
    }


def test_checkpoints_are_saved_by_step_under_manual_optimization(tmp_path: Path) -> None:
    # Lightning's own would warn here, and a warning is an error in these tests
    fit(
        tmp_path,
        RLCheckpoint(tmp_path / "ck", every_n_train_steps=2, save_top_k=-1),
        ToyPolicy(),
        4,
    )
    assert saved(tmp_path / "ck") == {"step=000002.ckpt": 2, "step=000004.ckpt": 4, "last.ckpt": 4}


def test_the_steps_since_the_last_trigger_are_in_the_last_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path, RLCheckpoint(tmp_path / "ck", every_n_train_steps=2), ToyPolicy(), 5)
    assert saved(tmp_path / "ck") == {"step=000004.ckpt": 4, "last.ckpt": 5}


def test_checkpoints_are_saved_by_time_under_manual_optimization(tmp_path: Path) -> None:
    class Slow(ToyPolicy):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            if batch_idx == 1:
                time.sleep(0.6)

    # nothing is due after the first step, and after the second half a second has passed
    by_time = RLCheckpoint(tmp_path / "ck", train_time_interval=timedelta(seconds=0.5))
    fit(tmp_path, by_time, Slow(), 3)
    assert saved(tmp_path / "ck") == {"step=000002.ckpt": 2, "last.ckpt": 3}


class Scored(ToyPolicy):
    """Validates as 5, 9, 1 after steps 2, 4, 6."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("eval/score", {2: 5.0, 4: 9.0, 6: 1.0}[self.global_step])


def test_a_validation_metric_ranks_the_weights_that_it_measured(tmp_path: Path) -> None:
    # saved between two validations, step 3 would be filed under the score of step 2
    best = RLCheckpoint(
        tmp_path / "ck",
        filename="{step}-{eval/score:.0f}",
        auto_insert_metric_name=False,
        monitor="eval/score",
        every_n_train_steps=1,
    )
    fit(tmp_path, best, Scored(), 6, val_check_interval=2, validation=batches(1))
    assert saved(tmp_path / "ck") == {"4-9.ckpt": 4, "last.ckpt": 6}
    assert best.best_model_score == 9.0


def test_with_a_metric_alone_each_validation_is_a_chance(tmp_path: Path) -> None:
    lowest = RLCheckpoint(tmp_path / "ck", monitor="eval/score", mode="min", save_top_k=2)
    fit(tmp_path, lowest, Scored(), 6, val_check_interval=2, validation=batches(1))
    # scores 5 and 1 beat 9; the newest weights are kept beside them
    assert saved(tmp_path / "ck") == {"step=000002.ckpt": 2, "step=000006.ckpt": 6, "last.ckpt": 6}


def test_the_last_checkpoint_is_the_newest_even_if_it_ranks_low(tmp_path: Path) -> None:
    highest = RLCheckpoint(tmp_path / "ck", monitor="eval/score")
    fit(tmp_path, highest, Scored(), 6, val_check_interval=2, validation=batches(1))
    assert saved(tmp_path / "ck") == {"step=000004.ckpt": 4, "last.ckpt": 6}


def test_a_training_metric_ranks_at_once(tmp_path: Path) -> None:
    # the score of step k is k - 1: the last one is the highest
    highest = RLCheckpoint(tmp_path / "ck", monitor="rollout/score", every_n_train_steps=2)
    fit(tmp_path, highest, ToyPolicy(), 4)
    assert saved(tmp_path / "ck") == {"step=000004.ckpt": 4, "last.ckpt": 4}


def test_a_run_that_broke_off_resumes_from_the_last_checkpoint(tmp_path: Path) -> None:
    first = RLCheckpoint(tmp_path / "ck", every_n_train_steps=2)
    with pytest.raises(RuntimeError, match="the power went out"):
        fit(tmp_path, first, ToyPolicy(fail_at_step=3), 6)
    assert saved(tmp_path / "ck") == {"step=000002.ckpt": 2, "last.ckpt": 2}
    module = ToyPolicy()
    again = RLCheckpoint(tmp_path / "ck", every_n_train_steps=2)
    fit(tmp_path, again, module, 6, ckpt_path=tmp_path / "ck" / "last.ckpt")
    assert module.weight == 6.0
    assert saved(tmp_path / "ck")["last.ckpt"] == 6


def test_a_run_that_starts_over_beside_old_checkpoints_is_warned_and_keeps_them(
    tmp_path: Path,
) -> None:
    fit(tmp_path, RLCheckpoint(tmp_path / "ck", save_top_k=0), ToyPolicy(), 3)
    with pytest.warns(UserWarning, match="checkpoints of an earlier run"):
        fit(tmp_path, RLCheckpoint(tmp_path / "ck", save_top_k=0), ToyPolicy(), 2)
    assert saved(tmp_path / "ck") == {"last.ckpt": 3, "last-v1.ckpt": 2}


class Breaks:
    """Its pickling fails in the middle of a checkpoint."""

    def __reduce__(self) -> str:
        raise OSError("disk full")


def test_a_checkpoint_that_fails_midway_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    io = AtomicCheckpointIO()
    io.save_checkpoint({"step": 1}, path)
    with pytest.raises(OSError, match="disk full"):
        io.save_checkpoint({"step": 2, "weights": torch.zeros(1000), "x": Breaks()}, path)
    assert io.load_checkpoint(path, weights_only=True) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_storage_options_are_refused_as_lightning_does(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="storage_options"):
        AtomicCheckpointIO().save_checkpoint({}, tmp_path / "a.ckpt", storage_options={"a": 1})
