"""A module's model as a folder, without a trainer; and what a module says of itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lrlhf.callbacks import EMA, HFExport, KLControl, RLCheckpoint
from lrlhf.loggers import ResumingCSVLogger
from lrlhf.models import CausalLM, LoRA, RewardNetwork, ValueModel
from lrlhf.modules import PPO, RLOO, RewardModel, TrainingModule
from lrlhf.rewards import NumericAnswer, RegexFormat, Rewards
from lrlhf.rollout import Sampling, TransformersEngine
from lrlhf.run.supervision.signals import ReusableTrainer
from tests.modules.policy_runs import assert_same, weights

IDS = torch.tensor([[5, 9, 17, 40, 3]])


def test_a_policy_with_adapters_is_loaded_with_equal_logits(
    build: Callable[..., RLOO], model_folder: str, tmp_path: Path
) -> None:
    module = build(CausalLM(source=model_folder, lora=LoRA(r=2)))
    with torch.no_grad():
        for name, weight in module.policy.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
        expected = module.policy(IDS).logits
    module.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(loaded(IDS).logits, expected)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").eos_token == module.tokenizer.eos_token


def test_a_critic_lies_inside(
    build: Callable[..., PPO],
    critic_of: Callable[..., Any],
    tmp_path: Path,
) -> None:
    module = build(kind=PPO, critic=critic_of("own"))
    module.save_pretrained(tmp_path / "saved")
    critic = ValueModel(source=str(tmp_path / "saved" / "critic")).load()
    assert_same(weights(module.critic), weights(critic))


def test_a_reward_model_is_loaded_again(
    reward_model: Callable[..., RewardModel], tmp_path: Path
) -> None:
    module = reward_model(("a", "b"))
    module.save_pretrained(str(tmp_path / "saved"))
    assert RewardNetwork.from_pretrained(tmp_path / "saved").head_names == ("a", "b")


def test_nothing_is_replaced_unasked(build: Callable[..., RLOO], tmp_path: Path) -> None:
    module, folder = build(), tmp_path / "saved"
    folder.mkdir()
    module.save_pretrained(folder)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        module.save_pretrained(folder)
    (folder / "old").touch()
    module.save_pretrained(folder, overwrite=True)
    assert not (folder / "old").exists()
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="is no saved model"):
        module.save_pretrained(tmp_path, overwrite=True)
    assert (tmp_path / "thesis.tex").exists()
    for name in ("thesis", "settings"):
        other = tmp_path / name
        other.mkdir()
        (other / "config.json").touch()
        if name == "thesis":
            (other / "model.safetensors").touch()
            (other / "chapters").mkdir()
        before = sorted(other.iterdir())
        with pytest.raises(FileExistsError, match="is no saved model"):
            module.save_pretrained(other, overwrite=True)
        assert sorted(other.iterdir()) == before


def test_a_failure_leaves_the_old_folder(
    build: Callable[..., RLOO], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, folder = build(), tmp_path / "saved"
    module.save_pretrained(folder)
    before = sorted(path.name for path in folder.iterdir())

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(module.tokenizer, "save_pretrained", fails)
    with pytest.raises(OSError, match="disk is full"):
        module.save_pretrained(folder, overwrite=True)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert [path.name for path in tmp_path.iterdir() if "saved" in path.name] == ["saved"]


def test_a_module_without_an_export_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="TrainingModule has no export_pretrained"):
        TrainingModule().save_pretrained(tmp_path / "x")


# ---- what they say of themselves


def test_a_policy_module_says_what_matters_in_a_few_lines(
    build: Callable[..., RLOO], model_folder: str
) -> None:
    rewards = Rewards([NumericAnswer(), RegexFormat("a+")], weights=[1.0, 0.5])
    spec = CausalLM(source=model_folder, lora=LoRA(r=2))
    module = build(spec, rewards=rewards, algorithm="grpo", sampling=Sampling(max_new_tokens=9))
    said = repr(module)
    # two layers; attention 32x32, 32x16 twice, 32x32; three 32x64: r x (in + out) each
    per_layer = 2 * (64 + 48 + 48 + 64 + 3 * 96)
    assert f"{2 * per_layer:,} of them trained" in said
    assert said.startswith("RLOO\n")
    for part in ("grpo", "Sampling(max_new_tokens=9)", "NumericAnswer()", "weights=[1.0, 0.5]"):
        assert part in said
    assert "RegexFormat(pattern='a+')" in said
    assert len(said.splitlines()) <= 5


def test_reprs_are_calls_with_what_was_given() -> None:
    assert repr(TransformersEngine(3)) == "TransformersEngine(max_batch_size=3)"
    assert repr(EMA(decay=0.5)) == "EMA(decay=0.5)"
    assert repr(HFExport("x", keep=2)) == "HFExport(dirpath='x', keep=2)"
    assert repr(KLControl()) == "KLControl()"
    assert repr(RLCheckpoint(monitor="a")) == "RLCheckpoint(monitor='a')"
    assert repr(ResumingCSVLogger("runs/a")) == "ResumingCSVLogger(save_dir='runs/a')"
    assert repr(CausalLM(source="x", lora=LoRA(r=4))) == "CausalLM(source='x', lora=LoRA(r=4))"

    class Asks(TransformersEngine):
        def __init__(self, url: str, api_key: str = "", options: Any = None) -> None:
            super().__init__()

    said = repr(Asks("http://me:pass-word@host/" + "x" * 90, "key", {"token": "hf_9", "n": 1}))
    assert said.startswith(
        "test_reprs_are_calls_with_what_was_given.<locals>.Asks(url='http://***@"
    )
    assert said.endswith("api_key='***', options={'token': '***', 'n': 1})")
    assert len(repr(Rewards([lambda completions, n=n: [0.0] for n in range(1)]))) < 120


def test_a_trainer_says_how_far_it_is(tmp_path: Path) -> None:
    trainer = ReusableTrainer(
        accelerator="cpu", max_steps=7, default_root_dir=tmp_path, logger=False
    )
    said = repr(trainer)
    assert "0 of 7 steps done" in said
    assert str(tmp_path) in said
    assert len(said.splitlines()) == 3
