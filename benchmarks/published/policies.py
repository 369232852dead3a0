"""Runs of a tiny policy: what differs between two variants of a claim, and what a run shows."""

from __future__ import annotations

import copy
import functools
import random
import string
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks import staleness
from benchmarks.sensitivity import PROMPTS, as_asked
from benchmarks.staleness import TOKENIZER, TOKENS, fit_quietly, fresh_responses
from lrlhf.datamodules import PromptDataModule, SupervisedDataModule
from lrlhf.functional import (
    Algorithm,
    Estimator,
    EstimatorInputs,
    PolicyLoss,
    counted_scores,
    importance_weighted_policy_loss,
    spread_over_tokens,
)
from lrlhf.functional.algorithms import ALGORITHMS
from lrlhf.models import CausalLM, LoRA
from lrlhf.modules import PPO, RLOO, SFT, ImportanceSampling, OptimizerConfig, Reference, Update
from lrlhf.rewards import Rewards
from lrlhf.rollout import RolloutListener, Sampling
from lrlhf.types import Experience
from tests.conftest import build_language_model


def best_of_group(inputs: EstimatorInputs) -> Tensor:
    """Give the best response to each prompt the advantage 1, and the others 0.

    With the loss -A log π it is RAFT: supervised training on the best of k responses.

    Reference:
        Dong et al. 2023, https://arxiv.org/abs/2304.06767
    """
    groups = counted_scores(inputs).view(-1, inputs.num_generations)
    best = torch.zeros_like(groups).scatter_(1, groups.argmax(dim=1, keepdim=True), 1.0)
    return spread_over_tokens(best.flatten(), inputs)


def inside_clip_range(inputs: EstimatorInputs, *, clip: float = 0.2) -> Tensor:
    """Take RLOO's advantage from the tokens at which PPO's clipped surrogate has no gradient.

    These are A > 0 with π / μ above 1 + ε, and A < 0 with π / μ below 1 - ε. With one optimizer
    step per iteration and the importance weight π / μ on every token, what is left is the gradient
    of PPO's surrogate in the ratio π / μ.
    """
    advantages = ALGORITHMS["rloo"].estimator.function(inputs)
    ratio = (inputs.tokens["old_logprobs"] - inputs.tokens["sampling_logprobs"]).exp()
    clipped = torch.where(advantages > 0, ratio > 1 + clip, ratio < 1 - clip)
    return advantages.masked_fill(clipped, 0.0)


_POLICY_GRADIENT = PolicyLoss("policy_gradient", importance_weighted_policy_loss)
OWN: dict[str, Algorithm] = {
    "raft": Algorithm(
        name="raft",
        estimator=Estimator(best_of_group, groups=True),
        loss=PolicyLoss("raft", importance_weighted_policy_loss, aggregate="sequence_sum"),
        kl_coef=0.0,
    ),
    "unclipped": Algorithm(
        name="unclipped",
        estimator=ALGORITHMS["rloo"].estimator,
        loss=_POLICY_GRADIENT,
        kl_in="reward",
    ),
    "ppo_ratio": Algorithm(
        name="ppo_ratio",
        estimator=Estimator(inside_clip_range, groups=True),
        loss=_POLICY_GRADIENT,
        kl_in="reward",
    ),
}
"""Variants that lrlhf does not have by name."""


class Curve(L.Callback):
    """Keeps score and entropy of every iteration."""

    def __init__(self) -> None:
        self.scores: list[float] = []
        self.entropies: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.scores.append(float(trainer.callback_metrics["rollout/score"]))
        self.entropies.append(float(trainer.callback_metrics["policy/entropy"]))


