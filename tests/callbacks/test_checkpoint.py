import shutil
import time
from collections import namedtuple
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
    assert saved(tmp_path / "ck") == {"step=000002.ckpt": 2, "step=000004.ckpt": 4, "last.ckpt": 5}


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


# ---- which of them go


class FourScores(ToyPolicy):
    """Validates as 5, 3, 9, 1 after steps 2, 4, 6, 8."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("eval/score", {2: 5.0, 4: 3.0, 6: 9.0, 8: 1.0}[self.global_step])


def test_a_resumed_run_removes_what_the_first_one_saved(tmp_path: Path) -> None:
    options: dict[str, Any] = {"every_n_train_steps": 1}
    fit(tmp_path, RLCheckpoint(tmp_path / "ck", **options), ToyPolicy(), 6, max_steps=3)
    again = RLCheckpoint(tmp_path / "ck", **options)
    fit(tmp_path, again, ToyPolicy(), 6, ckpt_path=tmp_path / "ck" / "last.ckpt")
    assert saved(tmp_path / "ck") == {"step=000005.ckpt": 5, "step=000006.ckpt": 6, "last.ckpt": 6}


def test_what_the_run_continues_from_and_what_others_put_there_stays(tmp_path: Path) -> None:
    options: dict[str, Any] = {"every_n_train_steps": 1, "save_top_k": 2}
    fit(tmp_path, RLCheckpoint(tmp_path / "ck", **options), ToyPolicy(), 6, max_steps=3)
    shutil.copy(tmp_path / "ck" / "step=000002.ckpt", tmp_path / "ck" / "good.ckpt")
    again = RLCheckpoint(tmp_path / "ck", **options)
    fit(tmp_path, again, ToyPolicy(), 6, ckpt_path=tmp_path / "ck" / "step=000002.ckpt")
    kept = {"good.ckpt", "step=000002.ckpt", "step=000005.ckpt", "step=000006.ckpt", "last.ckpt"}
    # step 3 of the first run is none of those that the second one knows of
    assert set(saved(tmp_path / "ck")) == kept | {"step=000003.ckpt"}


def test_a_ranking_forgets_what_was_removed_by_hand(tmp_path: Path) -> None:
    # the best, step 6 with score 9, is gone when the run goes on: step 8 is then the best
    options: dict[str, Any] = {"monitor": "eval/score", "every_n_train_steps": 1}
    run: dict[str, Any] = {"val_check_interval": 2, "validation": batches(1)}
    fit(tmp_path, RLCheckpoint(tmp_path / "ck", **options), FourScores(), 8, max_steps=7, **run)
    (tmp_path / "ck" / "step=000006.ckpt").unlink()
    again = RLCheckpoint(tmp_path / "ck", **options)
    fit(tmp_path, again, FourScores(), 8, ckpt_path=tmp_path / "ck" / "last.ckpt", **run)
    assert set(saved(tmp_path / "ck")) == {"step=000008.ckpt", "last.ckpt"}
    assert again.best_model_score == 1.0


class FolderIO(AtomicCheckpointIO):
    """Writes folders, as sharded checkpoints are."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        super().save_checkpoint(checkpoint, Path(path) / "shard0", storage_options)


def test_folders_are_removed_whole(tmp_path: Path) -> None:
    one = RLCheckpoint(tmp_path / "ck", every_n_train_steps=1, save_top_k=1, save_last=False)
    fit(tmp_path, one, ToyPolicy(), 3, plugins=[FolderIO()])
    assert [path.name for path in (tmp_path / "ck").iterdir()] == ["step=000003.ckpt"]


class Interrupted(AtomicCheckpointIO):
    def remove_checkpoint(self, path: str | Path) -> None:
        raise KeyError("killed while removing")


def test_a_kill_while_removing_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    def make() -> RLCheckpoint:
        return RLCheckpoint(tmp_path / "ck", every_n_train_steps=1, save_last=False, save_top_k=1)

    with pytest.raises(KeyError, match="killed"):
        fit(tmp_path, make(), ToyPolicy(), 3, plugins=[Interrupted()])
    # a removal had begun: the name is gone, what is left is hidden
    names = {path.name for path in (tmp_path / "ck").iterdir()}
    assert names == {".step=000001.ckpt.removed", "step=000002.ckpt"}

    with pytest.warns(UserWarning, match="earlier run"):
        fit(tmp_path, make(), ToyPolicy(), 1)
    assert not list((tmp_path / "ck").glob(".*"))


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(("free", "steps"), [(3, 0), (10, 1)])
def test_a_checkpoint_without_room_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, steps: int
) -> None:
    # two float32 weights take 8 bytes, which shows at the start; a checkpoint has 4 more
    class Heavier(ToyPolicy):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["more"] = [torch.zeros(1)]

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100, 100 - free, free))
    module = Heavier()
    with pytest.raises(OSError, match="make room"):
        fit(tmp_path, RLCheckpoint(tmp_path / "ck", every_n_train_steps=1), module, 2)
    assert module.weight == steps
    assert not list((tmp_path / "ck").glob("*"))
