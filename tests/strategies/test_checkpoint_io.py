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
from lrlhf.datamodules import PreferenceDataModule, PromptDataModule
from lrlhf.models import ScoreModel
from lrlhf.modules import PPO, Advantage, Critic, OptimizerConfig, Reference, RewardModel, Update
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling
from lrlhf.run import AtomicCheckpointIO, use_atomic_checkpoints
from lrlhf.run.checkpoints.checkpoint_reader import is_folder_checkpoint
from lrlhf.run.checkpoints.checksums import NotACheckpointError
from lrlhf.run.checkpoints.sharded_checkpoint import convert_checkpoint
from tests.conftest import build_language_model, build_tokenizer
from tests.modules.policy_runs import letters


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


def test_a_file_takes_the_place_of_a_folder(tmp_path: Path) -> None:
    io = AtomicCheckpointIO()
    io.save_checkpoint({"state_dict": {}, "n": 1}, tmp_path / "a.ckpt")
    convert_checkpoint(tmp_path / "a.ckpt", tmp_path / "last.ckpt", "sharded")
    io.save_checkpoint({"state_dict": {}, "n": 2}, tmp_path / "last.ckpt")
    assert io.load_checkpoint(tmp_path / "last.ckpt")["n"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "last.ckpt"]


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


def ppo(_: str) -> PPO:
    tokenizer = build_tokenizer()
    return PPO(
        build_language_model(tokenizer),
        Rewards([letters]),
        tokenizer=tokenizer,
        num_generations=2,
        sampling=Sampling(max_new_tokens=4),
        advantage=Advantage(estimator="gae", scale_rewards="mean_std"),
        reference=Reference(kl_coef=0.05, sync_every=2),
        update=Update(loss="token_clip", aggregate="token_mean"),
        optimizer=OptimizerConfig(lr=5e-3),
        critic=Critic(optimizer=OptimizerConfig(lr=2e-2)),
    )


def reward(folder: str) -> RewardModel:
    L.seed_everything(3, verbose=False)
    return RewardModel(ScoreModel(source=folder), optimizer=OptimizerConfig(lr=5e-3))


def train(
    build: Any, source: str, folder: Path, *, steps: int = 4, ckpt_path: Path | None = None
) -> dict[str, Any]:
    """Train for some steps, with a checkpoint of each; returns all that was trained."""
    folder.mkdir(exist_ok=True)
    module = build(source)
    rows: list[dict[str, str]]
    if isinstance(module, RewardModel):
        rows = [{"prompt": "say", "chosen": word * 2, "rejected": word} for word in "abcdefgh"]
        data: Any = PreferenceDataModule
    else:
        rows = [{"prompt": f"say {word}"} for word in "abcdefgh"]
        data = PromptDataModule
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
    trainer.fit(
        module,
        datamodule=data(train=str(folder / "rows.jsonl"), batch_size=2),
        ckpt_path=ckpt_path,
    )
    return {**module.state_dict(), **{f"ema.{name}": v for name, v in ema.shadows.items()}}


@pytest.mark.parametrize("build", [reward, pytest.param(ppo, marks=pytest.mark.exhaustive)])
def test_a_run_goes_on_from_a_folder_to_the_same_bits(
    build: Any, model_folder: str, tmp_path: Path
) -> None:
    straight = train(build, model_folder, tmp_path / "straight")
    (saved,) = (tmp_path / "straight" / "checkpoints").glob("step=000002*.ckpt")
    assert saved.is_file()
    convert_checkpoint(saved, tmp_path / "split.ckpt", "sharded")
    assert is_folder_checkpoint(tmp_path / "split.ckpt")
    resumed = train(build, model_folder, tmp_path / "again", ckpt_path=tmp_path / "split.ckpt")
    assert resumed.keys() == straight.keys()
    for name, value in straight.items():
        torch.testing.assert_close(resumed[name], value, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.slow
def test_a_run_that_goes_on_from_a_folder_called_last_saves_over_it(
    model_folder: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train(reward, model_folder, run, steps=2)
    last = run / "checkpoints" / "last.ckpt"
    last.resolve().rename(tmp_path / "file.ckpt")
    last.unlink()
    convert_checkpoint(tmp_path / "file.ckpt", last, "sharded")
    train(reward, model_folder, run, steps=3, ckpt_path=last)
    assert torch.load(last, weights_only=True)["global_step"] == 3
