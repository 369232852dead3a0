import shutil
import time
from collections import namedtuple
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from torch import Tensor

from lrlhf.callbacks import EMA, AtomicCheckpointIO, RLCheckpoint
from lrlhf.callbacks.checkpoints.checkpoint_sizes import (
    SizeForecast,
    check_room,
    checkpoint_sizes,
    forecast_size,
    set_aside,
    surplus,
)
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


# ---- how much room they take


class Heavy(ToyPolicy):
    """Its checkpoints take a megabyte, and some hundred bytes."""

    scores: ClassVar[dict[int, float]] = {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["padding"] = torch.zeros(250_000)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("eval/score", self.scores[self.global_step])


def test_the_oldest_go_when_the_room_is_used_up(tmp_path: Path) -> None:
    # room for two of 1 MB; last.ckpt is a link to the newer one
    limited = RLCheckpoint(
        tmp_path / "ck", every_n_train_steps=1, save_top_k=-1, max_total_size_gb=0.0025
    )
    fit(tmp_path, limited, Heavy(), 6)
    assert saved(tmp_path / "ck") == {"step=000005.ckpt": 5, "step=000006.ckpt": 6, "last.ckpt": 6}


class FourScores(Heavy):
    scores: ClassVar[dict[int, float]] = {2: 5.0, 4: 3.0, 6: 9.0, 8: 1.0}


def test_the_worst_go_first_where_a_metric_ranks_them(tmp_path: Path) -> None:
    # room for three: after step 8 there would be four, and of the ranked ones that are neither the
    # best (6) nor the newest (8), step 4 is worse than step 2
    limited = RLCheckpoint(
        tmp_path / "ck", monitor="eval/score", save_top_k=-1, max_total_size_gb=0.0035
    )
    fit(tmp_path, limited, FourScores(), 8, val_check_interval=2, validation=batches(1))
    assert set(saved(tmp_path / "ck")) == {
        "step=000002.ckpt",
        "step=000006.ckpt",
        "step=000008.ckpt",
        "last.ckpt",
    }
    assert limited.best_model_score == 9.0
    assert {Path(path).name for path in limited.best_k_models} == set(saved(tmp_path / "ck")) - {
        "last.ckpt"
    }


def test_the_newest_and_the_last_stay_whatever_the_limit(tmp_path: Path) -> None:
    limited = RLCheckpoint(
        tmp_path / "ck", every_n_train_steps=1, save_top_k=-1, max_total_size_gb=1e-6
    )
    fit(tmp_path, limited, Heavy(), 3)
    assert saved(tmp_path / "ck") == {"step=000003.ckpt": 3, "last.ckpt": 3}


def test_what_somebody_else_put_there_stays_and_counts(tmp_path: Path) -> None:
    (tmp_path / "ck").mkdir()
    torch.save({"state_dict": {"policy.trained": 0.0}}, tmp_path / "ck" / "good.ckpt")
    limited = RLCheckpoint(
        tmp_path / "ck", every_n_train_steps=1, save_top_k=-1, max_total_size_gb=0.002
    )
    with pytest.warns(UserWarning, match="checkpoints of an earlier run"):
        fit(tmp_path, limited, Heavy(), 3)
    assert set(saved(tmp_path / "ck")) == {"good.ckpt", "step=000003.ckpt", "last.ckpt"}


def test_a_resumed_run_removes_what_the_first_one_saved(tmp_path: Path) -> None:
    options: dict[str, Any] = {"every_n_train_steps": 1, "save_top_k": -1}
    fit(tmp_path, RLCheckpoint(tmp_path / "ck", **options), Heavy(), 6, max_steps=3)
    limited = RLCheckpoint(tmp_path / "ck", max_total_size_gb=0.0025, **options)
    last = tmp_path / "ck" / "last.ckpt"
    fit(tmp_path, limited, Heavy(), 6, ckpt_path=last)
    assert saved(tmp_path / "ck") == {"step=000005.ckpt": 5, "step=000006.ckpt": 6, "last.ckpt": 6}


def test_the_one_that_the_run_continues_from_stays(tmp_path: Path) -> None:
    options: dict[str, Any] = {"every_n_train_steps": 1, "save_top_k": -1}
    fit(tmp_path, RLCheckpoint(tmp_path / "ck", **options), Heavy(), 6, max_steps=3)
    limited = RLCheckpoint(tmp_path / "ck", max_total_size_gb=0.0035, **options)
    fit(tmp_path, limited, Heavy(), 6, ckpt_path=tmp_path / "ck" / "step=000002.ckpt")
    assert set(saved(tmp_path / "ck")) >= {"step=000002.ckpt", "step=000006.ckpt", "last.ckpt"}
    assert "step=000004.ckpt" not in saved(tmp_path / "ck")


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
    fit(tmp_path, one, Heavy(), 3, plugins=[FolderIO()])
    assert [path.name for path in (tmp_path / "ck").iterdir()] == ["step=000003.ckpt"]

    limited = RLCheckpoint(
        tmp_path / "c2",
        every_n_train_steps=1,
        save_top_k=-1,
        save_last=False,
        max_total_size_gb=0.0025,
    )
    fit(tmp_path, limited, Heavy(), 4, plugins=[FolderIO()])
    names = sorted(path.name for path in (tmp_path / "c2").iterdir())
    assert names == ["step=000003.ckpt", "step=000004.ckpt"]


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


def test_sizes_of_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(b"123")
    (tmp_path / "b.ckpt" / "part.ckpt").mkdir(parents=True)
    (tmp_path / "b.ckpt" / "part.ckpt" / "x").write_bytes(b"12345")
    (tmp_path / "b.ckpt" / "y").write_bytes(b"12")
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "c.ckpt").write_bytes(b"1")
    (tmp_path / "notes.txt").write_bytes(b"1234")
    sizes = checkpoint_sizes(tmp_path)
    found = {str(path.relative_to(tmp_path)): size for path, size in sizes.items()}
    assert found == {"a.ckpt": 3, "b.ckpt": 7, "eval/c.ckpt": 1}


