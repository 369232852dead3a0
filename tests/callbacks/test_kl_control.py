from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lrlhf.callbacks import KLControl
from tests.callbacks.fakes import ToyPolicy, batches, trainer


class CoefSpy(L.Callback):
    """Notes the coefficient that each step is trained with, and the one that is logged."""

    def __init__(self) -> None:
        self.used: list[float] = []
        self.logged: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        self.used.append(module.kl_coef)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.logged.append(float(trainer.callback_metrics["kl/coef"]))


def test_an_adaptive_coefficient_follows_the_measured_kl(tmp_path: Path) -> None:
    # target 2, horizon 100, 10 samples, so a step of the clipped error times 0.1:
    # KL 2.2 is +10 %: 0.5 * 1.01 = 0.505; KL 20 clips at +20 %: * 1.02 = 0.5151;
    # KL 0 clips at -20 %: * 0.98 = 0.504798
    spy, module = CoefSpy(), ToyPolicy(kl=[2.2, 20.0, 0.0])
    control = KLControl(init_coef=0.5, target=2.0, horizon=100)
    trainer(tmp_path, control, spy).fit(module, batches(3))
    assert spy.used == pytest.approx([0.5, 0.505, 0.5151])
    assert spy.logged == pytest.approx(spy.used)
    assert module.kl_coef == pytest.approx(0.504798)


def test_a_fixed_coefficient_replaces_the_modules_and_stays(tmp_path: Path) -> None:
    spy, module = CoefSpy(), ToyPolicy(kl=[20.0, 20.0])
    trainer(tmp_path, KLControl(mode="fixed", init_coef=0.125), spy).fit(module, batches(2))
    assert spy.used == [0.125, 0.125]
    assert module.kl_coef == 0.125


def test_a_fixed_coefficient_is_the_configured_one_after_a_resume_too(tmp_path: Path) -> None:
    first = trainer(tmp_path, KLControl(mode="fixed"))
    module = ToyPolicy(kl=[20.0])
    module.kl_coef = 0.05
    first.fit(module, batches(1))
    first.save_checkpoint(tmp_path / "one.ckpt")
    spy, module = CoefSpy(), ToyPolicy(kl=[20.0, 20.0])
    module.kl_coef = 0.2  # what the config of the resumed run says
    again = trainer(tmp_path, KLControl(mode="fixed"), spy, max_epochs=2)
    again.fit(module, batches(1), ckpt_path=tmp_path / "one.ckpt", weights_only=True)
    assert spy.used == [0.2]


@pytest.mark.parametrize(("configured", "used"), [(0.5, 0.51), (0.25, 0.25)])
def test_an_adapted_coefficient_goes_on_unless_another_start_is_configured(
    tmp_path: Path, configured: float, used: float
) -> None:
    first, again = (
        KLControl(init_coef=0.5, target=2.0, horizon=100),
        KLControl(init_coef=configured),
    )
    run = trainer(tmp_path, first)
    run.fit(ToyPolicy(kl=[20.0]), batches(1))  # 0.5 * 1.02
    module = ToyPolicy(kl=[])
    again.load_state_dict(first.state_dict())
    again.on_train_start(run, module)
    assert module.kl_coef == pytest.approx(used)


def test_a_resumed_run_goes_on_with_the_adapted_coefficient(tmp_path: Path) -> None:
    options = {"init_coef": 0.5, "target": 2.0, "horizon": 100}
    first = trainer(tmp_path, KLControl(**options))
    first.fit(ToyPolicy(kl=[20.0]), batches(1))
    first.save_checkpoint(tmp_path / "one.ckpt")
    spy, module = CoefSpy(), ToyPolicy(kl=[20.0, 2.0])
    again = trainer(tmp_path, KLControl(**options), spy, max_epochs=2)
    again.fit(module, batches(1), ckpt_path=tmp_path / "one.ckpt", weights_only=True)
    assert spy.used == [0.51]  # 0.5 * 1.02


def test_a_kl_that_is_not_finite_changes_nothing_and_is_reported(tmp_path: Path) -> None:
    module = ToyPolicy(kl=[float("nan")])
    with pytest.warns(UserWarning, match="stays at 0.5"):
        trainer(tmp_path, KLControl()).fit(module, batches(1))
    assert module.kl_coef == 0.5


def test_a_module_without_a_penalty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="BoringModel has none"):
        trainer(tmp_path, KLControl()).fit(BoringModel())


def test_there_must_be_a_penalty_to_adapt(tmp_path: Path) -> None:
    module = ToyPolicy(kl=[1.0])
    module.kl_coef = 0.0
    with pytest.raises(ValueError, match="kl_coef is 0"):
        trainer(tmp_path, KLControl(init_coef=0.5)).fit(module, batches(1))
