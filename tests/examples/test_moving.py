"""The configs that are translated from other libraries train a step, with tiny models."""

import json
from pathlib import Path

import numpy as np
import pytest

from lrlhf.cli import run
from tests.apps.serve.conftest import Listening, listening
from tests.vlms import picture, save_vlm

__all__ = ["listening"]  # the fixture

FOLDER = Path(__file__).parents[2] / "examples" / "moving"
VISION = FOLDER / "lightrft_ppo_vl.yaml"
CONFIGS = sorted({*FOLDER.glob("*.yaml")} - {VISION})
SMALL = [
    "--model.engine=null",
    "--model.update.minibatch_size=4",
    "--model.sampling.max_new_tokens=4",
    "--data.batch_size=4",
    "--data.max_prompt_tokens=200",
    "--trainer.fast_dev_run=true",
    "--trainer.callbacks=null",
    "--trainer.accelerator=cpu",
    "--trainer.devices=1",
    "--trainer.strategy=auto",
    "--trainer.precision=32-true",
]
LEARNED = [
    "--model.rewards.functions=[length.length]",
    "--model.critic.model.source={model}",
    "--model.critic.optimizer.lr=1e-4",
]


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_a_translated_config_trains(
    config: Path, model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("length.py").write_text(
        "def length(completions):\n    return [float(len(c)) for c in completions]\n"
    )
    rows = [
        {"question": f"{n} + 1?", "answer": f"#### {n + 1}",
         "context_messages": [{"role": "user", "content": f"{n} + 1?"}]}
        for n in range(8)
    ]  # fmt: skip
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [*SMALL, f"--model.policy.source={model_folder}", "--data.train=rows.jsonl"]
    text = config.read_text(encoding="utf-8")
    flags += ["--data.val=rows.jsonl"] if "val:" in text else []
    flags += ["--data.system_prompt=null"] if "system_prompt:" in text else []
    flags += [flag.format(model=model_folder) for flag in LEARNED if "LearnedReward" in text]
    assert run(["fit", f"--config={config}", *flags]) == 0


@pytest.mark.slow
def test_a_translated_ppo_shows_its_reward_service_the_images(
    listening: Listening, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[tuple[list[np.ndarray], str]] = []

    def service(completions: list[object], images: list[list[object]], answer: list[str]) -> object:
        seen.extend(zip(([*map(np.asarray, own)] for own in images), answer, strict=True))
        return [float(len(str(text))) for text in completions]

    url = listening(service).url
    save_vlm("qwen2_vl", "vlm")
    rows = []
    for n in range(4):
        picture(n).save(f"{n}.png")
        rows.append({"prompt": "what? <image>", "images": [f"{n}.png"], "answer": str(n)})
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [*SMALL, "--model.policy.source=vlm", "--model.critic.model.source=vlm"]
    flags += ["--data.train=rows.jsonl", f"--model.rewards.functions.service.urls={url}"]
    assert run(["fit", f"--config={VISION}", *flags]) == 0
    assert len(seen) == 8
    for images, answer in seen:
        assert [np.array_equal(one, picture(int(answer))) for one in images] == [True]
