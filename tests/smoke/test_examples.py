"""The module of one's own, ``examples/dpo.py``: its loss by hand, in training, from both sides."""

import json
import math
from pathlib import Path

import lightning as L
import pytest
import torch
from dpo import DPO, dpo_loss

from lrlhf.cli import run
from lrlhf.datamodules import PreferenceDataModule
from lrlhf.modules import Guard, OptimizerConfig, TrainingDivergedError

ROW = {"prompt": "say ", "chosen": "yes", "rejected": "no way"}


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text(f"{json.dumps(ROW)}\n" * 2)
    return "pairs.jsonl"


def fit(model: DPO, pairs: str, steps: int) -> L.Trainer:
    trainer = L.Trainer(
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        use_distributed_sampler=False,
    )
    trainer.fit(model, PreferenceDataModule(pairs, batch_size=2))
    return trainer


def test_the_loss_of_a_pair_by_hand() -> None:
    # log-ratios 1 and -2, beta 0.5: -log σ(±0.5 · 3) = log(1 + e^∓1.5)
    gap = torch.tensor([3.0, 3.0, 3.0, 3.0])
    labels = torch.tensor([1.0, -1.0, 0.0, math.nan])

    expected = torch.tensor([0.201413, 1.701413, 0.0, 0.0])
    torch.testing.assert_close(dpo_loss(gap, labels, beta=0.5), expected)


def test_it_starts_at_the_reference_and_learns_the_preference(
    model_folder: str, pairs: str
) -> None:
    model = DPO(model_folder, optimizer=OptimizerConfig(lr=1e-2))

    # policy = reference: -log σ(0) = log 2
    first = fit(model, pairs, 1).callback_metrics
    assert float(first["train/loss"]) == pytest.approx(math.log(2))
    last = fit(model, pairs, 5).callback_metrics
    assert float(last["train/loss"]) < math.log(2)
    assert float(last["train/accuracy"]) == 1.0
    assert float(last["train/skipped_steps"]) == 0


def test_a_gradient_that_is_not_finite_moves_nothing_and_counts(
    model_folder: str, pairs: str
) -> None:
    model = DPO(model_folder, beta=math.nan, guard=Guard(max_skipped=1))
    before = [weight.clone() for weight in model.policy.parameters()]

    with pytest.raises(TrainingDivergedError, match="gradient 2"):
        fit(model, pairs, 3)

    assert model.skipped_steps == 2
    for weight, was in zip(model.policy.parameters(), before, strict=True):
        torch.testing.assert_close(weight, was, rtol=0, atol=0)


@pytest.mark.usefixtures("_own_log")
def test_the_command_line_trains_it_and_resumes(
    model_folder: str, pairs: str, caplog: pytest.LogCaptureFixture
) -> None:
    command = ["fit", "--model=dpo.DPO", f"--model.policy={model_folder}"]
    command += ["--data=PreferenceDataModule", f"--data.train={pairs}", "--data.batch_size=2"]
    command += ["--trainer.accelerator=cpu", "--trainer.logger=false"]

    assert run([*command, "--trainer.max_steps=1"]) == 0
    (saved,) = Path().glob("checkpoints/*.ckpt")
    assert run([*command, "--trainer.max_steps=2", f"--ckpt_path={saved}"]) == 0
    assert "`max_steps=2` reached" in caplog.text
