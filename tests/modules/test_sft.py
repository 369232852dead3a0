"""`SFT`: the loss is the mean over the trained tokens of a step, and nothing else changes it."""

import json
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lrlhf.callbacks import EvalJSONL
from lrlhf.cli.export_command import fill
from lrlhf.datamodules import PreferenceDataModule, SupervisedDataModule
from lrlhf.models import CausalLM, LoRA, allow_packing, packs
from lrlhf.modules import DPO, SFT, Guard, OptimizerConfig, replay_dump
from lrlhf.modules.sft import _named
from tests.conftest import build_language_model
from tests.modules.language_runs import SGD, Row, fit, gradients, loader, texts, weights
from tests.modules.reward_runs import trainer

ROWS: list[Row] = [
    ((5, 6, 7), (8, 9, 1)),
    ((10,), (11, 12, 13, 14, 1)),
    ((20, 21, 22, 23, 24, 25), (9,)),
    ((), (30, 31, 32, 33)),
]
Build = Callable[..., SFT]


@pytest.fixture
def build(tokenizer: PreTrainedTokenizerBase) -> Build:
    """Builds a module on the tiny model in float64, the same every time."""

    def build(policy: Any = None, **options: Any) -> SFT:
        policy = policy or build_language_model(tokenizer).double()
        defaults: dict[str, Any] = {"optimizer": SGD, "max_grad_norm": math.inf}
        own = None if isinstance(policy, CausalLM) else tokenizer
        return SFT(policy, tokenizer=own, **(defaults | options))

    return build


def plain_loss(model: PreTrainedModel, rows: list[Row]) -> Tensor:
    """One row at a time through the model as `transformers` has it."""
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for given, said in rows:
        ids = torch.tensor([[*given, *said]])
        labels = torch.tensor([-100] * len(given) + list(said))[1:]
        logits = model(ids).logits[0, :-1]
        total = total + functional.cross_entropy(logits, labels, reduction="sum")
        tokens += int((labels != -100).sum())
    return total / tokens


def plain_gradients(model: PreTrainedModel, rows: list[Row]) -> dict[str, Tensor]:
    plain_loss(model, rows).backward()
    return {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert max(value.abs().max() for value in expected.values()) > 1e-3
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6)


# ---- the loss


def test_loss_and_gradient_are_those_of_plain_cross_entropy(
    build: Build, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    expected = plain_gradients(build_language_model(tokenizer).double(), ROWS)
    loss = plain_loss(build_language_model(tokenizer).double(), ROWS).item()
    found, logged = gradients(build(), [texts(ROWS)], tmp_path)
    assert_same(found, expected)
    assert float(logged["train/loss"]) == pytest.approx(loss, rel=1e-6)
    assert float(logged["train/perplexity"]) == pytest.approx(math.exp(loss), rel=1e-6)
    # 3 + 5 + 1, and of the last row all but the first token
    assert float(logged["train/tokens"]) == 12


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (list(reversed(ROWS)), {}),
        (ROWS, {"width": 40}),
        (ROWS, {"pad": 33}),
    ],
    ids=["order", "padding", "id of the padding"],
)
def test_what_must_not_matter(
    build: Build, tmp_path: Path, rows: list[Row], options: dict[str, int]
) -> None:
    expected, _ = gradients(build(), [texts(ROWS)], tmp_path)
    found, _ = gradients(build(), [texts(rows, **options)], tmp_path)
    assert_same(found, expected)


@pytest.mark.parametrize("limit", [1, 9, 14])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_micro_batches_and_packing_do_not_matter(
    build: Build,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    limit: int,
    attention: str,
) -> None:
    expected, _ = gradients(build(), [texts(ROWS)], tmp_path)
    model = build_language_model(tokenizer, attn_implementation=attention).double()
    module = build(model, micro_batch_tokens=limit)
    assert packs(module.policy) is (attention == "sdpa")
    found, logged = gradients(module, [texts(ROWS)], tmp_path)
    assert_same(found, expected)
    padded = float(logged["perf/padding_fraction"])
    assert (padded > 0) is (attention == "eager" and limit == 14)
    assert logged["perf/memory_gib"] > 0.1  # torch alone takes more


def test_an_optimizer_step_weighs_tokens_and_not_rows(build: Build, tmp_path: Path) -> None:
    """Of rows with 1 and 5 tokens, each token counts the same: not the mean of means."""
    both, _ = gradients(build(), [texts(ROWS[1:3])], tmp_path)
    long, _ = gradients(build(), [texts(ROWS[1:2])], tmp_path)
    short, _ = gradients(build(), [texts(ROWS[2:3])], tmp_path)
    assert_same(both, {name: (5 * long[name] + short[name]) / 6 for name in both})


