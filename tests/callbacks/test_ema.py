from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from lrlhf.callbacks import EMA
from lrlhf.callbacks.ema import trainable_weights
from tests.callbacks.fakes import ToyPolicy, batches, resume, trainer


def shadow(ema: EMA) -> float:
    assert ema.shadows.keys() == {"policy.trained"}  # nothing of the frozen weight
    return float(ema.shadows["policy.trained"])


@pytest.mark.parametrize(
    ("options", "steps", "average"),
    [
        # weights 1, 2, 3 with decay 0.5 from 0: 0.5, then 0.25 + 1 = 1.25, then 0.625 + 1.5
        ({"decay": 0.5, "warmup": False}, 3, 2.125),
        # of the weights 1 to 5 it sees 2 and 4: 0.5 · 0 + 0.5 · 2 = 1, then 0.5 · 1 + 0.5 · 4
        ({"decay": 0.5, "warmup": False, "every_n_steps": 2}, 5, 2.5),
        # a young one keeps 2/11, 3/12 and 4/13 instead of 0.999 each
        ({"decay": 0.999}, 3, 4 / 13 * (3 / 12 * (9 / 11) + 9 / 12 * 2) + 9 / 13 * 3),
        # 2/11 is below a decay of 0.2, 3/12 above it
        ({"decay": 0.2}, 2, 0.2 * (9 / 11) + 0.8 * 2),
    ],
)
def test_the_average_follows_its_recursion(
    options: dict[str, Any], steps: int, average: float, tmp_path: Path
) -> None:
    ema, module = EMA(**options), ToyPolicy()
    trainer(tmp_path, ema).fit(module, batches(steps))
    assert shadow(ema) == pytest.approx(average)
    assert module.weight == steps


def test_the_average_of_low_precision_weights_is_kept_in_float32(tmp_path: Path) -> None:
    # in bfloat16 1 + 0.001 * 1 would stay 1
    module = ToyPolicy()
    module.policy.bfloat16()
    ema = EMA(decay=0.999, warmup=False)
    trainer(tmp_path, ema).fit(module, batches(1))
    assert ema.shadows["policy.trained"].dtype == torch.float32
    assert shadow(ema) == pytest.approx(0.001)


@pytest.mark.parametrize(("validate", "seen"), [(True, [0.5, 1.25]), (False, [1.0, 2.0])])
def test_validation_sees_the_average_and_training_goes_on_with_the_weights(
    tmp_path: Path, validate: bool, seen: list[float]
) -> None:
    module, ema = ToyPolicy(), EMA(decay=0.5, warmup=False, validate=validate)
    trainer(tmp_path, ema, val_check_interval=1).fit(module, batches(2), batches(1))
    assert module.validated_weights == seen
    assert module.weight == 2.0


def test_the_weights_come_back_when_validation_raises(tmp_path: Path) -> None:
    module = ToyPolicy(fail_in_validation=True)
    with pytest.raises(RuntimeError, match="no more memory"):
        trainer(tmp_path, EMA(decay=0.5, warmup=False)).fit(module, batches(2), batches(1))
    assert module.validated_weights == [1.25]
    assert module.weight == 2.0


def test_the_weights_come_back_when_an_export_raises_and_no_checkpoint_holds_the_stand_in() -> None:
    module, ema = ToyPolicy(), EMA()
    ema.load_state_dict({"shadows": {"policy.trained": torch.tensor([4.0])}, "step": 1})
    with ema.averaged(module), pytest.raises(RuntimeError, match="stand in"):
        ema.state_dict()
    with pytest.raises(ValueError, match="stopped at 4"), ema.averaged(module):
        raise ValueError(f"stopped at {module.weight:g}")
    assert module.weight == 0.0


def test_a_resumed_run_has_the_average_of_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, first, resumed = (EMA(decay=0.75, warmup=False, every_n_steps=2) for _ in range(3))
    trainer(tmp_path, whole, max_epochs=2).fit(ToyPolicy(), batches(3))
    module = resume(tmp_path, first, resumed, steps=3)()
    # weights 2, 4, 6 with decay 0.75 from 0: 0.5, then 0.375 + 1 = 1.375, then 1.03125 + 1.5
    assert shadow(whole) == shadow(resumed) == 2.53125
    assert module.weight == 6.0


def test_a_checkpoint_of_another_model_is_named(tmp_path: Path) -> None:
    ema = EMA()
    ema.load_state_dict({"shadows": {"policy.lora": torch.zeros(1)}, "step": 1})
    with pytest.raises(ValueError, match=r"only the checkpoint has 'policy\.lora'"):
        trainer(tmp_path, ema).fit(ToyPolicy(), batches(1))
    ema.load_state_dict({"shadows": {"policy.trained": torch.zeros(2)}, "step": 1})
    with pytest.raises(ValueError, match=r"shape \(2,\) in the checkpoint and \(1,\) in the model"):
        trainer(tmp_path, ema).fit(ToyPolicy(), batches(1))


def test_only_the_adapter_of_a_lora_policy_is_averaged(language_model: PreTrainedModel) -> None:
    module = ToyPolicy()
    module.policy = get_peft_model(language_model, LoraConfig(r=2, target_modules=["q_proj"]))
    names = trainable_weights(module)
    # two layers, each with A and B
    assert len(names) == 4
    assert all("lora_" in name for name in names)


def test_a_backbone_that_two_models_share_is_averaged_once() -> None:
    class Shared(ToyPolicy):
        def trainable_models(self) -> dict[str, nn.Module]:
            return {"policy": self.policy, "critic": self.policy}

    assert list(trainable_weights(Shared())) == ["policy.trained"]
