"""Rewards alone, self-distillation alone, and both, on sums with a second try.

The policy (91,000 parameters) is first trained on texts: behind an answer, as in ``7; 3 + 4 =``,
it writes that answer, whatever the sum is; without one it writes a random number, at once and
after ``No.``. It can read privileged context then, and cannot add. The environment is
`examples/second_try.py` with 24 one-digit sums of reasoning-gym; the score is 1 if one of two tries
is right. Every arm has the same rows, seeds and optimizer:

- *rewards*: RLOO.
- *self-distillation*: the policy with the right answer before its prompt is the teacher, with the
  weights it started with; rewards are measured only.
- *both*: the divergence is one more term of RLOO's loss.
- *present weights*: self-distillation whose teacher has the weights of the policy as it is.

    python -m benchmarks.self_distillation [--seeds 1 2 3] [--out self_distillation.png]
"""

from __future__ import annotations

import argparse
import importlib
import logging
import random
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from transformers import PreTrainedModel

from benchmarks.staleness import TOKENIZER, fit_quietly, interval
from lrlhf.datamodules import PromptDataModule, ReasoningGym
from lrlhf.environments import Episodes
from lrlhf.examples.second_try import SecondTry
from lrlhf.modules import RLOO, Evaluation, OptimizerConfig, Reference, Teacher
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling
from tests.conftest import build_language_model

WRONG = "No.\n"
CONTEXT = "{{ answer }}; {{ prompt }}"
TEACHER = Teacher(context=CONTEXT, placement="loss", update_rate=0.0)
ARMS: Mapping[str, Mapping[str, Any]] = {
    "rewards": {},
    "self-distillation": {"teacher": TEACHER, "algorithm": "distillation"},
    "both": {"teacher": TEACHER},
    "present weights": {
        "teacher": Teacher(context=CONTEXT, placement="loss"),
        "algorithm": "distillation",
    },
}
SUMS, EVERY = 24, 10
IDS = {char: TOKENIZER(char).input_ids[0] for char in f"0123456789 +-=;{WRONG}"}


def example(generator: random.Random, *, informed: bool) -> list[tuple[str, bool]]:
    """Return pieces of a text, and whether each is learnt."""

    def number() -> int:
        return generator.randint(-8, 18)

    answer, first = number(), number()
    terms = (generator.randint(1, 9), generator.choice("+-"), generator.randint(1, 9))
    prompt = "{} {} {} =".format(*terms)
    if not informed:
        return [(prompt, False), (f" {answer}\n", True), (WRONG, False), (f" {first}\n", True)]
    right = (f" {answer}\n", True)
    tries = [(f" {first}\n", False), (WRONG, False), right] if generator.random() < 0.5 else [right]
    return [(f"{answer}; {prompt}", False), *tries]


@cache
def reader(seed: int, steps: int) -> PreTrainedModel:
    """Train a policy to read an answer that it is given, and to guess one that it is not."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.05}
    model = build_language_model(TOKENIZER, seed=seed, **sizes).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    generator = random.Random(seed)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 50, (steps - step) / 200)
        rows = [example(generator, informed=row % 2 == 0) for row in range(64)]
        ids = [[(IDS[char], own) for text, own in row for char in text] for row in rows]
        width = max(map(len, ids))
        table = torch.tensor([row + [(0, False)] * (width - len(row)) for row in ids])
        tokens, learnt = table[..., 0], table[..., 1].bool()
        logits = model(input_ids=tokens).logits[:, :-1]
        chosen = learnt[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits[chosen], tokens[:, 1:][chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    texts = [example(generator, informed=True) for _ in range(200)]
    share = sum(map(partial(reads, model.eval()), texts)) / len(texts)
    print(f"seed {seed}: reads {share:.0%} of the answers", flush=True)  # noqa: T201
    return model


@torch.no_grad()
def reads(model: PreTrainedModel, pieces: list[tuple[str, bool]]) -> bool:
    """Tell whether every token that is to be learnt is the most probable one."""
    ids = torch.tensor([IDS[char] for text, _ in pieces for char in text])
    learnt = torch.tensor([own for text, own in pieces for _ in text])[1:]
    best = model(input_ids=ids[None]).logits[0, :-1].argmax(-1)
    return bool((best == ids[1:])[learnt].all())


class Curve(L.Callback):
    """Keeps the scores of the evaluations."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.scores: list[float] = []

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.steps.append(trainer.global_step)
        self.scores.append(float(trainer.callback_metrics["eval/score"]))


