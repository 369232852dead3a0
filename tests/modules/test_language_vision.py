"""`SFT` and `DPO` of models that are shown images, each row as if it were alone."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lrlhf.datamodules import (
    PreferenceDataModule,
    SupervisedDataModule,
    UnpairedPreferenceDataModule,
)
from lrlhf.modules import DPO, KTO, SFT, OptimizerConfig
from tests.modules.language_runs import SGD, weights
from tests.modules.reward_runs import trainer
from tests.vlms import build_vlm

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def draw(folder: Path, seed: int) -> str:
    pixels = np.random.RandomState(seed).randint(0, 256, (32 + 16 * seed, 48, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / f"{seed}.png")
    return f"{seed}.png"


def write(folder: Path, answers: dict[str, str]) -> Path:
    rows = [
        {"prompt": [{"role": "user", "content": f"what is {number}?"}], "image": name} | answers
        for number, name in enumerate([draw(folder, 0), draw(folder, 1), None])
    ]
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps({k: v for k, v in r.items() if v}) for r in rows))
    return path


@pytest.mark.parametrize("family", ["qwen2_vl", "idefics3"])
def test_sft_with_images_in_one_step_or_in_micro_batches(family: str, tmp_path: Path) -> None:
    path = write(tmp_path, {"completion": "seven"})
    moved = []
    for limit in (None, 1):
        vlm = build_vlm(family)
        module = SFT(
            vlm.model,
            tokenizer=vlm.tokenizer,
            processor=vlm.processor.processor,
            micro_batch_tokens=limit,
            optimizer=SGD,
        )
        before = weights(module)
        data = SupervisedDataModule(str(path), batch_size=3, val=str(path))
        run = trainer(tmp_path)
        run.fit(module, data)
        assert float(run.callback_metrics["train/tokens"]) == 3 * len("seven??")
        moved.append({name: before[name] - weight for name, weight in weights(module).items()})
    encoder = [name for name in moved[0] if "vision" in name or "visual" in name]
    assert any(moved[0][name].any() for name in encoder)
    for name, value in moved[0].items():
        torch.testing.assert_close(moved[1][name], value, rtol=1e-4, atol=1e-5)


def test_dpo_with_images(tmp_path: Path) -> None:
    path = write(tmp_path, {"chosen": "seven", "rejected": "eight"})
    vlm = build_vlm("qwen2_vl")
    module = DPO(
        vlm.model, tokenizer=vlm.tokenizer, processor=vlm.processor.processor, optimizer=SGD
    )
    run = trainer(tmp_path, max_epochs=2)
    run.fit(module, PreferenceDataModule(str(path), batch_size=3, val=str(path)))
    assert float(run.callback_metrics["eval/accuracy"]) == 1.0
    assert float(run.callback_metrics["eval/margin"]) > 0


def test_kto_with_images_in_one_step_or_in_micro_batches(tmp_path: Path) -> None:
    path = write(tmp_path, {"chosen": "seven", "rejected": "eight"})
    moved = []
    for limit in (None, 1):
        vlm = build_vlm("qwen2_vl")
        module = KTO(
            vlm.model,
            tokenizer=vlm.tokenizer,
            processor=vlm.processor.processor,
            micro_batch_tokens=limit,
            beta=0.5,
            optimizer=OptimizerConfig(lr=0.1, optimizer_class="torch.optim.SGD", warmup_steps=0),
        )
        before = weights(module)
        run = trainer(tmp_path, max_epochs=2)
        data = UnpairedPreferenceDataModule(str(path), batch_size=6, val=str(path))
        run.fit(module, data)
        # the second step has moved away from the reference, and looks at mismatched pairs
        assert float(run.callback_metrics["rewards/margin"]) > 0
        assert float(run.callback_metrics["eval/auroc"]) > 0.8
        moved.append({name: before[name] - weight for name, weight in weights(module).items()})
    assert any(moved[0][name].any() for name in moved[0] if "visual" in name)
    for name, value in moved[0].items():
        torch.testing.assert_close(moved[1][name], value, rtol=1e-4, atol=1e-5)
