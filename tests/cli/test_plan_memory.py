"""`lrlhf plan` tells the memory of a run from the config of its model alone."""

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from transformers import BertConfig, LlamaConfig

from lrlhf.apps.plan.dry_run import DryRun, Shape
from lrlhf.apps.plan.strategy_shares import (
    OptimizerNeeds,
    Strategy,
    WeightCount,
    Weights,
    optimizer_needs,
    strategy_of,
    weights_of,
)
from lrlhf.cli import run
from lrlhf.models import CausalLM, sequence_logprobs
from lrlhf.models.loading.meta import skeleton
from tests.cli.experiment import experiment

HIDDEN, INNER, LAYERS, VOCABULARY = 32, 64, 2, 512
# per layer: queries and output 32x32, keys and values 32x16, three matrices 32x64, two norms of 32
BLOCK = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
# embeddings and output head, the last norm, and the 4 frequencies of the positions (head size 8)
NUMBER = LAYERS * BLOCK + 2 * VOCABULARY * HIDDEN + HIDDEN
MIB = 2**20


@pytest.fixture
def config_only(tmp_path: Path) -> str:
    """A folder with a config and no weights: there is nothing that could be loaded."""
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    ).save_pretrained(tmp_path / "model")
    return "model"


def _config(source: str, **options: Any) -> dict[str, Any]:
    data = {"train": "none.jsonl", "batch_size": 2, "max_prompt_tokens": 48}
    given = {"policy": {"source": source}, "sampling": {"max_new_tokens": 16}, **options}
    return experiment("RLOO", {"num_generations": 4, **given}, data, reward="exact_match")


def _planned(
    capsys: pytest.CaptureFixture[str], config: dict[str, Any], *flags: str
) -> tuple[dict[str, dict[str, str]], str]:
    """Cells of the memory table by line and heading, and all that was printed."""
    Path("config.yaml").write_text(yaml.safe_dump(config))
    assert run(["plan", "--config", "config.yaml", *flags]) == 0
    shown = capsys.readouterr().out
    tables = [part for part in shown.split("\n\n") if part.startswith("| memory per process, MiB")]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in "".join(tables).splitlines()
    ]
    return {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}, shown


def test_weights_gradients_and_states_are_counted_from_the_config(
    config_only: str, capsys: pytest.CaptureFixture[str]
) -> None:
    table, _ = _planned(capsys, _config(config_only))

    step = table["optimizer step of policy"]
    # policy and reference in float32; AdamW keeps two numbers per weight, and fused needs no more
    # for the duration of its step
    assert float(step["parameters"]) == pytest.approx(2 * 4 * NUMBER / MIB, abs=0.011)
    assert float(step["gradients"]) == pytest.approx(4 * NUMBER / MIB, abs=0.011)
    assert float(step["optimizer"]) == pytest.approx(8 * NUMBER / MIB, abs=0.011)
    # 8 responses of 64 tokens, 2 of them key and value, for 2 heads of size 8 in 2 layers: without
    # the token that is being drawn
    cache = 8 * 63 * 2 * 2 * 8 * LAYERS * 4
    assert float(table["generate: last token"]["KV cache"]) == pytest.approx(cache / MIB, abs=0.011)


def test_adapters_need_no_reference_and_gpus_split_what_the_strategy_splits(
    config_only: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = _config(config_only, policy={"source": config_only, "lora": {"r": 2}})
    config["trainer"]["strategy"] = "fsdp2"

    table, shown = _planned(capsys, config, "--gpus", "4", "--gpu-memory", "0.0001")

    assert "| processes       |      4 | --gpus" in shown
    assert "| prompts                      |      8 |" in shown  # 4 x 2
    step = table["optimizer step of policy"]
    # r x (inputs + outputs) of the 7 linear layers of each block
    adapters = 2 * LAYERS * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 64))
    assert float(step["parameters"]) == pytest.approx(4 * (NUMBER + adapters) / 4 / MIB, abs=0.011)
    assert float(step["gradients"]) == pytest.approx(4 * adapters / 4 / MIB, abs=0.011)
    # what is on already is no advice
    assert "(now 224), gradient_checkpointing, dtype: bfloat16, or more GPUs\n" in shown


