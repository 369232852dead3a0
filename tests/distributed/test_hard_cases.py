"""One rank that fails does not leave the other waiting; 16 bits lose nothing that counts."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.multiprocessing.spawn import ProcessRaisedException

from lrlhf.callbacks import EMA, VLLMWeightSync
from lrlhf.modules import RLOO, OptimizerConfig, RewardModel
from lrlhf.rollout import RolloutListener
from lrlhf.run.checkpoints.checkpoint_reader import read_checkpoint
from lrlhf.strategies import FSDP2, DeepSpeed
from tests.distributed.strategy_runs import MODULES, SaveAtEnd, data_of, through_an_engine
from tests.rollout.copy_engine import CopyEngine
from tests.rollout.flight_engine import FlightEngine

pytestmark = [
    pytest.mark.slow,
    # of DeepSpeed's own code
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


class FailsOnRankOne(CopyEngine):
    def _count(self, call: str) -> None:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 0:
            self.fail = {}
        super()._count(call)


def trained(module: L.LightningModule, folder: Path, strategy: Any, **options: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    callbacks = options.pop("callbacks", [])
    if options.pop("averaged", True):
        callbacks = [EMA(), SaveAtEnd(folder), *callbacks]
    L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=options.pop("steps", 2),
        max_epochs=-1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=callbacks,
        **options,
    ).fit(module, datamodule=data_of(module, folder, 2))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    ranks = [torch.load(path)["weights"] for path in sorted(folder.glob("rank*.pt"))]
    return {name: value for rank in ranks for name, value in rank.items()}


def test_an_engine_that_fails_on_one_rank_is_started_again_on_all(tmp_path: Path) -> None:
    for name, fail in (("sound", {}), ("failing", {"send": [1]})):
        trained(
            through_an_engine(tmp_path, FailsOnRankOne(fail=fail)),
            tmp_path / name,
            FSDP2(start_method="fork", timeout=120.0),
            callbacks=[VLLMWeightSync(probe_every=1)],
        )
    sound, failing = weights(tmp_path / "sound"), weights(tmp_path / "failing")
    assert sound.keys() == failing.keys()
    for key, value in sound.items():
        assert torch.equal(failing[key], value), key


class FlightOfRanks(FailsOnRankOne, FlightEngine):
    pass


class KeepsVersions(RolloutListener, L.Callback):
    """Writes the versions of the tokens that each rank has trained on, and a checkpoint's queue."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.versions = folder, []

    def on_rollout(self, trainer: L.Trainer, module: Any, experience: Any, records: Any) -> None:
        tokens = experience.token_versions[experience.response_mask]
        self.versions.append(sorted(set(tokens.tolist())))

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        kept = {"versions": self.versions, "queue": module.sampler.state_dict()["queue"]}
        torch.save(kept, self.folder / f"versions{trainer.global_rank}.pt")


@pytest.mark.parametrize("fail", [{}, {"respond": [4]}])
def test_no_rank_trains_on_older_tokens_than_allowed(tmp_path: Path, fail: Any) -> None:
    steps, staleness = 5, 2
    engine = FlightOfRanks(patience=2.0, fail=fail)
    trained(
        through_an_engine(tmp_path, engine, max_staleness=staleness),
        tmp_path,
        FSDP2(start_method="fork", timeout=120.0),
        steps=steps,
        callbacks=[VLLMWeightSync(probe_every=2), KeepsVersions(tmp_path)],
    )
    mixed = False
    for rank in range(2):
        kept = torch.load(tmp_path / f"versions{rank}.pt")
        assert len(kept["versions"]) == steps
        for step, versions in enumerate(kept["versions"]):
            assert max(0, step - staleness) <= versions[0] <= versions[-1] <= step
            mixed = mixed or len(versions) > 1
        # rank 0 would write the responses of its own prompts only
        assert kept["queue"] is None
    assert mixed


class LosesItsPart(FSDP2):
    """Rank 1 writes to a disk that rank 0 does not see."""

    def _place(self, fresh: Path, path: Path) -> None:
        # rank 0 looks, once all have written
        (fresh / "__1_0.distcp").unlink()
        super()._place(fresh, path)


def test_a_checkpoint_whose_parts_are_elsewhere_does_not_replace_a_whole_one(
    model_folder: str, tmp_path: Path
) -> None:
    module = MODULES["reward"](Path(model_folder))
    saver = SavesAtOnce(tmp_path / "last.ckpt")
    with pytest.raises(ProcessRaisedException, match="all processes must see the same folder"):
        trained(module, tmp_path, LosesItsPart(start_method="fork"), callbacks=[saver])
    assert not list(tmp_path.glob("*.ckpt"))
    assert not list(tmp_path.glob(".*.parts"))


class SavesAtOnce(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


def test_a_16_bit_run_starts_from_the_weights_as_they_were_loaded(
    model_folder: str, tmp_path: Path
) -> None:
    module = MODULES["rloo"](Path(model_folder))
    assert isinstance(module, RLOO)
    module.optimizer_config = OptimizerConfig(lr=1e-30)
    loaded = {name: value.clone() for name, value in module.state_dict().items()}
    strategy = DeepSpeed(stage=2, start_method="fork")
    saver = SavesAtOnce(tmp_path / "last.ckpt")
    trained(module, tmp_path, strategy, precision="bf16-mixed", callbacks=[saver], averaged=False)
    saved = read_checkpoint(tmp_path / "last.ckpt")["state_dict"]
    for name, value in loaded.items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-20, msg=name)


def test_averages_of_rounded_weights_are_refused(model_folder: str, tmp_path: Path) -> None:
    module = MODULES["reward"](Path(model_folder))
    assert isinstance(module, RewardModel)
    strategy = DeepSpeed(stage=2, start_method="fork")
    with pytest.raises(ProcessRaisedException, match="EMA would average reward"):
        trained(module, tmp_path, strategy, precision="bf16-mixed")
