"""Small classes with the shapes of options that real modules have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lrlhf.rewards import RewardError


@dataclass(frozen=True, kw_only=True)
class ToyAdapter:
    rank: int = 16
    targets: str | list[str] = "all"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}")


@dataclass(frozen=True, kw_only=True)
class ToyPolicy:
    source: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    adapter: ToyAdapter | None = None

    def __post_init__(self) -> None:
        if self.source == "nowhere":
            raise ValueError("policy.source is 'nowhere'; give a folder")


FAILURES: dict[str, BaseException] = {
    "KeyboardInterrupt": KeyboardInterrupt(),
    "FileNotFoundError": FileNotFoundError(
        "images/7.png: no such file, named in row 7 of train.jsonl"
    ),
    "RewardError": RewardError("could not score 9 of 32 responses"),
    "ValueError": ValueError("not explained by us"),
    "RuntimeError": RuntimeError("shapes differ"),
}


class ToySource:
    """A data set that is made up on the spot."""

    def __init__(self, size: int = 4) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self.size = size


class ToyReward:
    """Scores every response alike."""

    def __call__(self, completions: list[str]) -> list[float]:
        return [1.0 for _ in completions]


class ToyModule(L.LightningModule):
    """Learns one number.

    Args:
        policy: What to load.
        lr: Learning rate.
        fail: Exception to raise while training, by name.
    """

    def __init__(  # noqa: PLR0913  one option of each kind
        self,
        policy: ToyPolicy,
        *,
        reference: ToyPolicy | None = None,
        lr: float = 0.1,
        estimator: Literal["k1", "k2", "k3"] = "k1",
        clip: float | None = 0.2,
        weights: list[float] | None = None,
        betas: tuple[float, float] = (0.9, 0.99),
        rewards: list[Callable[..., Any] | str] | None = None,
        fail: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if clip is not None and clip < 0:
            raise ValueError(f"ToyModule cannot run like this: clip is {clip}")
        if lr <= 0:
            raise ValueError(f"lr must be positive, got {lr}")
        if fail == "TypeError in constructor":
            raise TypeError("a bug in the constructor")
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.lr = lr
        self.fail = fail

    def training_step(self, batch: Tensor) -> Tensor:
        if self.fail is not None:
            raise FAILURES[self.fail]
        return (self.weight * batch).square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class ToyData(L.LightningDataModule):
    def __init__(self, train: str | ToySource | list[ToySource], batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.ones(4), batch_size=self.batch_size)


class ToyTwin(L.LightningModule):
    """One of two classes with this name."""


@dataclass(frozen=True, kw_only=True)
class ToyUpdate:
    num_iterations: int = 1
    minibatch_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class ToyDynamicSampling:
    prompts: int


class ToyGroupPolicy(ToyModule):
    """Has the options of a policy that is trained on groups of responses."""

    def __init__(
        self,
        policy: ToyPolicy,
        *,
        num_generations: int = 2,
        update: ToyUpdate = ToyUpdate(),
        dynamic_sampling: ToyDynamicSampling | None = None,
        lr: float = 0.1,
    ) -> None:
        super().__init__(policy, lr=lr)
        self.sizes = num_generations, update, dynamic_sampling