@dataclass(frozen=True, kw_only=True)
class PolicyRun:
    """A run on the task of `benchmarks/sensitivity.py`: letters after a plus, none after a minus.

    Args:
        algorithm: A name of lrlhf's, or of `OWN`; ``ppo`` has a critic.
        lr: Learning rate.
        num_generations: Responses to each prompt.
        responses: Of an iteration, whatever ``num_generations`` is.
        iterations: In all.
        num_minibatches: Optimizer steps of an iteration.
        loss_options: Of the policy loss, as pairs.
        rank: Of the LoRA adapters on all linear layers; None: the whole model is trained.
        taught: Whether the policy starts from `follows_a_little` in place of random weights.
    """

    algorithm: str = "rloo"
    lr: float = 8e-3
    num_generations: int = 4
    responses: int = 64
    iterations: int = 24
    num_minibatches: int = 1
    loss_options: tuple[tuple[str, float], ...] = ()
    rank: int | None = None
    taught: bool = False

    def __call__(self, seed: int) -> dict[str, Any]:
        """Train once: the mean score over all iterations, that of fresh responses, and entropy."""
        L.seed_everything(seed, verbose=False)
        curve = Curve()
        kind = PPO if self.algorithm == "ppo" else RLOO
        with tempfile.TemporaryDirectory() as folder:
            module = kind(
                self._policy(Path(folder)),
                Rewards([as_asked]),
                tokenizer=TOKENIZER,
                algorithm=OWN.get(self.algorithm, self.algorithm),
                num_generations=self.num_generations,
                sampling=Sampling(max_new_tokens=TOKENS),
                reference=Reference(kl_coef=0.0),
                update=Update(
                    num_minibatches=self.num_minibatches, options=dict(self.loss_options)
                ),
                optimizer=OptimizerConfig(lr=self.lr),
                seed=seed,
            )
            batch = self.responses // self.num_generations
            rows = [{"prompt": text} for text in PROMPTS * -(-batch // len(PROMPTS))]
            data = PromptDataModule(rows, batch_size=batch, seed=seed)
            fit_quietly(module, steps=self.iterations, callbacks=[curve], data=data)
            asked = [prompt for prompt in PROMPTS for _ in range(16)]
            scores = as_asked(asked, fresh_responses(module, PROMPTS, seed))
        last = max(1, self.iterations // 4)
        return {
            "on_the_way": sum(curve.scores) / self.iterations,
            "score": sum(scores) / len(scores),
            "entropy": sum(curve.entropies[-last:]) / last,
        }

    def _policy(self, folder: Path) -> PreTrainedModel | CausalLM:
        model = (
            copy.deepcopy(follows_a_little()) if self.taught else build_language_model(TOKENIZER)
        )
        if self.rank is None:
            return model
        model.save_pretrained(folder)
        TOKENIZER.save_pretrained(folder)
        return CausalLM(source=str(folder), lora=LoRA(r=self.rank))


@dataclass(frozen=True, kw_only=True)
class StaleRun:
    """A run of `benchmarks/staleness.py` with the importance weights π / μ, without any bound.

    Args:
        algorithm: ``unclipped``, or ``ppo_ratio``.
        lr: Learning rate.
        max_staleness: Iterations by which a token may be older than the policy.
        iterations: In all.
        delay: Seconds per token of the engine.
    """

    algorithm: str
    lr: float = 2e-3
    max_staleness: int = 3
    iterations: int = 24
    delay: float = 0.002

    def __call__(self, seed: int) -> dict[str, Any]:
        """Train once: the score of fresh responses, and the mean age of the tokens."""
        result = staleness.run(
            self.max_staleness,
            seed,
            iterations=self.iterations,
            lr=self.lr,
            delay=self.delay,
            algorithm=OWN[self.algorithm],
            importance_sampling=ImportanceSampling(mode="token_truncate", high=1e6),
            # with 0 the advantages would come before the policy's log-probabilities
            reference=Reference(kl_coef=1e-12),
        )
        return {"score": result.score, "age": result.age}


LONGEST, USUAL = 32, 8
VOWELS = set("aeiou")


def begins_with_vowel(completions: Sequence[str]) -> list[float]:
    """Score 1 where the first character is a vowel; the length does not count."""
    return [float(text[:1] in VOWELS) for text in completions]


class Lengths(RolloutListener, L.Callback):
    """Keeps the lengths of right and wrong responses of every iteration."""

    def __init__(self) -> None:
        self.right: list[list[int]] = []
        self.wrong: list[list[int]] = []

    def on_rollout(
        self, trainer: L.Trainer, module: Any, experience: Experience, records: Sequence[Any]
    ) -> None:
        lengths = experience.response_mask.sum(dim=1)
        scores = experience.scores > 0.5
        self.right.append(lengths[scores].tolist())
        self.wrong.append(lengths[~scores].tolist())


@dataclass(frozen=True, kw_only=True)
class LengthRun:
    """A run in which a response may end at any token, and only its first one is right or wrong.

    The policy starts from `ends_at_random`.

    Args:
        algorithm: A name of lrlhf's.
        lr: Learning rate.
        num_generations: Responses to each of 16 prompts.
        iterations: In all.
    """

    algorithm: str
    lr: float = 2e-3
    num_generations: int = 8
    iterations: int = 25

    def __call__(self, seed: int) -> dict[str, Any]:
        """Train once: lengths by correctness in each fifth of the iterations, and their growth."""
        L.seed_everything(seed, verbose=False)
        lengths, curve = Lengths(), Curve()
        module = RLOO(
            copy.deepcopy(ends_at_random()),
            Rewards([begins_with_vowel]),
            tokenizer=TOKENIZER,
            algorithm=self.algorithm,
            num_generations=self.num_generations,
            sampling=Sampling(max_new_tokens=LONGEST),
            reference=Reference(kl_coef=0.0),
            optimizer=OptimizerConfig(lr=self.lr),
            seed=seed,
        )
        data = PromptDataModule([{"prompt": text} for text in PROMPTS], batch_size=16, seed=seed)
        fit_quietly(module, steps=self.iterations, callbacks=[lengths, curve], data=data)
        right, wrong = (_by_fifths(kept) for kept in (lengths.right, lengths.wrong))
        return {
            "right": right,
            "wrong": wrong,
            "growth_right": right[-1] - right[0],
            "growth_wrong": wrong[-1] - wrong[0],
            "score": sum(curve.scores[-5:]) / 5,
            "on_the_way": sum(curve.scores) / len(curve.scores),
        }


def _by_fifths(iterations: Sequence[Sequence[int]]) -> list[float]:
    """Return the mean over all responses of each fifth of the iterations."""
    size = max(1, len(iterations) // 5)
    parts = [iterations[at : at + size] for at in range(0, len(iterations), size)]
    pooled = [[length for one in part for length in one] for part in parts]
    return [sum(part) / max(1, len(part)) for part in pooled]


@functools.cache
def ends_at_random() -> PreTrainedModel:
    """Return a policy that writes small letters and ends after 8 tokens in the mean."""
    draw = random.Random(0)
    rows = []
    for _ in range(4096):
        size = 1
        while draw.random() > 1 / USUAL and size < LONGEST - 1:
            size += 1
        text = "".join(draw.choices(string.ascii_lowercase, k=size))
        rows.append({"prompt": draw.choice(PROMPTS), "completion": text})
    return _taught(rows)


@functools.cache
def follows_a_little() -> PreTrainedModel:
    """Return a policy that writes letters alone or none, in 60 of 100 responses as it is asked."""
    draw = random.Random(0)
    others = string.digits + string.punctuation
    rows = []
    for _ in range(4096):
        prompt = draw.choice(PROMPTS)
        letters = prompt.endswith("+") == (draw.random() < 0.6)
        text = "".join(draw.choices(string.ascii_letters if letters else others, k=TOKENS))
        rows.append({"prompt": prompt, "completion": text})
    return _taught(rows)


def _taught(rows: list[dict[str, str]]) -> PreTrainedModel:
    module = SFT(
        build_language_model(TOKENIZER),
        tokenizer=TOKENIZER,
        optimizer=OptimizerConfig(lr=1e-2),
        seed=0,
    )
    fit_quietly(module, steps=64, data=SupervisedDataModule(rows, batch_size=64, seed=0))
    policy: PreTrainedModel = module.policy.eval()
    return policy
