"""A run that goes on with more steps takes each at the rate of the run that went through."""

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from transformers import get_cosine_schedule_with_warmup

from lrlhf import Trainer
from lrlhf.datamodules import (
    PreferenceDataModule,
    PromptDataModule,
    StepwiseDataModule,
    SupervisedDataModule,
)
from lrlhf.modules import (
    DPO,
    PPO,
    RLOO,
    SFT,
    Critic,
    OptimizerConfig,
    ProcessRewardModel,
    Reference,
    RewardModel,
    TrainingModule,
    Update,
)
from lrlhf.rollout import Sampling
from tests.matrices import few_of
from tests.modules.policy_runs import letters

SHORT, LONG = 2, 6
POLICY: dict[str, Any] = {
    "rewards": letters,
    "num_generations": 2,
    "sampling": Sampling(max_new_tokens=3),
    "reference": Reference(kl_coef=0.0),
}


def answers() -> PreferenceDataModule:
    return PreferenceDataModule(
        [{"prompt": f"{n}", "chosen": "a", "rejected": "b"} for n in range(12)], batch_size=2
    )


def prompts() -> PromptDataModule:
    return PromptDataModule([{"prompt": f"{n}"} for n in range(12)], batch_size=2)


def texts() -> SupervisedDataModule:
    return SupervisedDataModule(
        [{"prompt": f"{n}", "completion": "a"} for n in range(12)], batch_size=2
    )


def steps() -> StepwiseDataModule:
    rows = [
        {"prompt": f"{n}", "completions": ["a", "b"], "labels": [True, False]} for n in range(9)
    ]
    return StepwiseDataModule(rows, batch_size=2)


def rloo(folder: str, optimizer: OptimizerConfig) -> RLOO:
    return RLOO(folder, optimizer=optimizer, update=Update(freeze_steps=1), **POLICY)


def ppo(folder: str, optimizer: OptimizerConfig) -> PPO:
    critic = Critic(optimizer=optimizer, freeze_steps=1)
    return PPO(folder, optimizer=optimizer, critic=critic, **POLICY)


MODULES: dict[str, tuple[Callable[..., L.LightningModule], Callable[[], Any], list[int]]] = {
    # with the steps that each optimizer waits at the start
    "sft": (lambda folder, optimizer: SFT(folder, optimizer=optimizer), texts, [0]),
    "dpo": (lambda folder, optimizer: DPO(folder, optimizer=optimizer), answers, [0]),
    "reward": (lambda folder, optimizer: RewardModel(folder, optimizer=optimizer), answers, [0]),
    "prm": (lambda folder, optimizer: ProcessRewardModel(folder, optimizer=optimizer), steps, [0]),
    "rloo": (rloo, prompts, [1]),
    "ppo": (ppo, prompts, [0, 1]),
}
SCHEDULES: dict[str, tuple[dict[str, Any], Callable[[int, int], float]]] = {
    # with the rate of step s of n, in closed form
    "constant": ({"warmup_steps": 0}, lambda s, n: 1.0),
    "warm-up": (
        {"warmup_steps": 0.5},
        lambda s, n: min(1.0, (s + 1) / (math.ceil(n / 2) + 1)),
    ),
    "linear": ({"schedule": "linear", "warmup_steps": 0}, lambda s, n: 1 - s / n),
    "cosine": (
        {"schedule": "cosine", "warmup_steps": 1, "min_lr_fraction": 0.1},
        lambda s, n: 0.5 if s == 0 else 0.1 + 0.45 * (1 + math.cos(math.pi * (s - 1) / (n - 1))),
    ),
}


class Rates(L.Callback):
    """Notes the learning rates of every step, and the momentum."""

    def __init__(self) -> None:
        self.seen: list[list[float]] = []
        self.momentum: list[Any] = []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        groups = [optimizer.param_groups[-1] for optimizer in trainer.optimizers]
        self.seen.append([float(group["lr"]) for group in groups])
        self.momentum.append([group.get("momentum") for group in groups])


def run(
    build: Callable[[], L.LightningModule], data: Any, folder: Path, parts: list[int]
) -> tuple[Rates, dict[str, torch.Tensor]]:
    rates = Rates()
    for steps in parts:
        L.seed_everything(1, verbose=False)
        module = build()
        trainer = Trainer(
            max_steps=steps,
            default_root_dir=folder,
            callbacks=[rates],
            accelerator="cpu",
            enable_progress_bar=False,
            logger=False,
        )
        trainer.fit(module, data(), ckpt_path="last" if steps != parts[0] else None)
    return rates, module.state_dict()


CASES = [(name, "constant") for name in MODULES]
CASES += [("sft", "warm-up"), ("ppo", "linear"), ("sft", "cosine"), ("rloo", "cosine")]


