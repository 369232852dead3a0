"""``lrlhf validate`` with vLLM: the same examples as with the policy itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import PreTrainedTokenizerBase

from lrlhf.cli import run
from lrlhf.models import save_model
from tests.cli.experiment import experiment
from tests.vllm.models import build_policy

VLLM = {
    "class_path": "VLLMEngine",
    "init_args": {"max_model_len": 128, "kv_cache_gib": 0.05},
}


def test_an_export_answers_with_vllm_as_with_transformers(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # another one than the config names, so that the weights must reach the engine
    for name, seed in (("policy", 0), ("export", 5)):
        save_model(build_policy(tokenizer, seed=seed), Path(name), tokenizer)
    rows = [{"prompt": f"what is {n} + 1? ", "answer": str(n + 1)} for n in range(6)]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def examples(folder: str, *callbacks: str, **engine: Any) -> list[dict[str, Any]]:
        config = experiment(
            "RLOO",
            {
                "policy": "policy",
                "eval_sampling": {"max_new_tokens": 12, "temperature": 0.0},
                **engine,
            },
            {"train": "rows.jsonl", "val": "rows.jsonl", "batch_size": 2, "val_batch_size": 3},
            reward="tests.modules.policy_runs.letters",
            default_root_dir=folder,
            callbacks=[{"class_path": name} for name in ("EvalJSONL", *callbacks)],
        )
        Path("run.yaml").write_text(yaml.safe_dump(config))
        assert run(["validate", "--config", "run.yaml", "--ckpt_path", "export"]) == 0
        text = Path(folder, "validate/export/eval_scores_0.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    expected = examples("own")
    found = examples("vllm", "VLLMWeightSync", engine=VLLM)
    kept = ("prompt", "completion", "token_ids", "finish_reason", "score", "temperature")
    assert [[line[name] for name in kept] for line in found] == [
        [line[name] for name in kept] for line in expected
    ]
    assert len({line["completion"] for line in found}) > 1
