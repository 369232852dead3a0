"""FSDP2 writes checkpoints while the run goes on: the same ones, and none that is not whole."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lrlhf.callbacks import EMA, RLCheckpoint
from lrlhf.run.checkpoints import sharded_checkpoint
from lrlhf.run.checkpoints.checkpoint_search import newest_intact
from lrlhf.strategies import FSDP2
from tests.distributed.strategy_runs import data_of
from tests.strategies.test_fsdp import assert_close, at_a_constant_rate, fit, forked

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]


class Held(L.Callback):
    """Has every write wait for the step after, and notes in which thread each was made."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, failure: Any = None) -> None:
        self.folder, self.failure = folder, failure
        self.go_on = threading.Event()
        self.write = sharded_checkpoint._write_snapshot
        patch.setattr(sharded_checkpoint, "_write_snapshot", self.write_later)

    def write_later(self, snapshot: Any, folder: Path, ranks: Any) -> None:
        main = threading.current_thread() is threading.main_thread()
        self.note("now" if main else "later")
        if not main:
            assert self.go_on.wait(20)
        if self.failure is not None:
            self.failure(ranks)
        self.write(snapshot, folder, ranks)

    def note(self, what: str) -> None:
        with (self.folder / f"notes{os.environ.get('LOCAL_RANK', 0)}").open("a") as file:
            file.write(what + "\n")

    def on_train_batch_start(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step == 1:
            # the first one, of step 1, is held until this step has moved the weights
            self.note(f"{(self.folder / 'ck' / 'last.ckpt').exists()}")

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step == 2:
            self.go_on.set()


def saving(folder: Path, *others: L.Callback) -> list[L.Callback]:
    kept = RLCheckpoint(folder / "ck", every_n_train_steps=1, save_top_k=-1)
    return [*others, EMA(decay=0.5), kept]


def notes(folder: Path) -> list[str]:
    return (folder / "notes0").read_text().split()


def test_a_checkpoint_holds_the_step_that_it_names_and_is_resumed_from_to_the_bit(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build: Callable[[], L.LightningModule] = lambda: at_a_constant_rate(model_folder)  # noqa: E731
    plain, later = tmp_path / "plain", tmp_path / "later"
    straight = fit(build(), plain, strategy=forked(), callbacks=saving(plain))
    later.mkdir()
    with monkeypatch.context() as patch:
        callbacks = saving(later, Held(later, patch))
        ends = fit(build(), later, strategy=forked(async_save=True), callbacks=callbacks)
    assert_close(straight[0]["weights"], ends[0]["weights"], rtol=0, atol=0)
    # not there in the step after, and all three in another thread
    assert sorted(notes(later)) == ["False", "later", "later", "later"]
    names = ["step=000001.ckpt", "step=000002.ckpt", "step=000003.ckpt"]
    assert sorted(path.name for path in (later / "ck").glob("*.ckpt")) == ["last.ckpt", *names]
    assert (later / "ck" / "last.ckpt").resolve().name == names[-1]
    for name in names:
        one, other = (
            sharded_checkpoint.read_folder(folder / "ck" / name, lazy=False)
            for folder in (plain, later)
        )
        assert_close(one["state_dict"], other["state_dict"], rtol=0, atol=0)
        for value, same in zip(one["optimizer_states"], other["optimizer_states"], strict=True):
            for weight, moments in value["state"].items():
                assert_close(moments, same["state"][weight], rtol=0, atol=0)
    again = tmp_path / "again"
    resumed = fit(
        build(),
        again,
        strategy=forked(),
        ckpt_path=later / "ck" / names[0],
        callbacks=saving(again),
    )
    assert_close(straight[0]["weights"], resumed[0]["weights"], rtol=0, atol=0)


def test_what_fails_in_the_background_ends_the_run_on_every_rank(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(ranks: Any) -> None:
        if ranks.rank == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

    failing = Held(tmp_path, monkeypatch, lambda ranks: ranks.all(lambda: full(ranks)))
    with pytest.raises(Exception, match="No space left on device: 'somewhere'"):
        fit(
            at_a_constant_rate(model_folder),
            tmp_path,
            strategy=forked(async_save=True),
            callbacks=saving(tmp_path, failing),
        )
    assert list((tmp_path / "ck").glob("*.ckpt")) == []


def test_a_kill_while_one_is_written_leaves_the_one_before(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(_: Any) -> None:
        if (tmp_path / "ck" / "step=000001.ckpt").exists():
            os._exit(9)

    with pytest.raises(Exception, match="exit code 9"):
        fit(
            at_a_constant_rate(model_folder),
            tmp_path,
            strategy=forked(async_save=True),
            callbacks=saving(tmp_path, Held(tmp_path, monkeypatch, die)),
        )
    found = newest_intact(tmp_path / "ck", "last")
    assert found.path is not None
    assert found.path.resolve().name == "step=000001.ckpt"
    assert found.passed == {}
    assert torch.load(found.path / "meta.pt", weights_only=True)["global_step"] == 1


def test_a_trainer_that_fits_twice_saves_both_times(model_folder: str, tmp_path: Path) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=FSDP2(async_save=True),
        max_steps=1,
        max_epochs=-1,
        default_root_dir=tmp_path,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=saving(tmp_path),
    )
    module = at_a_constant_rate(model_folder)
    data = data_of(module, tmp_path, 1)
    trainer.fit(module, datamodule=data)
    trainer.fit_loop.epoch_loop.max_steps = 2
    trainer.fit(module, datamodule=data)
    saved = sorted(path.name for path in (tmp_path / "ck").glob("step=*"))
    assert saved == ["step=000001.ckpt", "step=000002.ckpt"]
