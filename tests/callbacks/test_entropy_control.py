from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lrlhf.callbacks import EntropyControl
from tests.callbacks.fakes import ToyPolicy, batches, trainer

MEASURED = [0.1, 0.19, 0.5, 0.1]


class Entropic(ToyPolicy):
    """Logs entropies known beforehand, and keeps the coefficient of each step."""

    def __init__(self, entropies: list[float], entropy_coef: float = 0.0) -> None:
        super().__init__()
        self.entropy_coef = entropy_coef
        self.entropies = entropies
        self.used: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.used.append(self.entropy_coef)
        super().training_step(batch, batch_idx)
        self.log("policy/entropy", self.entropies[batch_idx], batch_size=1)


def test_the_bonus_grows_below_the_target_and_rests_above_it(tmp_path: Path) -> None:
    module = Entropic(MEASURED)
    control = EntropyControl(target=0.2, delta=0.01)
    trainer(tmp_path, control).fit(module, batches(4))
    # 0.01 and 0.02 are added up; at 0.5 one is taken off and nothing counts; then 0.02 again
    assert module.used == pytest.approx([0.0, 0.01, 0.02, 0.0])
    assert module.entropy_coef == pytest.approx(0.02)


def test_it_stays_within_its_bounds(tmp_path: Path) -> None:
    module = Entropic([0.1, 0.1, 9.0, 9.0, 0.1], entropy_coef=0.05)
    control = EntropyControl(target=0.2, delta=0.04, min_coef=0.03, max_coef=0.06)
    trainer(tmp_path, control).fit(module, batches(5))
    assert module.used == pytest.approx([0.05, 0.06, 0.06, 0.0, 0.0])
    assert module.entropy_coef == pytest.approx(0.06)  # 0.03 and delta, cut off


def test_a_resumed_run_goes_on_with_its_coefficient(tmp_path: Path) -> None:
    first = trainer(tmp_path, EntropyControl(target=0.2, delta=0.01))
    first.fit(Entropic([0.1, 0.1, 9.0]), batches(3))
    first.save_checkpoint(tmp_path / "one.ckpt")
    module = Entropic([0.1])
    again = trainer(tmp_path, EntropyControl(target=0.2, delta=0.01), max_epochs=2)
    again.fit(module, batches(1), ckpt_path=tmp_path / "one.ckpt", weights_only=True)
    # 0.02 less 0.01, which did not count after 9.0; then 0.01 more
    assert module.used == [0.0]
    assert module.entropy_coef == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("options", "culprit"),
    [({"target": 0.0}, "target"), ({"delta": 0.0}, "delta"), ({"min_coef": 1.0}, "min_coef")],
)
def test_impossible_options_are_refused(options: dict[str, float], culprit: str) -> None:
    with pytest.raises(ValueError, match=f"EntropyControl {culprit}"):
        EntropyControl(**options)


def test_a_module_without_a_bonus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="BoringModel has none"):
        trainer(tmp_path, EntropyControl()).fit(BoringModel(), batches(1))
