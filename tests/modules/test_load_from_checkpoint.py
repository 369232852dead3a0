"""A checkpoint builds its module again, as far as it can be known from plain values."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules import PromptDataModule
from lrlhf.functional import ALGORITHMS
from lrlhf.loggers import ResumingCSVLogger
from lrlhf.models import CausalLM, LoRA
from lrlhf.modules import PPO, RLOO, OptimizerConfig, RewardModel, TrainingModule, Update
from lrlhf.modules.hyperparameters import as_hyperparameters, build_again
from lrlhf.rewards import LearnedReward, RegexFormat, RewardFunction, Rewards
from lrlhf.rollout import Sampling, TransformersEngine
from lrlhf.run.checkpoints.sharded_checkpoint import convert_checkpoint
from tests.conftest import build_language_model
from tests.modules.policy_runs import assert_same, fit, letters, weights


def a_lambda_like(completions: Sequence[str]) -> list[float]:
    return letters(completions)


@pytest.fixture
def policy(model_folder: str) -> CausalLM:
    return CausalLM(source=model_folder, lora=LoRA(r=4))


def saved(module: Any, prompts: Path, folder: Path) -> Path:
    fit(module, prompts, folder, steps=1, limit_val_batches=0).save_checkpoint(folder / "a.ckpt")
    return folder / "a.ckpt"


def test_a_policy_comes_back_with_its_settings_and_weights(
    policy: CausalLM, prompts: Path, tmp_path: Path
) -> None:
    rewards = Rewards(
        {"letters": letters, "form": RegexFormat("a", full_match=False)},
        weights={"letters": 1.0, "form": 0.5},
    )
    module = RLOO(
        policy,
        rewards,
        algorithm=ALGORITHMS["grpo"],
        num_generations=2,
        sampling=Sampling(max_new_tokens=3, stop=("x", "y")),
        engine=TransformersEngine(max_batch_size=3),
        optimizer=OptimizerConfig(lr=1e-2, betas=(0.8, 0.9)),
        update=Update(num_iterations=2),
        seed=7,
    )
    path = saved(module, prompts, tmp_path)
    again = RLOO.load_from_checkpoint(path)
    assert again.settings == module.settings
    assert again.optimizer_config == module.optimizer_config
    assert again.rewards.names == ("letters", "form")
    assert isinstance(again.engine, TransformersEngine)
    assert (again.engine.max_batch_size, again.seed) == (3, 7)
    assert again.policy.peft_config["default"].r == 4
    assert_same(weights(module), weights(again))
    # of a run whose models were split
    convert_checkpoint(path, tmp_path / "parts.ckpt", "sharded")
    assert_same(weights(module), weights(RLOO.load_from_checkpoint(tmp_path / "parts.ckpt")))
    # whatever is passed counts, and the class may be left open
    other = TrainingModule.load_from_checkpoint(path, num_generations=6, map_location="cpu")
    assert isinstance(other, RLOO)
    assert other.settings.num_generations == 6
    with pytest.raises(
        ValueError, match=r"is a checkpoint of lrlhf\.modules\.rloo\.RLOO, not of PPO"
    ):
        PPO.load_from_checkpoint(path)


def test_what_cannot_be_kept_is_asked_for_by_name(
    tokenizer: PreTrainedTokenizerBase, prompts: Path, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"tokenizer": tokenizer}
    module = RLOO(
        build_language_model(tokenizer),
        Rewards([lambda completions: letters(completions), letters]),
        num_generations=2,
        sampling=Sampling(max_new_tokens=3),
        **given,
    )
    path = saved(module, prompts, tmp_path)
    with pytest.raises(ValueError, match="does not hold all") as refused:
        RLOO.load_from_checkpoint(path)
    message = str(refused.value)
    assert "policy: a LlamaForCausalLM" in message
    assert "<lambda>" in message
    assert "load_from_checkpoint(path, policy=..., rewards=..., tokenizer=...)" in message
    given |= {"policy": build_language_model(tokenizer, seed=4), "rewards": Rewards([letters])}
    again = RLOO.load_from_checkpoint(path, **given)
    assert again.settings.sampling.max_new_tokens == 3
    assert_same(weights(module), weights(again))


class Asks(RewardFunction):
    """A service of the user's."""

    def __init__(self, api_key: str, address: str) -> None:
        self.api_key, self.address = api_key, address

    def __call__(self, *, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [0.0 for _ in completions]


def test_secrets_are_not_kept(policy: CausalLM, prompts: Path, tmp_path: Path) -> None:
    rewards = Rewards([Asks("a-key-of-a-service-9", "http://user:pass-word@localhost:1/score")])
    module = RLOO(policy, rewards, num_generations=2, sampling=Sampling(max_new_tokens=2))
    text = json.dumps(module.hparams)
    assert "a-key-of" not in text
    assert "pass-word" not in text
    path = saved(module, prompts, tmp_path)
    with pytest.raises(ValueError, match="rewards: it has a secret"):
        RLOO.load_from_checkpoint(path)


@pytest.mark.parametrize("where", ["policy", "reward"])
def test_no_code_of_a_model_runs_because_a_checkpoint_says_so(
    model_folder: str, prompts: Path, tmp_path: Path, where: str
) -> None:
    module = RLOO(CausalLM(source=model_folder), Rewards([letters]), num_generations=2)
    path = saved(module, prompts, tmp_path)
    checkpoint = torch.load(path)
    if where == "policy":
        checkpoint["hyper_parameters"]["policy"]["init_args"]["trust_remote_code"] = True
    else:
        learned = LearnedReward(model_folder, trust_remote_code=True)
        checkpoint["hyper_parameters"] |= RLOO(model_folder, Rewards([learned])).hparams
    torch.save(checkpoint, tmp_path / "b.ckpt")
    with pytest.raises(ValueError, match="would run Python code that comes with"):
        RLOO.load_from_checkpoint(tmp_path / "b.ckpt")


def test_a_checkpoint_is_read_without_running_code(
    policy: CausalLM, prompts: Path, tmp_path: Path
) -> None:
    path = saved(RLOO(policy, Rewards([letters]), num_generations=2), prompts, tmp_path)
    assert torch.load(path, weights_only=True)["hyper_parameters"]["num_generations"] == 2


def test_numbers_of_numpy_and_texts_of_other_classes_are_read_again(
    policy: CausalLM, prompts: Path, tmp_path: Path
) -> None:
    class Word(str):
        pass

    module = RLOO(
        policy,
        Rewards([letters], weights=[np.float64(0.5)]),
        num_generations=np.int64(2),  # type: ignore[arg-type]
        optimizer=OptimizerConfig(lr=np.float64(1e-4), weight_decay=np.float32(0.5)),  # type: ignore[arg-type]
        sampling=Sampling(max_new_tokens=2, stop=(Word("x"), np.str_("y"))),
    )
    again = RLOO.load_from_checkpoint(saved(module, prompts, tmp_path))
    assert (again.optimizer_config.lr, again.optimizer_config.weight_decay) == (1e-4, 0.5)
    assert again.settings.sampling.stop == ("x", "y")


class Bonus(RLOO):
    """Takes most of its options without naming them, and deletes one."""

    def __init__(
        self, policy: str | CausalLM, bonus: float = 0.5, note: str = "", **options: Any
    ) -> None:
        del note
        super().__init__(policy, **options)
        self.bonus = bonus


def test_a_module_that_passes_its_options_on_comes_back(
    policy: CausalLM, prompts: Path, tmp_path: Path
) -> None:
    module = Bonus(policy, 0.25, rewards=Rewards([letters]), num_generations=2, seed=5)
    path = saved(module, prompts, tmp_path)
    again = Bonus.load_from_checkpoint(path)
    assert (again.bonus, again.settings.num_generations, again.seed) == (0.25, 2, 5)
    assert again.rewards.names == ("letters",)
    other = Bonus.load_from_checkpoint(path, rewards=Rewards({"form": RegexFormat("a")}))
    assert other.rewards.names == ("form",)


@dataclass
class Scaled(RewardFunction):
    """A reward of the user's whose constructor is made for it."""

    factor: float = 1.0

    def __call__(self, *, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [self.factor for _ in completions]


class Free(Scaled):
    """One that takes any options."""

    def __init__(self, *words: str, **options: Any) -> None:
        super().__init__(factor=options["factor"])
        self.words = words


class Unknown(RewardFunction):
    def __call__(self, *, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        return [0.0 for _ in completions]


def _constructor(self: Any, size: int = 1) -> None:
    self.size = size


Unknown.__init__ = _constructor  # type: ignore[method-assign]


@pytest.mark.parametrize("reward", [Scaled(3.0), Free(factor=3.0)])
def test_a_reward_comes_back_with_what_it_was_given(policy: CausalLM, reward: Scaled) -> None:
    stored = as_hyperparameters(RLOO, {"rewards": Rewards([reward])})
    module = build_again(RLOO, stored, {"policy": policy}, where=Path("x"))
    scores = module.rewards.score(["p"], ["c"], [[1]], [{}]).scores
    assert scores.tolist() == [3.0]


@pytest.mark.parametrize("reward", [Free("a", factor=3.0), Free(factor=letters), Unknown()])
def test_a_reward_whose_arguments_are_not_all_known_is_asked_for(reward: RewardFunction) -> None:
    stored = as_hyperparameters(RLOO, {"rewards": Rewards([reward])})
    assert type(reward).__name__ in stored["_not_kept"]["rewards"]


class Own(TrainingModule):
    """A module of the user's, which has never heard of hyperparameters."""

    def __init__(self, size: int, *, rate: float = 0.1, note: Any = None) -> None:
        super().__init__(seed=3)
        self.layer, self.rate, self.note = torch.nn.Linear(size, 1), rate, note


def test_a_module_of_the_users_own_comes_back_too(tmp_path: Path) -> None:
    module = Own(3, rate=0.5)
    trainer = L.Trainer(accelerator="cpu", logger=False, barebones=False)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    again = Own.load_from_checkpoint(tmp_path / "own.ckpt", rate=0.25)
    assert (again.layer.in_features, again.rate, again.seed) == (3, 0.25, 3)
    assert torch.equal(again.layer.weight, module.layer.weight)


def test_strict_false_keeps_what_the_checkpoint_lacks(tmp_path: Path) -> None:
    module = Own(3)
    trainer = L.Trainer(accelerator="cpu", logger=False)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "own.ckpt", weights_only=True)
    checkpoint = torch.load(tmp_path / "own.ckpt")
    del checkpoint["state_dict"]["layer.bias"]
    torch.save(checkpoint, tmp_path / "part.ckpt")
    with pytest.raises(ValueError, match="bias"):
        Own.load_from_checkpoint(tmp_path / "part.ckpt")
    again = Own.load_from_checkpoint(tmp_path / "part.ckpt", strict=False)
    assert torch.equal(again.layer.weight, module.layer.weight)


def test_a_reward_model_built_from_settings_comes_back(
    reward_model: Callable[..., RewardModel], tmp_path: Path
) -> None:
    module = reward_model(("a", "b"), margin=0.5)
    trainer = L.Trainer(accelerator="cpu", logger=False)
    trainer.strategy.connect(module)
    module.stateful.pop("pairs")  # counted over ranks, of which there are none yet
    trainer.save_checkpoint(tmp_path / "r.ckpt")
    checkpoint = torch.load(tmp_path / "r.ckpt")
    checkpoint["lrlhf"]["pairs"] = {"ranks": []}
    torch.save(checkpoint, tmp_path / "r.ckpt")
    again = RewardModel.load_from_checkpoint(tmp_path / "r.ckpt")
    assert (again.head_names, again.objective.margin) == (("a", "b"), 0.5)


class OwnData(PromptDataModule):
    """Logs what it was built with, as Lightning's users do."""

    def __init__(self, path: str, seed: int = 1) -> None:
        super().__init__(path, batch_size=4, seed=seed)
        self.save_hyperparameters()


def test_a_data_module_may_log_arguments_of_the_same_names(
    policy: CausalLM, prompts: Path, tmp_path: Path
) -> None:
    module = RLOO(policy, Rewards([letters]), num_generations=2, seed=7)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=1,
        logger=ResumingCSVLogger(tmp_path / "logs"),
        enable_checkpointing=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
    )
    trainer.fit(module, datamodule=OwnData(str(prompts), seed=3))
    (logged,) = (tmp_path / "logs").rglob("hparams.yaml")
    assert {"seed: 3", "num_generations: 2"} <= {*logged.read_text().splitlines()}
    assert module.hparams["seed"] == 7