def run(
    arm: Mapping[str, Any], seed: int, *, iterations: int, pretraining: int, lr: float
) -> Curve:
    """Train once."""
    policy = build_language_model(TOKENIZER, hidden_size=64, intermediate_size=128)
    policy.load_state_dict(reader(seed, pretraining).state_dict())
    L.seed_everything(seed, verbose=False)
    module = RLOO(
        policy,
        Rewards(["environment_reward"]),
        tokenizer=TOKENIZER,
        num_generations=4,
        sampling=Sampling(max_new_tokens=16, stop=("\n",)),
        evaluation=Evaluation(num_samples=4, temperatures=(1.0,)),
        episodes=Episodes(
            environment=SecondTry,
            options={"feedback": WRONG, "extract": r"(-?\d+)"},
            max_turn_tokens=4,
        ),
        reference=Reference(kl_coef=0.0),
        optimizer=OptimizerConfig(lr=lr),
        seed=seed,
        **arm,
    )

    def sums(size: int, seed: int) -> ReasoningGym:
        options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
        return ReasoningGym("chain_sum", size, seed, options)

    data = PromptDataModule(
        sums(SUMS, seed),
        val=sums(SUMS, seed),
        prompt_template="{{ metadata.expression }} =",
        batch_size=8,
        val_batch_size=SUMS,
        seed=seed,
    )
    curve = Curve()
    fit_quietly(
        module,
        steps=iterations,
        callbacks=[curve],
        data=data,
        val_check_interval=EVERY,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-1,
    )
    return curve


def draw(curves: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Draw a line for each seed."""
    figure = importlib.import_module("matplotlib.figure").Figure((6, 3.6), layout="constrained")
    panel = figure.subplots()
    for colour, (name, runs) in enumerate(curves.items()):
        for number, one in enumerate(runs):
            label = name if number == 0 else None
            panel.plot(one.steps, one.scores, f"C{colour}", linewidth=1, alpha=0.8, label=label)
    panel.set(xlabel="iteration", ylabel="solved in two tries", ylim=(0, 1.02))
    panel.grid(alpha=0.3)
    panel.legend(loc="best")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Print a row for each arm, and draw the curves."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", default=[*ARMS], choices=[*ARMS])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--pretraining", type=int, default=400)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--out", type=Path, default=Path("self_distillation.png"))
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lrlhf"):
        logging.getLogger(name).setLevel(logging.ERROR)
    options = {name: getattr(asked, name) for name in ("iterations", "pretraining", "lr")}
    curves: dict[str, list[Curve]] = {name: [] for name in asked.arms}
    for seed in asked.seeds:
        for name, runs in curves.items():
            started = time.perf_counter()
            runs.append(run(ARMS[name], seed, **options))
            seconds = time.perf_counter() - started
            print(f"seed {seed}, {name}: {runs[-1].scores}, {seconds:.0f} s", flush=True)  # noqa: T201
    print("| arm | before | middle | end | end (95 %) |")  # noqa: T201
    print("|---|---|---|---|---|")  # noqa: T201
    for name, runs in curves.items():
        cells = [
            ", ".join(f"{one.scores[index]:.2f}" for one in runs)
            for index in (0, len(runs[0].scores) // 2, -1)
        ]
        mean, width = interval([one.scores[-1] for one in runs])
        print(f"| {' | '.join([name, *cells, f'{mean:.2f} ± {width:.2f}'])} |")  # noqa: T201
    draw(curves, asked.out)


if __name__ == "__main__":
    main()
