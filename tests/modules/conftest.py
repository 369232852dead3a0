"""Prompts that every run of a policy module can answer; reward models, and pairs for them."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from lrlhf.models import CausalLM, ScoreModel, ValueHead, ValueNetwork
from lrlhf.modules import (
    PPO,
    RLOO,
    Critic,
    OptimizerConfig,
    Reference,
    RewardModel,
    Teacher,
    Update,
)
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling
from lrlhf.types import PreferenceBatch, SequenceBatch
from tests.conftest import build_language_model
from tests.modules.policy_runs import Run, Watcher, fit, letters, sgd, weights
from tests.modules.reward_runs import SGD


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [f'{{"prompt": "say {word}", "answer": "{word}"}}' for word in "abcdefghijklmnop"]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def build(tokenizer: PreTrainedTokenizerBase) -> Callable[..., RLOO | PPO]:
    """Builds a policy module on the tiny model, the same every time, or on a given one."""

    def build(
        policy: Any = None,
        *,
        kind: type[RLOO | PPO] = RLOO,
        reward: Any = letters,
        rewards: Rewards | None = None,
        **options: Any,
    ) -> RLOO | PPO:
        defaults: dict[str, Any] = {
            "num_generations": 4,
            "sampling": Sampling(max_new_tokens=6),
            "optimizer": OptimizerConfig(lr=1e-3),
            "reference": Reference(kl_coef=0.05),
            # a source has a tokenizer of its own
            "tokenizer": None if isinstance(policy, CausalLM) else tokenizer,
        }
        if policy is None:
            policy = build_language_model(tokenizer)
        return kind(policy, rewards or Rewards([reward]), **(defaults | options))

    return build


@pytest.fixture
def ppo(build: Callable[..., PPO]) -> Callable[..., PPO]:
    """Builds PPO that takes one step per iteration with a quick head on the policy's backbone."""
    defaults: dict[str, Any] = {
        "kind": PPO,
        "num_generations": 2,
        "critic": Critic(optimizer=OptimizerConfig(lr=1e-2)),
        "update": Update(loss="token_clip", aggregate="token_mean", num_minibatches=1),
    }
    return lambda policy=None, **options: build(policy, **(defaults | options))


@pytest.fixture
def value_network(tokenizer: PreTrainedTokenizerBase) -> Callable[..., ValueNetwork]:
    """Builds a critic's network whose head is not at its start of zero."""

    def build(*, relative: bool = False) -> ValueNetwork:
        head = ValueHead(32, "linear", relative=relative)
        if not relative:
            generator = torch.Generator().manual_seed(5)
            torch.nn.init.normal_(head.output.weight, std=0.1, generator=generator)
        return ValueNetwork(build_language_model(tokenizer, seed=3).base_model, head)

    return build


@pytest.fixture
def critic_of(value_network: Callable[..., ValueNetwork]) -> Callable[..., Critic]:
    """Makes a critic: a "head" on the policy's backbone, or a network of its "own"."""

    def make(kind: str, **options: Any) -> Critic:
        own = kind == "own"
        rate = {"optimizer": OptimizerConfig(lr=1e-3 if own else 1e-2)}
        return Critic(model=value_network() if own else None, **(rate | options))

    return make


@pytest.fixture
def train(prompts: Path, tmp_path: Path) -> Callable[..., Run]:
    """Trains a policy module on the prompts; without validation, unless it is asked for."""

    def train(module: Any, *, steps: int = 1, callbacks: Any = (), **options: Any) -> Run:
        watcher, before = Watcher(), weights(module)
        options = {"limit_val_batches": 0} | options
        trainer = fit(
            module, prompts, tmp_path, steps=steps, callbacks=[watcher, *callbacks], **options
        )
        return Run(module, before, trainer, watcher)

    return train


@pytest.fixture
def other_model(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> CausalLM:
    """A model with other weights than the policy's, to be its reference."""
    folder = tmp_path / "reference"
    build_language_model(tokenizer, seed=9).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return CausalLM(source=str(folder))


@pytest.fixture
def learner(tokenizer: PreTrainedTokenizerBase, other_model: CausalLM) -> Callable[..., RLOO | PPO]:
    """Builds a module that learns from a teacher of other weights alone."""

    def build(
        policy: Any = None, *, kind: type[RLOO | PPO] = RLOO, teacher: Any = (), **options: Any
    ) -> RLOO | PPO:
        defaults: dict[str, Any] = {
            "rewards": None,
            "num_generations": 4,
            "sampling": Sampling(max_new_tokens=6, temperature=0.8),
            "optimizer": sgd(0.5),
            "update": Update(max_grad_norm=math.inf),
            "tokenizer": None if isinstance(policy, CausalLM) else tokenizer,
            "teacher": None
            if teacher is None
            else Teacher(**{"model": other_model, **dict(teacher)}),
        }
        return kind(policy or build_language_model(tokenizer), **(defaults | options))

    return build


@pytest.fixture
def reward_model(model_folder: str) -> Callable[..., RewardModel]:
    """Builds one, the same every time."""

    def build(heads: Sequence[str] = ("reward",), **options: Any) -> RewardModel:
        L.seed_everything(3, verbose=False)
        options.setdefault("optimizer", SGD)
        return RewardModel(ScoreModel(source=model_folder, heads=list(heads)), **options)

    return build


@pytest.fixture
def collate(tokenizer: PreTrainedTokenizerBase) -> Callable[..., PreferenceBatch]:
    """Makes a batch of texts and labels."""

    def sequences(texts: Sequence[str], length: int) -> SequenceBatch:
        encoded = tokenizer(
            list(texts), padding="max_length", max_length=length, return_tensors="pt"
        )
        mask = encoded["attention_mask"].bool()
        return SequenceBatch(
            input_ids=encoded["input_ids"], attention_mask=mask, response_mask=mask
        )

    def collate(
        rows: Sequence[tuple[str, str, Sequence[float]]],
        margin: Sequence[float] | None = None,
        padding: tuple[int, int] = (0, 0),
    ) -> PreferenceBatch:
        texts0, texts1, labels = zip(*rows, strict=True)
        return PreferenceBatch(
            candidate0=sequences(texts0, max(map(len, texts0)) + padding[0]),
            candidate1=sequences(texts1, max(map(len, texts1)) + padding[1]),
            labels=torch.tensor(labels),
            margin=None if margin is None else torch.tensor(margin),
            info=tuple({"row": index} for index in range(len(rows))),
        )

    return collate
