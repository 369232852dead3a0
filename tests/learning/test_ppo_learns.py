"""What PPO is for: rewarded tokens are found, and the critic learns to foresee the return."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lrlhf.datamodules import PromptDataModule
from lrlhf.functional import EstimatorInputs
from lrlhf.models import ValueNetwork, new_value_head
from lrlhf.modules import PPO, Advantage, Critic, OptimizerConfig, Reference, Update
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling
from tests.conftest import build_language_model
from tests.matrices import few_of
from tests.modules.conftest import prompts  # noqa: F401  a fixture
from tests.modules.policy_runs import Watcher, fit

VOWELS = "aeiou"  # 5 of 260 tokens


def says_vowels(completions: Sequence[str]) -> list[float]:
    return [sum(letter in VOWELS for letter in text) / 4 for text in completions]


def known_from_the_prompt(prompts: Sequence[str]) -> list[float]:  # noqa: F811
    return [(ord(prompt[-1]) - ord("a")) / 4 for prompt in prompts]


def nothing(inputs: EstimatorInputs) -> torch.Tensor:
    """No response is better than another."""
    return torch.zeros_like(inputs.kl)


def ppo(reward: Any, tokenizer: Any, **options: Any) -> PPO:
    defaults: dict[str, Any] = {
        "num_generations": 32,
        "sampling": Sampling(max_new_tokens=4),
        "reference": Reference(kl_coef=0.0),
        "optimizer": OptimizerConfig(lr=1e-2),
        "critic": Critic(optimizer=OptimizerConfig(lr=1e-2)),
        "update": Update(loss="token_clip", aggregate="token_mean", num_iterations=2),
    }
    model = build_language_model(tokenizer)
    return PPO(model, Rewards([reward]), tokenizer=tokenizer, **(defaults | options))


def mean_scores(module: PPO, prompts: Any, folder: Any, steps: int) -> list[float]:  # noqa: F811
    watcher = Watcher()
    fit(module, prompts, folder, steps=steps, callbacks=[watcher])
    return [float(experience.scores.mean()) for experience in watcher.experiences]


def test_a_rewarded_token_is_found(tokenizer, prompts, tmp_path) -> None:  # noqa: F811
    scores = mean_scores(ppo(says_vowels, tokenizer), prompts, tmp_path, steps=30)
    assert sum(scores[:3]) / 3 < 0.1
    assert sum(scores[-3:]) / 3 > 0.9


@pytest.mark.exhaustive
def test_without_advantages_nothing_is_found(tokenizer, prompts, tmp_path) -> None:  # noqa: F811
    module = ppo(
        says_vowels, tokenizer, critic=None, advantage=Advantage(estimator=f"{__name__}.nothing")
    )
    scores = mean_scores(module, prompts, tmp_path, steps=30)
    assert sum(scores[-3:]) / 3 < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("kind", few_of(["head", "own"], ["own"]))
def test_a_critic_of_default_settings_learns_within_tens_of_iterations(
    tokenizer,
    prompts,  # noqa: F811
    tmp_path,
    kind: str,
) -> None:
    backbone = build_language_model(tokenizer, seed=3).base_model
    network = ValueNetwork(backbone, new_value_head(backbone, "linear"))
    module = PPO(
        build_language_model(tokenizer),
        Rewards([known_from_the_prompt]),
        tokenizer=tokenizer,
        num_generations=1,
        sampling=Sampling(max_new_tokens=1),
        critic=Critic(model=network if kind == "own" else None),
    )
    data = PromptDataModule(str(prompts), batch_size=16)
    trainer = fit(module, prompts, tmp_path, steps=40, data=data)
    assert float(trainer.logged_metrics["value/explained_variance"]) > 0.5
