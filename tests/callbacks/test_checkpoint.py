import shutil
from collections import namedtuple
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lrlhf.callbacks import AtomicCheckpointIO, RLCheckpoint, rl_checkpoint
from tests.callbacks.fakes import ToyPolicy, batches, trainer

Saved = dict[str, float]


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., RLCheckpoint]:
    """Train a module, and return the callback that saved checkpoints to ``ck``."""

    def go(module: ToyPolicy, steps: int, **options: Any) -> RLCheckpoint:
        saving = options.pop("saving", {"every_n_train_steps": 2})
        callback = RLCheckpoint(tmp_path / "ck", **saving)
        settings = {"enable_checkpointing": True, "plugins": [AtomicCheckpointIO()]}
        validation = options.pop("validation", None)
        ckpt_path = options.pop("ckpt_path", None)
        ckpt_path = None if ckpt_path is None else tmp_path / "ck" / ckpt_path
        run = trainer(tmp_path, callback, **(settings | options))
        run.fit(module, batches(steps), validation, ckpt_path=ckpt_path, weights_only=True)
        return callback

    return go


def saved(tmp_path: Path) -> Saved:
    """The trained weight, which is the number of finished steps, in each checkpoint."""
    return {
        path.name: float(torch.load(path, weights_only=True)["state_dict"]["policy.trained"])
        for path in (tmp_path / "ck").iterdir()
    }


def steps(*done: int, last: int) -> Saved:
    return {f"step={step:06d}.ckpt": step for step in done} | {"last.ckpt": last}


class Slow(ToyPolicy):
    """Takes 0.6 seconds, of a clock of its own, for its second step."""

    now = 0.0

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if batch_idx == 1:
            Slow.now += 0.6


