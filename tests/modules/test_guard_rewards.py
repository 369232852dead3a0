"""The guard of a reward model, and of what is shown images."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lrlhf.guard.dump import read_dump, read_state
from lrlhf.models import ScoreModel
from lrlhf.modules import Guard, OptimizerConfig, RewardModel, replay_dump
from lrlhf.types import Experience, PreferenceBatch, SequenceBatch
from tests.modules.policy_runs import fit
from tests.modules.test_vision_training import policy, questions  # noqa: F401  a fixture
from tests.vlms import build_vlm

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def pairs(tokenizer: Any, texts: list[tuple[str, str]], margin: list[float]) -> PreferenceBatch:
    def sequences(side: int) -> SequenceBatch:
        encoded = tokenizer([pair[side] for pair in texts], padding=True, return_tensors="pt")
        mask = encoded["attention_mask"].bool()
        return SequenceBatch(
            input_ids=encoded["input_ids"], attention_mask=mask, response_mask=mask
        )

    return PreferenceBatch(
        candidate0=sequences(0),
        candidate1=sequences(1),
        labels=torch.ones(len(texts), 1),
        margin=torch.tensor(margin),
        info=tuple({"pair": index} for index in range(len(texts))),
    )


def train(module: RewardModel, batches: list[PreferenceBatch], folder: Path) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=2,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None, collate_fn=lambda batch: batch))  # type: ignore[arg-type]
    return trainer


def test_a_reward_model_repeats_all_micro_batches_of_a_step(
    model_folder, tokenizer, tmp_path
) -> None:
    def fresh(**guard: Any) -> RewardModel:
        source = ScoreModel(source=model_folder)
        return RewardModel(source, optimizer=OptimizerConfig(lr=0.01), guard=Guard(**guard))

    good = pairs(tokenizer, [("abc", "de"), ("f", "gh")], [0.0, 0.0])
    bad = pairs(tokenizer, [("ij", "klm"), ("no", "p")], [0.0, float("inf")])
    module = fresh()
    train(module, [good, good, good, bad], tmp_path)
    (dump,) = (tmp_path / "dumps").iterdir()
    assert dump.name == "step_000001"  # the first step, of good pairs, was taken
    state = read_state(dump)
    for name, value in module.state_dict().items():
        assert torch.equal(value, state["state_dict"][name]) or name == "tie_thresholds"
    (anomaly,) = read_dump(dump).anomalies
    assert anomaly.kind == "loss"
    assert "the margin of pair 3 is inf, which begins 'no'" in anomaly.text
    again = replay_dump(fresh(), dump)
    assert again.reproduced
    assert [row["candidate0"] for row in again.ranks[0].rows] == ["abc", "f", "ij", "no"]
    assert [row["info"]["pair"] for row in again.ranks[0].rows] == [0, 1, 0, 1]
    assert module.step_guard.kinds == {"loss": 1}


def test_a_reward_model_refuses_limits_of_policies(model_folder) -> None:
    with pytest.raises(ValueError, match=r"guard.max_kl is about a policy's responses"):
        RewardModel(ScoreModel(source=model_folder), guard=Guard(max_kl=1.0))


def test_images_are_in_the_dump(questions: Path, tmp_path: Path) -> None:  # noqa: F811
    vlm = build_vlm("qwen2_vl")
    module = policy(vlm)
    weight = next(p for name, p in vlm.model.named_parameters() if "visual" in name)
    weight.register_hook(lambda gradient: gradient * float("nan"))
    fit(module, questions, tmp_path, steps=1)
    (dump,) = (tmp_path / "dumps").iterdir()
    part = read_dump(dump).ranks[0].batches["part"]
    assert isinstance(part, Experience)
    assert part.media is not None
    shown = [entry for entry in part.media if entry is not None]
    assert shown
    assert all(entry.tensors["pixel_values"].numel() > 0 for entry in shown)
    assert shown[0] is shown[1]  # responses to one prompt share what they saw
    again = replay_dump(module, dump)
    assert again.reproduced
    assert len(again.ranks[0].gradients) == 1