def test_rows_without_trained_tokens_move_nothing(build: Build, tmp_path: Path) -> None:
    module = build(optimizer=OptimizerConfig(lr=0.1, weight_decay=0.5, warmup_steps=0))
    nothing = replace(texts(ROWS), response_mask=torch.zeros(4, 9, dtype=torch.bool)[:, :7])
    before = weights(module)
    fit(module, [nothing], tmp_path)
    assert all(torch.equal(before[name], weight) for name, weight in weights(module).items())


def test_token_accuracy_and_entropy(
    build: Build, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = build_language_model(tokenizer).double()
    right, entropies = 0, []
    for given, said in ROWS:
        ids = torch.tensor([[*given, *said]])
        first = max(len(given), 1)
        logits = model(ids).logits[0, first - 1 : -1]
        right += int((logits.argmax(dim=-1) == ids[0, first:]).sum())
        entropies += torch.distributions.Categorical(logits=logits).entropy().tolist()
    # so that some are right
    best = [
        (given, (int(model(torch.tensor([list(given)])).logits[0, -1].argmax()),))
        for given, _ in ROWS[:2]
    ]
    _, logged = gradients(build(log_entropy=True), [texts(ROWS)], tmp_path)
    assert float(logged["train/token_accuracy"]) == pytest.approx(right / 12)
    assert float(logged["train/entropy"]) == pytest.approx(sum(entropies) / 12, rel=1e-6)
    _, logged = gradients(build(), [texts([*best, ROWS[2]])], tmp_path)
    assert float(logged["train/token_accuracy"]) in (pytest.approx(2 / 3), 1.0)
    assert "train/entropy" not in logged


def double_nll(logprobs: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, -2 * logprobs, 0.0)


def test_a_loss_of_ones_own(build: Build, tmp_path: Path) -> None:
    plain, _ = gradients(build(), [texts(ROWS)], tmp_path)
    found, _ = gradients(build(loss=f"{__name__}.double_nll"), [texts(ROWS)], tmp_path)
    assert_same(found, {name: 2 * value for name, value in plain.items()})


# ---- a run


def run_of(
    build: Build, folder: Path, ckpt: Path | None = None, **options: Any
) -> tuple[SFT, L.Trainer]:
    module = build(optimizer=OptimizerConfig(lr=1e-2, schedule="cosine"), micro_batch_tokens=12)
    rows = [{"prompt": f"say {word}", "completion": word * 3} for word in "abcdefghij"]
    run = trainer(folder, max_steps=6, max_epochs=-1, **options)
    run.fit(module, SupervisedDataModule(rows, batch_size=4), ckpt_path=ckpt)
    return module, run


class _Stop(L.Callback):
    """Ends a run in the middle of its second epoch."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "half.ckpt")
            trainer.should_stop = True


def test_a_resumed_run_ends_with_the_same_bits(build: Build, tmp_path: Path) -> None:
    whole, _ = run_of(build, tmp_path / "whole")
    _, stopped = run_of(build, tmp_path / "half", callbacks=[_Stop()])
    assert stopped.global_step == 3
    rest, _ = run_of(build, tmp_path / "rest", tmp_path / "half" / "half.ckpt")
    for name, weight in weights(whole).items():
        assert torch.equal(weights(rest)[name], weight)


def test_evaluation_is_the_mean_over_all_tokens_of_a_set(
    build: Build, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    module, writer = build(micro_batch_tokens=9), EvalJSONL(tmp_path)
    run = trainer(tmp_path, callbacks=[writer])
    (found,) = run.validate(module, loader([texts(ROWS[:3]), texts(ROWS[3:])]), verbose=False)
    model = build_language_model(tokenizer).double()
    loss = plain_loss(model, ROWS).item()
    assert found["eval/loss"] == pytest.approx(loss, rel=1e-6)
    assert found["eval/mean_logprob"] == pytest.approx(-loss, rel=1e-6)
    assert found["eval/perplexity"] == pytest.approx(math.exp(loss), rel=1e-6)
    assert set(found) <= module.evaluation_names()
    lines = [json.loads(line) for line in writer.paths[0].read_text().splitlines()]
    assert [line["tokens"] for line in lines] == [3, 3, 5, 1]  # by their row in the data
    second = next(line for line in lines if line["tokens"] == 5)
    own = -5 * plain_loss(model, ROWS[1:2]).item()
    assert second["logprob"] == pytest.approx(own, rel=1e-6)
    assert second["completion"] == tokenizer.decode([11, 12, 13, 14, 1])


def test_perplexity_of_what_cannot_be() -> None:
    assert _named({"eval/mean_logprob": -1e4})["eval/perplexity"] == math.inf


def test_export_is_loaded_by_transformers(build: Build, tmp_path: Path) -> None:
    module = build(build_language_model(build().tokenizer))
    fit(module, [texts(ROWS)], tmp_path)
    module.save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.tensor([[5, 6, 7]])
    expected = module.policy.eval()(ids).logits
    torch.testing.assert_close(loaded.eval()(ids).logits, expected)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_what_ends_the_learnt_answers_ends_those_of_the_exported_model(
    kind: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    policy = build_language_model(tokenizer)
    end, template_end = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert policy.generation_config.eos_token_id == end
    asked, answers = ([{"role": "user", "content": "hi"}], ["ho", "no"])
    said = [[{"role": "assistant", "content": text}] for text in answers]
    module: Any
    if kind == "sft":
        module = SFT(policy, tokenizer=tokenizer, optimizer=SGD)
        data: Any = SupervisedDataModule([{"prompt": asked, "completion": said[0]}], batch_size=1)
    else:
        module = DPO(policy, tokenizer=tokenizer, optimizer=SGD)
        pair = {"prompt": asked, "chosen": said[0], "rejected": said[1]}
        data = PreferenceDataModule([pair], batch_size=1)
    run = trainer(tmp_path, max_steps=1)
    run.fit(module, datamodule=data)
    module.save_pretrained(tmp_path / "model")
    declared = GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id
    assert declared == sorted([end, template_end])
    # of the checkpoint the same, by the way of `lrlhf export` and that of Python
    run.save_checkpoint(tmp_path / "run.ckpt")
    again = type(module)(build_language_model(tokenizer), tokenizer=tokenizer, optimizer=SGD)
    fill(again, tmp_path / "run.ckpt")
    assert again.end_token_ids == {end, template_end}
    third = build_language_model(tokenizer)
    loaded = type(module).load_from_checkpoint(
        tmp_path / "run.ckpt", policy=third, tokenizer=tokenizer
    )
    assert loaded.policy.generation_config.eos_token_id == declared


def test_lora_trains_its_adapters_only(model_folder: str, build: Build, tmp_path: Path) -> None:
    module = build(CausalLM(source=model_folder, lora=LoRA(r=2)))
    found, logged = gradients(module, [texts(ROWS)], tmp_path)
    moved = {name for name, value in found.items() if bool(value.any())}
    assert moved
    assert all("lora_" in name for name in moved)
    assert math.isfinite(float(logged["train/loss"]))
    module.save_pretrained(tmp_path / "merged")
    assert not list((tmp_path / "merged").glob("adapter*"))


def test_a_step_that_is_not_finite_moves_nothing(
    build: Build, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = build(loss=f"{__name__}.infinite", guard=Guard(dump=0))
    before = weights(module)
    with caplog.at_level(logging.WARNING):
        run = fit(module, [texts(ROWS)], tmp_path)
    assert float(run.callback_metrics["train/skipped_steps"]) == 1
    assert "the loss is not finite" in caplog.text
    assert all(torch.equal(before[name], weight) for name, weight in weights(module).items())


def test_a_dump_of_such_a_step_repeats_it(build: Build, tmp_path: Path) -> None:
    module = build(loss=f"{__name__}.infinite", guard=Guard(dirpath=str(tmp_path / "dumps")))
    fit(module, [texts(ROWS)], tmp_path)
    (folder,) = (tmp_path / "dumps").iterdir()
    again = replay_dump(build(loss=f"{__name__}.infinite"), folder)
    assert again.reproduced
    assert [row["tokens"] for row in again.ranks[0].rows] == [3, 5, 1, 3]


def infinite(logprobs: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, logprobs / 0, 0.0)


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "cross"}, "unknown loss 'cross', expected one of dft, nll"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens is 0; it must be 1 or more"),
        ({"router_loss_coef": -1.0}, "router_loss_coef is -1.0; it must be 0 or more"),
        ({"max_grad_norm": 0.0}, "max_grad_norm is 0.0; it must be above 0"),
        ({"logprob_chunk": 0}, "logprob_chunk is 0; it must be 1 or more"),
        ({"guard": Guard(max_kl=1.0)}, "guard.max_kl is about a policy's responses; SFT has none"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_out_of_range(build: Build, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_a_model_that_pads_is_refused_by_name_where_packing_is_required(
    build: Build, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = build_language_model(tokenizer, attn_implementation="eager").double()
    module = build(model, require_packing=True)
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot compute rows without padding"):
        fit(module, [texts(ROWS)], tmp_path)
    packing = build(require_packing=True)
    assert allow_packing(packing.policy)
    fit(packing, [texts(ROWS)], tmp_path)


def test_another_batch_is_refused(build: Build, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="SFT got a SequenceBatch for a batch, and needs those of"):
        fit(build(), [texts(ROWS).rows], tmp_path)
