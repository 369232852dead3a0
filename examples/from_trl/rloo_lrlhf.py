"""RLOO with lrlhf: a language model learns sums."""

import re
import sys

from datasets import Dataset

from lrlhf import Trainer
from lrlhf.callbacks import RLCheckpoint
from lrlhf.datamodules import PromptDataModule
from lrlhf.modules import RLOO, OptimizerConfig, Reference
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling

MODEL = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"


def sums():
    questions = [(a, sign * b) for a in range(10) for sign in (1, -1) for b in range(1, 10)]
    rows = [
        {"prompt": f"4 - 9 = -5\n{a} {'+' if b > 0 else '-'} {abs(b)} =", "answer": str(a + b)}
        for a, b in questions
    ]
    return Dataset.from_list(rows).train_test_split(test_size=64, seed=1)


def right(completions, answer, **kwargs):
    found = [re.match(r"\s*(-?\d+)", text) for text in completions]
    return [float(f is not None and f[1] == a) for f, a in zip(found, answer)]


def number(completions, **kwargs):
    return [float(re.match(r"\s*-?\d", text) is not None) for text in completions]


if __name__ == "__main__":
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    rows = sums()
    module = RLOO(
        policy=MODEL,
        rewards=Rewards([right, number], weights=[1.0, 0.2]),
        num_generations=4,
        sampling=Sampling(max_new_tokens=3, temperature=1.0),
        eval_sampling=Sampling(max_new_tokens=3, temperature=1.0),
        reference=Reference(kl_coef=0.05),
        optimizer=OptimizerConfig(lr=2e-5),
        seed=seed,
    )
    data = PromptDataModule(
        train=rows["train"], val=rows["test"], batch_size=8, val_batch_size=64, seed=seed
    )
    trainer = Trainer(
        default_root_dir=f"runs/rloo_lrlhf_{seed}",
        max_steps=20,
        val_check_interval=10,
        check_val_every_n_epoch=None,
        callbacks=[RLCheckpoint(every_n_train_steps=20)],
    )
    trainer.fit(module, data)
