"""What `lrlhf plan` says of memory is what `lrlhf fit` then uses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from lrlhf.cli import run
from tests.cli.experiment import experiment

TOLERANCE = 0.15
"""Predicted and measured peaks differ by no more than this share, as docs/memory.md promises."""

PROMPT, NEW = 120, 16
PROBE = {"class_path": "tests.cli.memory_probe.MemoryProbe", "init_args": {"path": "peaks.json"}}
PROBED: dict[str, Any] = {"max_steps": 2, "callbacks": [PROBE]}
BYTES = {"GiB": 2**30, "MiB": 2**20}


@pytest.fixture
def model_folder(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> str:
    """A Llama of 1.6 million weights, whose activations are the larger part of what is used."""
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    folder = tmp_path / "llama"
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def _write(name: str, rows: list[dict[str, str]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def _predicted(capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    """Bytes by phase, as the printed table has them."""
    assert run(["plan", "--config", "config.yaml"]) == 0
    shown = capsys.readouterr().out
    table = next(part for part in shown.split("\n\n") if part.startswith("| memory per process"))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    unit = BYTES[cells[0][0].rpartition(", ")[2]]
    return {line[0]: float(line[-1]) * unit for line in cells[2:]}


def _measured() -> dict[str, int]:
    # with one thread there is one set of the kernels' buffers
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert run(["fit", "--config", "config.yaml"]) == 0
    finally:
        torch.set_num_threads(threads)
    peaks: dict[str, int] = json.loads(Path("peaks.json").read_text())
    return peaks


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "all weights, a critic, micro-batches": (
        "PPO",
        {
            "critic": {"model": "FOLDER"},
            "reference": {"kl_coef": 0.0},
            "update": {"micro_batch_tokens": 4 * (PROMPT + NEW)},
        },
    ),
    "adapters, recomputed activations": (
        "RLOO",
        {
            "policy": {"source": "FOLDER", "lora": {"r": 8}, "gradient_checkpointing": True},
            "update": {"logprob_chunk": 128},
        },
    ),
}


@pytest.mark.filterwarnings("ignore")  # Lightning's advice about a run this small
@pytest.mark.parametrize("name", CASES)
def test_phases_of_a_policy_need_what_was_predicted(
    name: str, model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module, options = CASES[name]
    # one byte is one token; lengths differ, as they do outside of tests, so masks are needed
    rows = [{"prompt": f"{index:03d}".ljust(PROMPT - index % 3, "x")} for index in range(8)]
    _write("prompts.jsonl", rows)
    data = {"train": "prompts.jsonl", "batch_size": 4, "max_prompt_tokens": PROMPT}
    given = {"policy": "FOLDER", "num_generations": 4, "sampling": {"max_new_tokens": NEW}}
    reward = "tests.cli.memory_probe.long_is_good"
    config = experiment(module, {**given, **options}, data, reward=reward, **PROBED)
    Path("config.yaml").write_text(json.dumps(config).replace("FOLDER", model_folder))

    predicted, measured = _predicted(capsys), _measured()

    for phase, lines in {
        "generate": ("generate",),
        "logprob": ("log-probabilities", "values"),
        "update": ("update", "optimizer step"),
    }.items():
        most = max(size for line, size in predicted.items() if line.startswith(lines))
        assert most == pytest.approx(measured[phase], rel=TOLERANCE), phase


def test_a_bonus_that_a_callback_raises_is_counted(
    model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _write("prompts.jsonl", [{"prompt": f"{index}"} for index in range(8)])
    data = {"train": "prompts.jsonl", "batch_size": 4, "max_prompt_tokens": PROMPT}
    given = {"policy": model_folder, "num_generations": 4, "sampling": {"max_new_tokens": NEW}}
    control = {"class_path": "lrlhf.callbacks.EntropyControl", "init_args": {"target": 0.3}}
    sizes = []
    for bonus, callbacks in ((0.0, None), (0.01, None), (0.0, [control])):
        config = experiment(
            "RLOO",
            {**given, "update": {"entropy_coef": bonus}},
            data,
            reward="tests.cli.memory_probe.long_is_good",
            callbacks=callbacks,
        )
        Path("config.yaml").write_text(json.dumps(config))
        predicted = _predicted(capsys)
        sizes.append(next(size for line, size in predicted.items() if line.startswith("update")))
    without, with_bonus, steered = sizes
    assert without < with_bonus == steered


@pytest.mark.filterwarnings("ignore")  # Lightning's advice about a run this small
@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("RewardModel", {"model": {"source": "FOLDER"}}),
        ("DPO", {"policy": "FOLDER"}),
        ("DPO", {"policy": "FOLDER", "precompute_reference": True}),
        ("DPO", {"policy": {"source": "FOLDER", "lora": {"r": 8}}, "logprob_chunk": 128}),
        ("KTO", {"policy": "FOLDER"}),
    ],
    ids=["reward model", "DPO", "DPO, reference beforehand", "DPO, adapters", "KTO"],
)
def test_a_step_on_pairs_needs_what_was_predicted(
    module: str, options: dict[str, Any], model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = PROMPT + NEW
    rows = [
        {
            "prompt": f"{index:02d}".ljust(20, "p"),
            # the end-of-sequence token comes behind
            "chosen": f"{index:03d}".ljust(tokens - 21 - index % 3, "c"),
            "rejected": f"{index:03d}".ljust(tokens - 31, "r"),
        }
        for index in range(16)
    ]
    _write("pairs.jsonl", rows)
    data = {"train": "pairs.jsonl", "batch_size": 8, "max_tokens": tokens}
    given = json.loads(json.dumps(options).replace("FOLDER", model_folder))
    config = experiment(module, given, data, **PROBED)
    Path("config.yaml").write_text(json.dumps(config))

    predicted, measured = _predicted(capsys), _measured()

    assert max(predicted.values()) == pytest.approx(measured["step"], rel=TOLERANCE)


@pytest.mark.filterwarnings("ignore")  # Lightning's advice about a run this small
@pytest.mark.parametrize("budget", ["auto", 4 * (PROMPT + NEW)])
def test_a_step_on_texts_needs_what_was_predicted(
    budget: str | int, model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = PROMPT + NEW
    rows = [{"text": f"{index:03d}".ljust(tokens - 1 - index % 3, "t")} for index in range(32)]
    _write("texts.jsonl", rows)
    data = {"train": "texts.jsonl", "batch_size": 16, "max_tokens": tokens}
    given = {"policy": model_folder, "micro_batch_tokens": budget}
    Path("config.yaml").write_text(json.dumps(experiment("SFT", given, data, **PROBED)))

    predicted, measured = _predicted(capsys), _measured()

    assert max(predicted.values()) == pytest.approx(measured["step"], rel=TOLERANCE)