class Scored(ToyPolicy):
    """Validates as 5, 9, 1, 3 after steps 2, 4, 6, 8."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("eval/score", {2: 5.0, 4: 9.0, 6: 1.0, 8: 3.0}[self.global_step])


@pytest.mark.parametrize(
    ("module", "count", "saving", "expected"),
    [
        # Lightning's own would warn here, and a warning is an error in these tests
        (ToyPolicy, 4, {"every_n_train_steps": 2, "save_top_k": -1}, steps(2, 4, last=4)),
        # the steps since the last trigger
        (ToyPolicy, 5, {"every_n_train_steps": 2}, steps(2, 4, last=5)),
        # nothing is due after the first step, and after the second half a second has passed
        (Slow, 3, {"train_time_interval": timedelta(seconds=0.5)}, steps(2, last=3)),
        # the score of step k is k - 1: a training metric ranks at once, the last is the highest
        (ToyPolicy, 4, {"monitor": "rollout/score", "every_n_train_steps": 2}, steps(4, last=4)),
        # each validation is a chance: 5 and 1 beat 9; the newest weights are kept beside them
        (Scored, 6, {"monitor": "eval/score", "mode": "min", "save_top_k": 2}, steps(2, 6, last=6)),
        (Scored, 6, {"monitor": "eval/score"}, steps(4, last=6)),
    ],
)
def test_what_is_saved_and_kept(
    fit: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    count: int,
    saving: Any,
    expected: Saved,
) -> None:
    monkeypatch.setattr(rl_checkpoint, "time", SimpleNamespace(monotonic=lambda: Slow.now))
    validation = {"val_check_interval": 2, "validation": batches(1)} if module is Scored else {}
    fit(module(), count, saving=saving, **validation)
    assert saved(tmp_path) == expected


def test_a_validation_metric_ranks_the_weights_that_it_measured(fit: Any, tmp_path: Path) -> None:
    # saved between two validations, step 3 would be filed under the score of step 2
    saving = {
        "filename": "{step}-{eval/score:.0f}",
        "auto_insert_metric_name": False,
        "monitor": "eval/score",
        "every_n_train_steps": 1,
    }
    best = fit(Scored(), 6, saving=saving, val_check_interval=2, validation=batches(1))
    assert saved(tmp_path) == {"4-9.ckpt": 4, "last.ckpt": 6}
    assert best.best_model_score == 9.0


def test_a_run_that_broke_off_resumes_from_the_last_checkpoint(fit: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the power went out"):
        fit(ToyPolicy(fail_at_step=3), 6)
    assert saved(tmp_path) == steps(2, last=2)
    module = ToyPolicy()
    fit(module, 6, ckpt_path="last.ckpt")
    assert module.weight == 6.0
    assert saved(tmp_path) == steps(4, 6, last=6)  # also what the first run saved is removed


def test_a_run_that_starts_over_beside_old_checkpoints_is_warned_and_keeps_them(
    fit: Any, tmp_path: Path
) -> None:
    fit(ToyPolicy(), 3, saving={"save_top_k": 0})
    with pytest.warns(UserWarning, match="checkpoints of an earlier run"):
        fit(ToyPolicy(), 2, saving={"save_top_k": 0})
    assert saved(tmp_path) == {"last.ckpt": 3, "last-v1.ckpt": 2}


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


# ---- which of them go


def test_what_the_run_continues_from_and_what_others_put_there_stays(
    fit: Any, tmp_path: Path
) -> None:
    saving = {"every_n_train_steps": 1, "save_top_k": 2}
    fit(ToyPolicy(), 6, saving=saving, max_steps=3)
    shutil.copy(tmp_path / "ck" / "step=000002.ckpt", tmp_path / "ck" / "good.ckpt")
    fit(ToyPolicy(), 6, saving=saving, ckpt_path="step=000002.ckpt")
    # step 3 of the first run is none of those that the second one knows of
    assert set(saved(tmp_path)) == {"good.ckpt", *steps(2, 3, 5, 6, last=6)}


def test_a_ranking_forgets_what_was_removed_by_hand(fit: Any, tmp_path: Path) -> None:
    # the best, step 4 with score 9, is gone when the run goes on: step 8 is then the best
    options: dict[str, Any] = {"val_check_interval": 2, "validation": batches(1)}
    options["saving"] = {"monitor": "eval/score", "every_n_train_steps": 1}
    fit(Scored(), 8, max_steps=7, **options)
    (tmp_path / "ck" / "step=000004.ckpt").unlink()
    again = fit(Scored(), 8, ckpt_path="last.ckpt", **options)
    assert set(saved(tmp_path)) == set(steps(8, last=8))
    assert again.best_model_score == 3.0


class FolderIO(AtomicCheckpointIO):
    """Writes folders, as sharded checkpoints are; a removal may be interrupted."""

    interrupted = False

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        super().save_checkpoint(checkpoint, Path(path) / "shard0", storage_options)

    def remove_checkpoint(self, path: str | Path) -> None:
        if self.interrupted:
            raise KeyError("killed while removing")
        super().remove_checkpoint(path)


def test_folders_are_removed_whole_and_a_kill_meanwhile_leaves_no_half_one(
    fit: Any, tmp_path: Path
) -> None:
    saving = {"every_n_train_steps": 1, "save_top_k": 1, "save_last": False}
    io = FolderIO()
    fit(ToyPolicy(), 3, saving=saving, plugins=[io])
    assert [path.name for path in (tmp_path / "ck").iterdir()] == ["step=000003.ckpt"]
    shutil.rmtree(tmp_path / "ck")
    io.interrupted = True
    with pytest.raises(KeyError, match="killed"):
        fit(ToyPolicy(), 3, saving=saving, plugins=[io])
    # a removal had begun: the name is gone, what is left is hidden
    names = {path.name for path in (tmp_path / "ck").iterdir()}
    assert names == {".step=000001.ckpt.removed", "step=000002.ckpt"}
    io.interrupted = False
    with pytest.warns(UserWarning, match="earlier run"):
        fit(ToyPolicy(), 1, saving=saving, plugins=[io])
    assert not list((tmp_path / "ck").glob(".*"))


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(("free", "done"), [(3, 0), (10, 1)])
def test_a_checkpoint_without_room_is_not_begun(
    fit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, done: int
) -> None:
    # two float32 weights take 8 bytes, which shows at the start; a checkpoint has 4 more
    class Heavier(ToyPolicy):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["more"] = [torch.zeros(1)]

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100, 100 - free, free))
    module = Heavier()
    with pytest.raises(OSError, match="make room"):
        fit(module, 2, saving={"every_n_train_steps": 1})
    assert module.weight == done
    assert not list((tmp_path / "ck").glob("*"))
