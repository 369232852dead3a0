"""One process writes files and reads any checkpoint; a run goes on from a folder as from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from lrlhf.callbacks import EMA, RLCheckpoint
from lrlhf.datamodules import PreferenceDataModule
from lrlhf.models import ScoreModel
from lrlhf.modules import OptimizerConfig, RewardModel
from lrlhf.run import AtomicCheckpointIO, use_atomic_checkpoints
from lrlhf.run.checkpoints.checkpoint_reader import NotACheckpointError
from lrlhf.run.checkpoints.sharded_checkpoint import convert_checkpoint


def test_it_reads_folders_as_it_reads_files(tmp_path: Path) -> None:
    io = AtomicCheckpointIO()
    content = {"state_dict": {"w": torch.randn(3)}, "epoch": 2, "loops": {"a": (1, [2])}}
    io.save_checkpoint(content, tmp_path / "a.ckpt")
    convert_checkpoint(tmp_path / "a.ckpt", tmp_path / "b.ckpt", "sharded")
    for name in ("a.ckpt", "b.ckpt"):
        found = io.load_checkpoint(tmp_path / name)
        assert torch.equal(found["state_dict"].pop("w"), content["state_dict"]["w"])
        assert found == {"state_dict": {}, "epoch": 2, "loops": {"a": (1, [2])}}
    # whole, not to be read later: the folder may go
    found = io.load_checkpoint(tmp_path / "b.ckpt")
    io.remove_checkpoint(tmp_path / "b.ckpt")
    assert not (tmp_path / "b.ckpt").exists()
    assert found["state_dict"]["w"].shape == (3,)


def test_it_refuses_other_folders_by_name(tmp_path: Path) -> None:
    (tmp_path / "c.ckpt").mkdir()
    with pytest.raises(NotACheckpointError, match=r"c\.ckpt is no checkpoint"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "c.ckpt")
    with pytest.raises(FileNotFoundError, match=r"d\.ckpt"):
        AtomicCheckpointIO().load_checkpoint(tmp_path / "d.ckpt")


class UsersOwn(TorchCheckpointIO):
    """What somebody passed as a plugin."""


@pytest.mark.parametrize("plugin", [None, UsersOwn(), AtomicCheckpointIO()])
def test_a_way_that_was_chosen_is_left_alone(plugin: TorchCheckpointIO | None) -> None:
    trainer = L.Trainer(
        accelerator="cpu", devices=1, logger=False, plugins=[plugin] if plugin else []
    )
    use_atomic_checkpoints(trainer)
    if plugin is None:
        assert type(trainer.strategy.checkpoint_io) is AtomicCheckpointIO
    else:
        assert trainer.strategy.checkpoint_io is plugin


def train(
    source: str, folder: Path, *, steps: int = 4, ckpt_path: Path | None = None
) -> dict[str, Any]:
    """Train for some steps, with a checkpoint of each; returns all that was trained."""
    folder.mkdir(exist_ok=True)
    L.seed_everything(3, verbose=False)
    module = RewardModel(ScoreModel(source=source), optimizer=OptimizerConfig(lr=5e-3))
    rows = [{"prompt": "say", "chosen": word * 2, "rejected": word} for word in "abcdefgh"]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    ema = EMA(decay=0.5)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[
            ema,
            RLCheckpoint(folder / "checkpoints", every_n_train_steps=1, save_top_k=-1),
        ],
    )
    data = PreferenceDataModule(train=str(folder / "rows.jsonl"), batch_size=2)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return {**module.state_dict(), **{f"ema.{name}": v for name, v in ema.shadows.items()}}


def test_a_run_goes_on_from_a_folder_called_last_to_the_same_bits(
    model_folder: str, tmp_path: Path
) -> None:
    straight = train(model_folder, tmp_path / "straight")
    run = tmp_path / "run"
    train(model_folder, run, steps=2)
    last = run / "checkpoints" / "last.ckpt"
    last.resolve().rename(tmp_path / "file.ckpt")
    last.unlink()
    convert_checkpoint(tmp_path / "file.ckpt", last, "sharded")
    resumed = train(model_folder, run, ckpt_path=last)
    assert resumed.keys() == straight.keys()
    for name, value in straight.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=0, equal_nan=True, msg=name)
    # and saves over it
    assert torch.load(last, weights_only=True)["global_step"] == 4
