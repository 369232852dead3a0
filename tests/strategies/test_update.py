"""Gradients of an ordinary optimizer's next step, and the step that clips or leaves them out."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lrlhf.run import Updater, count_iterations_as_steps, gradients_of, log_without_copies

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def trainer() -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=1,
    )


def weights() -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
    one, two, idle = (nn.Parameter(torch.ones(2)) for _ in range(3))
    one.grad, two.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, -4.0])
    return one, two, idle


def test_norm_scale_and_drop_of_all_groups() -> None:
    one, two, idle = weights()
    optimizer = SGD([{"params": [one]}, {"params": [two, idle]}], lr=1.0)
    gradients = gradients_of(trainer(), optimizer)
    assert gradients.norm().item() == 5.0  # 3, 4, 5
    gradients.scale(0.5)
    assert gradients.norm().item() == 2.5
    gradients.scale(torch.tensor(2.0))
    assert one.grad is not None
    assert one.grad.tolist() == [3.0, 0.0]
    assert idle.grad is None
    gradients.drop()
    assert one.grad is None
    assert two.grad is None
    assert gradients.norm().item() == 0.0
    # no weight, moment or decay moves
    step = AdamW([one, two, idle], lr=1.0, weight_decay=0.5)
    step.step()
    assert not step.state
    assert [weight.tolist() for weight in (one, two, idle)] == [[1.0, 1.0]] * 3


class Two(L.LightningModule):
    """Two weights with gradients of 3 and 4, and an optimizer each."""

    def __init__(self, clips: tuple[float, float], factor: float = 1.0) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one = nn.Parameter(torch.zeros(2))
        self.two = nn.Parameter(torch.zeros(2))
        self.clips, self.factor = clips, factor
        self.norms: list[float] = []
        self.updater = Updater(self)

    def training_step(self, batch: Tensor) -> None:
        del batch
        # twice the same, of which each step sees the sum
        for last in (False, True):
            loss = 1.5 * self.factor * self.one[0] + 2 * self.two[1]
            self.updater.backward(loss, last=last)
        optimizers: Any = self.optimizers()
        for optimizer, clip in zip(optimizers, self.clips, strict=True):
            self.norms.append(self.updater.step(optimizer, max_grad_norm=clip))

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.updater.before_step(optimizer)

    def configure_optimizers(self) -> list[Optimizer]:
        return [SGD([self.one], lr=1.0), SGD([self.two], lr=0.5)]


def fit(module: Two) -> Two:
    trainer().fit(module, DataLoader(torch.ones(1), batch_size=1))
    return module


@pytest.mark.parametrize(
    ("clips", "expected"),
    [
        # gradients 3 and 4; w = -lr · g · min(1, clip / |g|)
        ((float("inf"), float("inf")), (-3.0, -2.0)),
        ((1.0, 10.0), (-1.0, -2.0)),
        ((0.0, 0.5), (0.0, -0.25)),
    ],
)
def test_each_optimizer_is_clipped_to_its_own_norm(
    clips: tuple[float, float], expected: tuple[float, float]
) -> None:
    module = fit(Two(clips))
    assert module.norms == pytest.approx([3.0, 4.0])
    assert module.one.tolist() == pytest.approx([expected[0], 0.0], abs=1e-5)
    assert module.two.tolist() == pytest.approx([0.0, expected[1]], abs=1e-5)
    assert module.one.grad is None
    assert module.two.grad is None


@pytest.mark.parametrize(("factor", "clip"), [(float("inf"), 1.0), (float("nan"), float("inf"))])
def test_a_gradient_that_is_not_finite_moves_its_own_model_only_by_nothing(
    factor: float, clip: float
) -> None:
    module = fit(Two((clip, float("inf")), factor))
    assert not torch.isfinite(torch.tensor(module.norms[0]))
    assert module.one.tolist() == [0.0, 0.0]
    assert module.two.tolist() == [0.0, -2.0]


def test_two_optimizers_make_one_step() -> None:
    module = Two((1.0, 1.0))
    made = trainer()
    count_iterations_as_steps(made)
    made.fit(module, DataLoader(torch.ones(3), batch_size=1))
    assert (made.global_step, len(module.norms)) == (1, 2)


class Logs(L.LightningModule):
    """Logs the number of its step, which it was told to log per step and on average."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.mean = MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        del batch
        self.log("number", float(batch_idx), on_step=True, on_epoch=True)
        self.mean(float(batch_idx))
        self.log("metric", self.mean, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> None: ...


@pytest.mark.filterwarnings("ignore:.*configure_optimizers` returned `None`")
@pytest.mark.parametrize("without_copies", [True, False])
def test_a_value_is_described_once(without_copies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[Any] = []
    monkeypatch.setattr(
        "lightning_utilities.core.apply_func.deepcopy",
        lambda one, memo: copied.append(one) or copy.deepcopy(one, memo),
    )
    made = trainer()
    made.fit_loop.max_epochs, made.fit_loop.epoch_loop.max_steps = 1, -1
    if without_copies:
        log_without_copies(made)
    made.fit(Logs(), DataLoader(torch.ones(5), batch_size=1))
    assert made.callback_metrics["number_step"] == 4.0
    assert made.callback_metrics["number_epoch"] == made.callback_metrics["metric"] == 2.0
    # when Lightning copies nothing itself, the product need not replace its classes
    described = [one for one in copied if "number" in repr(one)]
    assert bool(described) != without_copies
