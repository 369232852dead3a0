"""Two processes leave out the same steps, whichever of them found the reason."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy

from lrlhf.datamodules import PromptDataModule
from lrlhf.guard.dump import read_dump
from lrlhf.models.sharding import state_of
from lrlhf.modules import Guard, Update, replay_dump
from lrlhf.strategies import FSDP2, DeepSpeed
from tests.distributed.strategy_runs import _whole
from tests.modules.reward_runs import trainer
from tests.modules.test_guard import Meddler

pytestmark = [
    pytest.mark.slow,
    # of DeepSpeed's own code
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def spoil(module: L.LightningModule, experience: Any) -> None:
    """Have one response of the second process look far less likely when it was drawn."""
    if module.global_rank == 1:
        experience.old_logprobs[0][experience.response_mask[0]] -= 12.0


class KeepWeights(L.Callback):
    """Writes what each process has after every step; the second one is spoilt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        kept = _whole(state_of(module.policy)), dict(module.step_guard.kinds)
        torch.save(kept, self.folder / f"{trainer.global_step}.rank{trainer.global_rank}.pt")


STRATEGIES: dict[str, Any] = {
    "ddp": lambda: DDPStrategy(find_unused_parameters=True, start_method="fork"),
    "fsdp2": lambda: FSDP2(start_method="fork"),
    "deepspeed_zero2": lambda: DeepSpeed(stage=2, start_method="fork"),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_one_process_finds_both_leave_out(build, name: str, tmp_path: Path) -> None:
    def fresh() -> Any:
        update = Update(loss="token_clip", num_iterations=2)
        return build(num_generations=2, update=update, guard=Guard(max_ratio=1e3), seed=3)

    rows = [{"prompt": f"say {word}"} for word in "abcdefgh"]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = trainer(
        tmp_path,
        devices=2,
        strategy=STRATEGIES[name](),
        max_steps=2,
        max_epochs=-1,
        use_distributed_sampler=False,
        callbacks=[Meddler(spoil, step=1), KeepWeights(tmp_path)],
    )
    start = fresh().policy.state_dict()
    run.fit(fresh(), datamodule=PromptDataModule(train=f"{tmp_path}/rows.jsonl", batch_size=4))
    for rank in (0, 1):
        before, nothing = torch.load(tmp_path / f"1.rank{rank}.pt")
        after, counts = torch.load(tmp_path / f"2.rank{rank}.pt")
        assert (nothing, counts) == ({}, {"ratio": 2})  # both passes over the iteration
        assert all(torch.equal(after[key], value) for key, value in before.items())
        assert any(not torch.equal(start[key], value) for key, value in before.items())
    (dump,) = (tmp_path / "dumps").iterdir()
    assert dump.name == "step_000002"
    (anomaly,) = read_dump(dump).anomalies
    assert (anomaly.kind, anomaly.rank) == ("ratio", 1)
    again = replay_dump(fresh(), dump)
    assert again.reproduced
    assert {one.rank for one in again.anomalies} == {1}
    assert again.anomalies[0].value == pytest.approx(anomaly.value, rel=1e-4)