@pytest.mark.parametrize("case", few_of(product(MODULES, SCHEDULES), CASES), ids=" ".join)
def test_steps_have_the_rates_of_the_run_that_went_through(
    case: tuple[str, str], model_folder: str, tmp_path: Path
) -> None:
    name, schedule = case
    build, data, waits = MODULES[name]
    options, rate = SCHEDULES[schedule]
    optimizer = OptimizerConfig(lr=1e-2, **options)
    resumed, ended = run(
        lambda: build(model_folder, optimizer), data, tmp_path / "resumed", [SHORT, LONG]
    )
    for index, wait in enumerate(waits):
        lengths = [SHORT] * SHORT + [LONG] * (LONG - SHORT)
        expected = [
            1e-2 * rate(max(0, step - wait), length - wait) for step, length in enumerate(lengths)
        ]
        assert [row[index] for row in resumed.seen] == pytest.approx(expected)
    if schedule == "constant":
        _, straight = run(lambda: build(model_folder, optimizer), data, tmp_path / "one", [LONG])
        torch.testing.assert_close(ended, straight, rtol=0, atol=0, equal_nan=True)


class Own(TrainingModule):
    """A module with a schedule of its own."""

    def __init__(self, make: Callable[..., Any], lr: float = 1.0) -> None:
        super().__init__()
        self.make, self.lr, self.net = make, lr, nn.Linear(1, 1)

    def trainable_models(self) -> dict[str, nn.Module]:
        return {"net": self.net}

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.net.parameters(), lr=self.lr, momentum=0.5)
        return [sgd], [self.make(sgd, int(self.trainer.estimated_stepping_batches))]

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.take_step(self.net(batch).mean())

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(12, 1), batch_size=2)


@pytest.mark.parametrize(
    "make",
    [
        lambda sgd, n: schedulers.CosineAnnealingLR(sgd, T_max=n),
        lambda sgd, n: schedulers.LinearLR(sgd, 1.0, 0.1, total_iters=n),
        lambda sgd, n: schedulers.PolynomialLR(sgd, total_iters=n, power=2.0),
        lambda sgd, n: schedulers.MultiStepLR(sgd, milestones=[n // 2]),
        lambda sgd, n: schedulers.MultiplicativeLR(sgd, lambda step: 1 - 1 / n),
        lambda sgd, n: schedulers.OneCycleLR(sgd, max_lr=1.0, total_steps=n + 1),
        lambda sgd, n: schedulers.SequentialLR(
            sgd,
            [
                schedulers.LinearLR(sgd, 0.1, total_iters=n // 2),
                schedulers.CosineAnnealingLR(sgd, T_max=n - n // 2),
            ],
            milestones=[n // 2],
        ),
        lambda sgd, n: schedulers.ChainedScheduler(
            [schedulers.ConstantLR(sgd, 0.5, n // 2), schedulers.LinearLR(sgd, total_iters=n)]
        ),
        lambda sgd, n: get_cosine_schedule_with_warmup(sgd, n // 3, n),
    ],
    ids=[
        "cosine",
        "linear",
        "polynomial",
        "steps",
        "product",
        "cycle",
        "sequence",
        "chain",
        "transformers",
    ],
)
def test_schedules_of_pytorch_follow_the_longer_run(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    straight, _ = run(lambda: Own(make), lambda: None, tmp_path / "one", [LONG])
    resumed, _ = run(lambda: Own(make), lambda: None, tmp_path / "resumed", [SHORT, LONG])
    assert resumed.seen[SHORT:] == straight.seen[SHORT:]
    assert resumed.momentum[SHORT:] == straight.momentum[SHORT:]


class Halving(schedulers.LRScheduler):
    """Remembers what PyTorch's schedules do not depend on."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.factor = 1.0
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        self.factor /= 2
        return [self.factor for _ in self.base_lrs]


def test_a_schedule_of_ones_own_goes_on_from_what_it_stored(tmp_path: Path) -> None:
    rates, _ = run(lambda: Own(lambda sgd, n: Halving(sgd)), lambda: None, tmp_path, [SHORT, 4])
    assert [row[0] for row in rates.seen] == [1 / 2, 1 / 4, 1 / 8, 1 / 16]


def test_a_resumed_run_takes_the_peak_of_its_own_config(tmp_path: Path) -> None:
    peaks = iter((1.0, 3.0))
    rates, _ = run(
        lambda: Own(lambda sgd, n: schedulers.LinearLR(sgd, 1.0, 0.0, n), lr=next(peaks)),
        lambda: None,
        tmp_path,
        [2, 4],
    )
    assert [row[0] for row in rates.seen] == pytest.approx([1.0, 0.5, 3 * 0.5, 3 * 0.25])