def test_a_process_holds_its_part_of_an_engine_that_it_shares(
    config_only: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = {
        "class_path": "lrlhf.rollout.VLLMEngine",
        "init_args": {"tensor_parallel_size": 2, "kv_cache_gib": 0.25},
    }

    table, _ = _planned(capsys, _config(config_only, engine=engine), "--gpus", "2")

    # policy and reference whole, half of vLLM's copy, all in float32
    generate = table["generate (vLLM)"]
    assert float(generate["parameters"]) == pytest.approx(2.5 * 4 * NUMBER / MIB, abs=0.011)
    assert float(generate["KV cache"]) == 256


def test_what_does_not_fit_is_marked_and_fits_with_less_of_the_option_that_is_named(
    config_only: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # 16 responses of 64 tokens
    flags = ["--gpu-memory", "0.004", "--data.batch_size", "4"]
    table, shown = _planned(capsys, _config(config_only), *flags)
    assert table["update policy"]["fits"] == "NO"
    assert table["optimizer step of policy"]["fits"] == "yes"
    assert "does not fit into 0.0 GiB, 90% of each GPU: " in shown
    assert "gradient_checkpointing, lora, " in shown
    assert "update.micro_batch_tokens (now " in shown

    table, _ = _planned(
        capsys, _config(config_only), *flags, "--model.update.micro_batch_tokens=128"
    )

    assert table["update policy"]["fits"] == "yes"


@pytest.mark.usefixtures("config_only")
@pytest.mark.parametrize(
    ("source", "strategy", "last"),
    [
        ("./gone", "auto", "no memory table: source './gone': no such file"),
        ("model", "xla", "no memory table: it is unknown what 'xla' keeps on each process"),
    ],
)
def test_what_cannot_be_told_leaves_the_batch_plan(
    capsys: pytest.CaptureFixture[str], source: str, strategy: str, last: str
) -> None:
    config = _config(source)
    config["trainer"]["strategy"] = strategy

    _, shown = _planned(capsys, config)

    assert "| prompts " in shown
    assert shown.splitlines()[-1].startswith(last)


def test_a_reward_model_that_is_not_there_yet_is_not_counted(
    config_only: str, capsys: pytest.CaptureFixture[str]
) -> None:
    learned = {"class_path": "LearnedReward", "init_args": {"source": "runs/first/export/final"}}
    functions = {"functions": {"preference": learned}}
    rewards = {"rewards": {"class_path": "Rewards", "init_args": functions}}
    _, shown = _planned(capsys, _config(config_only, **rewards))
    assert (
        "not counted: the model of reward 'preference', which cannot be read: source "
        "'runs/first/export/final': no such file or folder." in shown.splitlines()
    )


def test_gradients_count_from_when_each_is_complete(config_only: str) -> None:
    model = skeleton(CausalLM(source=config_only))
    # a short text needs most when the embedding's gradient comes up, behind all others
    usage = DryRun("bf16-mixed", casts_weights=False).update(
        model,
        lambda batch: sequence_logprobs(model, batch).sum(),
        Shape(rows=1, tokens=2),
        accumulates=False,
    )
    assert usage.gradients == 4 * (NUMBER - VOCABULARY * HIDDEN)


# 1000 weights in float32: 800 in 4 blocks of 200, and 200 around them
MODEL = Weights(
    WeightCount(1000, 4000), WeightCount(), WeightCount(200, 800), WeightCount(200, 800)
)
ADAMW = OptimizerNeeds(states=2.0, step=1.0)


@pytest.mark.parametrize(
    ("strategy", "parameters", "gradients", "states"),
    [
        # the table of Rajbhandari et al. 2020, figure 1: 2, 2 and 12 bytes per weight, of which 4
        # are the weights in full precision that stand here under parameters; 4 ranks; a bucket
        # holds all gradients of so small a model
        ({"kind": "zero", "stage": 1}, 2000 + 1000, 2000, 2000),
        ({"kind": "zero", "stage": 2}, 3000, 500 + 2000, 2000),
        ({"kind": "zero", "stage": 3}, 500 + 1000, 2500, 2000),
        ({"kind": "zero", "stage": 2, "offloads_optimizer": True}, 2000, 2500, 0),
        ({"kind": "fsdp2", "ranks": 2}, 2000, 6000, 4000),
        ({"kind": "fsdp2", "offloads_weights": True}, 0, 4000, 0),
        ({"buckets": True}, 4000, 4000 + 4000, 8000),
    ],
)
def test_each_strategy_keeps_its_share(
    strategy: dict[str, Any], parameters: int, gradients: int, states: int
) -> None:
    options = {"ranks": 4, "low_precision": True, **strategy}
    shares = Strategy(**options).shares(MODEL, ADAMW, accumulates=True)

    resident = shares.resident
    assert resident.parameters == parameters
    assert resident.gradients + shares.gradients == gradients
    assert (resident.optimizer, shares.step) == (states, states // 2)


def test_split_weights_are_gathered_block_by_block_or_whole_to_generate() -> None:
    strategy = Strategy(kind="fsdp2", ranks=4, low_precision=True)

    shares = strategy.shares(MODEL, ADAMW, accumulates=False)

    assert shares.gathered == 2 * (200 + 2 * 200)  # in 16 bits: the rest and two blocks
    assert shares.gathered_to_generate == 2000


def test_strategies_are_read_by_name_or_class() -> None:
    def read(strategy: Any) -> Any:
        return strategy_of({"strategy": strategy, "precision": "bf16-mixed"}, 8)

    by_class = {"class_path": "lrlhf.strategies.FSDP2", "init_args": {"shard_group": 2}}
    assert read(by_class) == Strategy(kind="fsdp2", ranks=2, low_precision=True)
    zero = {"class_path": "lrlhf.strategies.DeepSpeed", "init_args": {"stage": 3}}
    assert read(zero) == Strategy(kind="zero", ranks=8, stage=3, low_precision=True)
    assert read("deepspeed_zero1").stage == 1
    assert read("ddp_find_unused_parameters_true").buckets
    view = {"class_path": "DDPStrategy", "init_args": {"gradient_as_bucket_view": True}}
    assert not read(view).buckets
    assert read("fsdp") is None


def test_an_optimizer_is_asked_what_it_keeps() -> None:
    # fused where nothing is said
    for on_gpu in (True, False):
        assert optimizer_needs({}, on_gpu=on_gpu) == OptimizerNeeds(2.0)
    assert optimizer_needs({"fused": False}, on_gpu=True) == OptimizerNeeds(2.0, 1.0)
    momentum = {"optimizer_class": "torch.optim.SGD", "optimizer_options": {"momentum": 0.9}}
    assert optimizer_needs(momentum, on_gpu=False).states == 1.0


def test_ddp_holds_the_gradients_twice_as_measured() -> None:
    model = nn.Linear(512, 512, bias=False)
    weights = weights_of(model)
    torch.distributed.init_process_group(
        "gloo",
        store=torch.distributed.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
        timeout=datetime.timedelta(seconds=20),
    )
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            wrapped = DistributedDataParallel(model)
            wrapped(torch.ones(1, 512)).sum().backward()
        changes = [
            event.nbytes()
            for event in recorded.profiler.kineto_results.events()
            if event.name() == "[memory]"
        ]
    finally:
        torch.distributed.destroy_process_group()

    shares = Strategy(buckets=True).shares(weights, OptimizerNeeds(), accumulates=False)
    predicted = shares.resident.gradients + shares.gradients
    assert sum(changes) == pytest.approx(predicted, rel=0.15)


def test_inputs_of_blocks_in_main_memory_are_counted_for_one_block_at_a_time(
    tmp_path: Path,
) -> None:
    layers, hidden, rows, tokens = 12, 64, 4, 256
    LlamaConfig(
        vocab_size=32,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
    ).save_pretrained(tmp_path)

    def activations(*, offloads: bool) -> int:
        spec = CausalLM(source=str(tmp_path), gradient_checkpointing=True)
        model = skeleton(spec)
        usage = DryRun("32", casts_weights=False).update(
            model,
            lambda batch: sequence_logprobs(model, batch).sum(),
            Shape(rows=rows, tokens=tokens),
            accumulates=True,
            offloads=offloads,
        )
        return usage.activations

    of_one = rows * tokens * hidden * 4
    saved = activations(offloads=False) - activations(offloads=True)
    # of 12 in float32 at the peak; that of the block at hand is there either way
    assert (layers - 2) * of_one <= saved <= layers * of_one


def test_on_a_gpu_it_plans_what_a_run_chooses_by_itself(
    config_only: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def planned(update: dict[str, Any], **trainer: Any) -> tuple[dict[str, dict[str, str]], str]:
        options = {"num_generations": 64, "update": update}
        config = _config(config_only, **options)
        config["trainer"] |= {"accelerator": "gpu", **trainer}
        return _planned(capsys, config)

    automatic, shown = planned({})
    # 2 prompts of 48 tokens with 64 responses of 16 would be 2,144 tokens at once
    assert "update.micro_batch_tokens is auto: it begins with 2048 tokens" in shown
    assert automatic == planned({"micro_batch_tokens": 2048}, precision="bf16-mixed")[0]
    assert automatic != planned({"micro_batch_tokens": None}, precision="bf16-mixed")[0]
    assert automatic != planned({"micro_batch_tokens": 2048}, precision="32-true")[0]


@pytest.mark.parametrize(("own", "limit"), [({}, 40), ({"max_tokens": 24}, 24)])
def test_a_reward_model_that_reads_less_than_a_run_writes_is_counted_with_what_it_reads(
    config_only: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    own: dict[str, int],
    limit: int,
) -> None:
    BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=40,
    ).save_pretrained("encoder")
    learned = {"class_path": "LearnedReward", "init_args": {"source": "encoder", **own}}
    functions = {"functions": {"preference": learned}}
    rewards = {"rewards": {"class_path": "Rewards", "init_args": functions}}

    table, shown = _planned(capsys, _config(config_only, **rewards))

    assert "score responses: preference" in table
    # prompts of 48 tokens and responses of 16
    assert f"reward 'preference' reads at most {limit} tokens: a prompt and response may" in shown
    assert not caplog.records


def test_torch_does_not_log_what_it_raises(caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(nn.Module):
        def forward(self, batch: Any) -> Any:
            return torch.zeros(2, 3).expand(2, batch.input_ids.shape[1])

    model = Wrong()
    with pytest.raises(RuntimeError, match="expanded size"):
        DryRun(None, casts_weights=False).forward(model, model, Shape(2, 5))
    assert not caplog.records
