"""A policy of the size of Llama 3 70B on 64 GPUs of 80 GB, as `lrlhf plan` sees it."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import LlamaConfig

from lrlhf.apps.plan.dry_run import Usage
from lrlhf.apps.plan.strategy_shares import OptimizerNeeds, strategy_of, weights_of
from lrlhf.cli import run
from lrlhf.models import CausalLM
from lrlhf.models.loading.meta import skeleton
from tests.cli.experiment import experiment

GIB = 2**30
HIDDEN, INNER, LAYERS, VOCABULARY, KEYS = 8192, 28672, 80, 128256, 1024
# queries and output, keys and values, three matrices of the MLP, two norms
BLOCK = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * INNER + 2 * HIDDEN
# embeddings, output head and the last norm
AROUND = 2 * VOCABULARY * HIDDEN + HIDDEN
NUMBER = LAYERS * BLOCK + AROUND


@pytest.fixture
def llama(tmp_path: Path) -> str:
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=64,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def _trainer(**options: Any) -> dict[str, Any]:
    strategy = {"class_path": "FSDP2", "init_args": options}
    return {"strategy": strategy, "precision": "bf16-mixed"}


@pytest.mark.parametrize(
    ("options", "device", "copies", "whole"),
    [
        ({}, 80 * GIB, 1, False),
        ({}, None, 1, True),  # a device of unknown size
        ({"reduce_each_micro_batch": False}, 80 * GIB, 1, True),
        ({"shard_group": 16}, 80 * GIB, 4, False),
    ],
)
def test_each_rank_keeps_its_part_of_the_gradients_where_whole_ones_do_not_fit(
    options: dict[str, Any], device: int | None, copies: int, whole: bool, llama: str
) -> None:
    model = skeleton(CausalLM(source=llama))
    weights = weights_of(model, model)
    assert weights.trained.number == NUMBER == 70_553_706_496
    strategy = strategy_of(_trainer(**options), 64, device)
    assert strategy is not None

    shares = strategy.shares(weights, OptimizerNeeds(states=2.0), accumulates=True)

    own = 4 * NUMBER * copies / 64  # float32
    # between blocks: embeddings, head and a block in 16 bits, and the block's copy in 32
    passing = 2 * AROUND + 2 * BLOCK + 4 * BLOCK
    assert shares.gradients == pytest.approx(own + (4 * NUMBER if whole else passing), rel=1e-6)
    expected = Usage(parameters=round(own), optimizer=round(2 * own))
    assert tuple(shares.resident) == pytest.approx(tuple(expected), rel=1e-6)
    assert shares.gathered == pytest.approx(2 * AROUND + 4 * BLOCK, rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_70_billion_weights_fit_on_64_gpus(
    llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, new, prompt = 8, 2048, 2048
    model = {
        "policy": llama,
        "num_generations": rows,
        "sampling": {"max_new_tokens": new},
        "engine": {"class_path": "VLLMServerEngine", "init_args": {"max_model_len": 4096}},
    }
    data = {"train": "none.jsonl", "batch_size": 4, "max_prompt_tokens": prompt}
    trainer = {"strategy": "fsdp2", "accelerator": "gpu", "devices": 8, "num_nodes": 8}
    config = experiment("RLOO", model, data, reward="exact_match", **trainer)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))

    flags = ["--gpus", "64", "--gpu-memory", "80"]
    assert run(["plan", "--config", str(tmp_path / "run.yaml"), *flags]) == 0

    shown = capsys.readouterr().out
    assert "every phase fits into 72.0 GiB, 90% of each GPU" in shown
    assert "gradient_checkpointing is auto: on" in shown
    assert "update.micro_batch_tokens is auto: it begins with 2048 tokens" in shown
    # 4 x 70.6 billion bytes
    assert "fsdp2 reduces gradients of 263 GiB, if whole, with each micro-batch" in shown
    (update,) = [line.split("|") for line in shown.splitlines() if "| update policy" in line]
    parameters, gradients, optimizer, activations = map(float, update[2:6])
    # policy and reference, and what is gathered in 16 bits
    gathered = 2 * AROUND + 4 * BLOCK
    assert parameters == pytest.approx((2 * 4 * NUMBER / 64 + gathered) / GIB, rel=0.01)
    own = 4 * NUMBER / 64
    assert gradients == pytest.approx((own + 2 * AROUND + 6 * BLOCK) / GIB, rel=0.01)
    assert optimizer == pytest.approx(2 * own / GIB, rel=0.01)
    # what each of 80 blocks begins with is kept, in 16 bits
    kept = LAYERS * (prompt + new) * HIDDEN * 2 / GIB
    assert kept == 5.0
    assert kept < activations < kept + 6