def test_only_as_much_goes_as_has_to() -> None:
    a, b, c = Path("a"), Path("b"), Path("c")
    sizes = {a: 4, b: 3, c: 2}
    assert surplus(sizes, [b, a], limit=9) == []
    assert surplus(sizes, [b, a], limit=8) == [b]
    assert surplus(sizes, [b, a], limit=5) == [b, a]
    assert surplus(sizes, [b], limit=1) == [b]


def test_setting_aside_replaces_what_was_left_there(tmp_path: Path) -> None:
    (tmp_path / ".a.ckpt.removed").mkdir()
    (tmp_path / ".a.ckpt.removed" / "old").touch()
    (tmp_path / "a.ckpt").write_text("new")
    set_aside(tmp_path / "a.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == [".a.ckpt.removed"]
    assert (tmp_path / ".a.ckpt.removed").read_text() == "new"


class AdamPolicy(ToyPolicy):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([self.policy.trained], lr=0.1)


class Forecaster(L.Callback):
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.whole = forecast_size(trainer, weights_only=False)
        self.weights = forecast_size(trainer, weights_only=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.at_the_end = forecast_size(trainer, weights_only=False)


def test_the_forecast_counts_weights_moments_and_averages(tmp_path: Path) -> None:
    # float32: a trained and a frozen number, two moments and an average of the trained one
    forecaster = Forecaster()
    run = trainer(tmp_path, EMA(), forecaster)
    run.fit(AdamPolicy(), batches(1))
    assert forecaster.whole == SizeForecast(weights=8, optimizers=8, callbacks=4)
    assert forecaster.weights == SizeForecast(weights=8, optimizers=0, callbacks=0)
    # AdamW also counts its steps, in float32
    assert forecaster.at_the_end == SizeForecast(weights=8, optimizers=12, callbacks=4)


def test_plain_sgd_keeps_nothing(tmp_path: Path) -> None:
    forecaster = Forecaster()
    trainer(tmp_path, forecaster).fit(ToyPolicy(), batches(1))
    assert forecaster.whole.optimizers == 0


Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def _disk_of_10_gb_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**12, 0, 10 * 10**9))


@pytest.mark.usefixtures("_disk_of_10_gb_free")
@pytest.mark.parametrize(
    ("gigabytes", "limit", "warning"),
    [
        (4, None, ""),
        (4, 8.0, ""),
        (4, 7.0, "max_total_size_gb 7 will not be kept"),
        (6, None, "has 10 GB free, which is not enough for two"),
    ],
)
def test_room_is_compared_with_the_forecast(
    tmp_path: Path, gigabytes: int, limit: float | None, warning: str
) -> None:
    forecast = SizeForecast(weights=gigabytes * 10**9, optimizers=0, callbacks=0)
    said = check_room(tmp_path / "not" / "there", forecast, limit_gb=limit)
    assert said.endswith(warning)
    assert bool(said) == bool(warning)


@pytest.mark.usefixtures("_disk_of_10_gb_free")
def test_a_run_without_room_for_one_checkpoint_is_refused(tmp_path: Path) -> None:
    forecast = SizeForecast(weights=5 * 10**9, optimizers=10**10, callbacks=0)
    message = r"takes about 15 GB \(weights 5 GB, optimizers 10 GB\), and .* has 10 GB free"
    with pytest.raises(ValueError, match=message):
        check_room(tmp_path, forecast, limit_gb=None)


def test_a_full_disk_stops_a_run_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100, 97, 3))
    module = ToyPolicy()
    with pytest.raises(ValueError, match="make room"):
        fit(tmp_path, RLCheckpoint(tmp_path / "ck"), module, 2)
    assert module.weight == 0.0


def test_a_limit_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_total_size_gb is 0"):
        RLCheckpoint(max_total_size_gb=0.0)
