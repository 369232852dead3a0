"""The configs that are translated from other libraries train a step, with tiny models."""

import json
from pathlib import Path

import pytest

from lrlhf.cli import run

CONFIGS = sorted((Path(__file__).parents[2] / "examples" / "moving").glob("*.yaml"))
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
