"""What rewards of turns are worth: the same task with them, and with their sum at the end only.

A tiny policy with random weights plays four turns of four bytes. A turn pays the share of its
bytes that are of the wanted kind (a small letter, a digit, a capital, a mark), and the last turn
pays once more what the first one did, so some of the reward comes late. Every way gets the same
iterations, learning rate and seeds; the table has the mean score of the last tenth of the
iterations (at most 5), and the critic's explained variance by thirds.

    python benchmarks/turn_credit.py [--iterations 150] [--seeds 1 2 3]
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lrlhf.datamodules import PromptDataModule
from lrlhf.environments import Episodes, TextEnvironment
from lrlhf.modules import PPO, RLOO, Advantage, Critic, OptimizerConfig, Reference
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling

KINDS: tuple[Callable[[str], bool], ...] = (
    str.islower,
    str.isdigit,
    str.isupper,
    lambda one: one in "!\"#$%&'()*+,-./:;<=>?@",
)
WAYS: dict[str, tuple[type[RLOO | PPO], str | None, str]] = {
    "PPO, rewards of turns": (PPO, None, "turn"),
    "PPO, outcome only": (PPO, None, "response"),
    "RLOO, baselines of turns": (RLOO, "rloo_turn", "turn"),
    "RLOO, outcome only": (RLOO, None, "response"),
}


class Kinds(TextEnvironment):
    """Wants another kind of byte in every turn."""

    def reset(self) -> None:
        self.shares: list[float] = []

    def step(self, action: str) -> str | None:
        wanted = KINDS[len(self.shares)]
        self.shares.append(sum(wanted(one) for one in action) / max(len(action), 1))
        return f"<{len(self.shares)}>" if len(self.shares) < len(KINDS) else None

    def reward(self) -> float:
        return self.shares[-1]

    def get_reward(self) -> float:
        return self.shares[0]


class History(L.Callback):
    """Keeps what each iteration logs."""

    def __init__(self) -> None:
        self.scores: list[float] = []
        self.explained: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        metrics = trainer.callback_metrics
        self.scores.append(float(metrics["rollout/score"]))
        self.explained.append(float(metrics.get("value/explained_variance", torch.nan)))


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    marks = ["<|pad|>", "<|end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={t: i for i, t in enumerate([*marks, *alphabet])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(marks)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=marks[0], eos_token=marks[1])


def train(way: str, seed: int, iterations: int, learning_rate: float) -> History:
    """Train one policy."""
    L.seed_everything(seed, verbose=False)
    words = tokenizer()
    policy = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=256,
            pad_token_id=words.pad_token_id,
            eos_token_id=words.eos_token_id,
            bos_token_id=None,
        )
    )
    cls, algorithm, credit = WAYS[way]
    module = cls(
        policy,
        Rewards(["environment_reward"]),
        tokenizer=words,
        algorithm=algorithm,
        num_generations=4,
        sampling=Sampling(max_new_tokens=40),
        episodes=Episodes(environment=Kinds, max_turn_tokens=4),
        reference=Reference(kl_coef=0.0),
        advantage=Advantage(credit=credit),  # type: ignore[arg-type]
        optimizer=OptimizerConfig(lr=learning_rate),
        **(
            {"critic": Critic(optimizer=OptimizerConfig(lr=3 * learning_rate))}
            if cls is PPO
            else {}
        ),
    )
    history = History()
    rows = [{"prompt": f"{number}: "} for number in range(16)]
    with tempfile.TemporaryDirectory() as folder:
        L.Trainer(
            accelerator="cpu",
            devices=1,
            max_steps=iterations,
            max_epochs=-1,
            default_root_dir=folder,
            callbacks=[history],
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            logger=False,
            use_distributed_sampler=False,
        ).fit(module, datamodule=PromptDataModule(rows, batch_size=16))
    return history


def main() -> None:
    """Train every way with every seed, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    last = max(1, min(5, chosen.iterations // 10))
    for way in WAYS:
        for seed in chosen.seeds:
            history = train(way, seed, chosen.iterations, chosen.learning_rate)
            thirds = torch.tensor(history.explained).tensor_split(3)
            first, end = history.scores[:last], history.scores[-last:]
            print(  # noqa: T201
                f"{way:26} seed {seed}: {sum(first) / last:.2f} -> {sum(end) / last:.2f}, "
                "explained variance " + " ".join(f"{float(part.mean()):.2f}" for part in thirds),
                flush=True,
            )


if __name__ == "__main__":
    main()
