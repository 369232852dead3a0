"""RLOO with TRL: a language model learns sums."""

import re
import sys

from datasets import Dataset
from trl import RLOOConfig, RLOOTrainer

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
    data = sums()
    config = RLOOConfig(
        output_dir=f"runs/rloo_trl_{seed}",
        num_generations=4,
        per_device_train_batch_size=32,
        max_completion_length=3,
        temperature=1.0,
        beta=0.05,
        reward_weights=[1.0, 0.2],
        learning_rate=2e-5,
        lr_scheduler_type="constant",
        max_steps=20,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=10,
        per_device_eval_batch_size=64,
        save_steps=20,
        log_completions=True,
        report_to="none",
        bf16=False,
        gradient_checkpointing=False,
        seed=seed,
    )
    trainer = RLOOTrainer(
        model=MODEL,
        reward_funcs=[right, number],
        args=config,
        train_dataset=data["train"],
        eval_dataset=data["test"],
    )
    trainer.train()
    trainer.save_model(f"runs/rloo_trl_{seed}/final")
