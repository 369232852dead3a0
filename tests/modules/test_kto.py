"""`KTO`: the loss of single answers, its reference point, and what must not change them."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lrlhf.callbacks import EvalJSONL
from lrlhf.datamodules import UnpairedPreferenceDataModule
from lrlhf.functional.preference import kto_loss
from lrlhf.guard.dump_replay import replay_dump
from lrlhf.models import CausalLM, LoRA, ReferencePolicy
from lrlhf.modules import KTO, SFT, Guard, OptimizerConfig
from lrlhf.modules.row_module import RowOutputs
from lrlhf.types import SequenceBatch, UnpairedBatch, UnpairedRows
from tests.conftest import build_language_model, build_tokenizer
from tests.modules.language_runs import SGD, Row, columns, fit, gradients, loader, texts, weights
from tests.modules.reward_runs import trainer
from tests.modules.test_dpo import logprob
from tests.modules.test_trl_training import close, recorded_model

RECORD: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "functional" / "golden" / "trl_kto.json").read_text()
)
Build = Callable[..., KTO]
Answer = tuple[tuple[int, ...], tuple[int, ...], bool]
ANSWERS: list[Answer] = [
    ((5, 6, 7), (8, 9, 1), True),
    ((10,), (11, 12, 13, 14, 1), False),
    ((20, 21), (4, 1), False),
    ((30,), (31, 1), True),
    ((15, 16), (17, 18, 1), True),
]


def others(rows: Sequence[Answer]) -> list[Row]:
    """The pairs of TRL: the answers of a batch, shifted by one."""
    return [(row[0], rows[place - 1][1]) for place, row in enumerate(rows)]


def answers(
    rows: Sequence[Answer],
    mismatched: Sequence[Row] | None = None,
    first: int = 1,
    **options: int,
) -> UnpairedBatch:
    return UnpairedBatch(
        **columns([(given, said) for given, said, _ in rows], **options),
        places=tuple(f"rows.jsonl:{first + place}" for place in range(len(rows))),
        labels=torch.tensor([label for _, _, label in rows]),
        mismatched=SequenceBatch(**columns(mismatched or others(rows), **options)),
    )


@pytest.fixture
def build(tokenizer: PreTrainedTokenizerBase, model_folder: str) -> Build:
    """Builds a module in float64 whose reference is another model, the same every time."""

    def build(policy: Any = None, **options: Any) -> KTO:
        policy = policy or build_language_model(tokenizer, seed=4).double()
        spec = CausalLM(source=model_folder)
        defaults: dict[str, Any] = {"optimizer": SGD, "max_grad_norm": math.inf, "reference": spec}
        own = None if isinstance(policy, CausalLM) else tokenizer
        return KTO(policy, tokenizer=own, **(defaults | options))

    return build


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert max(value.abs().max() for value in expected.values()) > 1e-4
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


# ---- the loss


def test_the_reference_point_gets_no_gradient() -> None:
    point = torch.tensor([0.5], requires_grad=True)
    loss = kto_loss(torch.tensor([0.2], requires_grad=True), torch.tensor([True]), point)
    loss.sum().backward()
    assert point.grad is None


@pytest.mark.parametrize(
    "case", RECORD["cases"], ids=lambda case: f"{case['loss_type']}, policy {case['policy']}"
)
def test_kto_equals_trl(case: dict[str, Any], tmp_path: Path) -> None:
    names = ("policy", "reference") if case["policy"] == 1 else ("reference", "policy")
    module = KTO(
        recorded_model(names[0]),
        tokenizer=build_tokenizer(),
        loss=case["loss_type"],
        beta=case["beta"],
        desirable_weight=case["weights"][0],
        undesirable_weight=case["weights"][1],
        optimizer=SGD,
        max_grad_norm=math.inf,
    )
    module.reference = ReferencePolicy(recorded_model(names[1]))
    found, logged = gradients(module, [answers(RECORD["rows"])], tmp_path)
    wanted = torch.tensor(case["gradient"], dtype=torch.float64)
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(found["lm_head.weight"], wanted, rtol=1e-5, atol=1e-6)
    close(logged["train/loss"], case["loss"])
    metrics = case["metrics"]
    close(logged["rewards/chosen_mean"], metrics["rewards/chosen"])
    close(logged["rewards/rejected_mean"], metrics["rewards/rejected"])
    close(logged["rewards/margin"], metrics["rewards/margins"])
    if case["loss_type"] == "kto":
        close(logged["train/kl"], metrics["kl"])
    else:
        assert "train/kl" not in logged


@pytest.mark.parametrize("change", ["padding", "order", "micro-batches", "one row at a time"])
def test_what_must_not_matter(build: Build, tmp_path: Path, change: str) -> None:
    # a divergence above 0, which the loss depends on
    pairs = [(given, (8, 8)) for given, _, _ in ANSWERS]
    expected, logged = gradients(build(beta=0.5), [answers(ANSWERS, pairs)], tmp_path)
    assert float(logged["train/kl"]) > 0.01
    order = [3, 0, 4, 2, 1] if change == "order" else [*range(5)]
    width = {"width": 12} if change == "padding" else {}
    batch = answers([ANSWERS[place] for place in order], [pairs[place] for place in order], **width)
    limit = {"micro-batches": 12, "one row at a time": 1}.get(change)
    found, again = gradients(build(beta=0.5, micro_batch_tokens=limit), [batch], tmp_path)
    assert_same(found, expected)
    for name in ("train/loss", "train/kl", "train/tokens", "rewards/margin"):
        assert float(again[name]) == pytest.approx(float(logged[name]), rel=1e-5)


def test_a_row_without_another_answer_does_not_count_in_the_reference_point(
    build: Build, tmp_path: Path
) -> None:
    pairs = [(given, (8, 8)) for given, _, _ in ANSWERS]
    _, alone = gradients(build(), [answers(ANSWERS[:1], pairs[:1])], tmp_path)
    pairs[1:] = [(given, ()) for given, _, _ in ANSWERS[1:]]
    _, logged = gradients(build(), [answers(ANSWERS, pairs)], tmp_path)
    assert float(logged["train/kl"]) == pytest.approx(float(alone["train/kl"]), rel=1e-6)
    assert float(logged["train/kl"]) > 0.01
    pairs = [(given, ()) for given, _, _ in ANSWERS]
    _, none = gradients(build(), [answers(ANSWERS, pairs)], tmp_path)
    assert float(none["train/kl"]) == 0.0


def test_a_policy_that_has_not_moved(build: Build, tmp_path: Path) -> None:
    module = build(reference=None, desirable_weight=2.0)
    _, logged = gradients(module, [answers(ANSWERS)], tmp_path)
    assert float(logged["train/loss"]) == pytest.approx((3 * 2.0 + 2) / 5 / 2)
    assert float(logged["rewards/margin"]) == float(logged["train/kl"]) == 0.0
    assert float(logged["train/tokens"]) == sum(len(said) for _, said, _ in ANSWERS)
    assert "train/reward" not in logged  # of both labels together it says nothing


def test_the_pass_over_mismatched_pairs_has_no_dropout(
    tokenizer: PreTrainedTokenizerBase, build: Build, tmp_path: Path
) -> None:
    model = build_language_model(tokenizer, seed=4, attention_dropout=0.5).double()
    model.train()  # as it is from the second step on
    _, logged = gradients(build(model), [answers(ANSWERS)], tmp_path)
    _, expected = gradients(build(), [answers(ANSWERS)], tmp_path)
    assert float(logged["train/kl"]) == pytest.approx(float(expected["train/kl"]), rel=1e-6)
    assert float(logged["train/loss"]) != pytest.approx(float(expected["train/loss"]), rel=1e-6)


# ---- runs

ROWS: list[dict[str, Any]] = [
    {"prompt": f"say {word}", "completion": word * (1 + place % 4), "label": place % 3 > 0}
    for place, word in enumerate("abcdefghijkl")
]


def trained(module: KTO, folder: Path, ckpt: Path | None = None, **options: Any) -> L.Trainer:
    data: dict[str, Any] = {"batch_size": 3, "val_size": 4} | options.pop("data", {})
    run = trainer(folder, **({"max_epochs": 2} | options))
    run.fit(module, UnpairedPreferenceDataModule(ROWS, **data), ckpt_path=ckpt)
    return run


@pytest.mark.parametrize("lora", [False, True])
def test_what_the_reference_said_beforehand_trains_alike(
    build: Build, model_folder: str, tmp_path: Path, lora: bool
) -> None:
    def module(**options: Any) -> KTO:
        L.seed_everything(1, verbose=False)
        spec = CausalLM(source=model_folder, lora=LoRA(r=2)) if lora else None
        optimizer = OptimizerConfig(lr=1e-2, eps=1e-3)
        return build(spec, optimizer=optimizer, reference=None, beta=0.5, **options)

    asked = module()
    run = trained(asked, tmp_path)
    before = module(precompute_reference=True, micro_batch_tokens=20)
    again = trained(before, tmp_path)
    assert before.reference is None
    assert float(run.callback_metrics["train/kl"]) != 0
    for name, value in run.callback_metrics.items():
        if name.startswith(("eval/", "train/kl", "train/loss")):
            assert float(again.callback_metrics[name]) == pytest.approx(float(value), rel=1e-3)
    for name, weight in weights(asked).items():
        torch.testing.assert_close(weights(before)[name], weight, rtol=1e-5, atol=1e-5)


def test_a_resumed_run_ends_with_the_same_bits(build: Build, tmp_path: Path) -> None:
    def run(folder: str, steps: int, ckpt: Path | None = None) -> tuple[KTO, L.Trainer]:
        module = build(optimizer=OptimizerConfig(lr=1e-2), micro_batch_tokens=20, reference=None)
        options = {"max_steps": steps, "max_epochs": -1, "data": {"val_size": 0}}
        return module, trained(module, tmp_path / folder, ckpt, **options)

    whole, _ = run("whole", 6)
    _, half = run("half", 3)
    half.save_checkpoint(tmp_path / "half.ckpt")
    rest, _ = run("rest", 6, tmp_path / "half.ckpt")
    for name, weight in weights(whole).items():
        assert torch.equal(weights(rest)[name], weight)


def test_an_evaluation_measures_all_rows_from_one_reference_point(
    build: Build, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    policy = build_language_model(tokenizer, seed=4).double()
    reference = build_language_model(tokenizer).double()
    pairs = others(ANSWERS)

    def ratio(given: tuple[int, ...], said: Any) -> float:
        gap = logprob(policy, given, said) - logprob(reference, given, said)
        return gap.item()

    rewards = np.array([0.3 * ratio(given, said) for given, said, _ in ANSWERS])
    labels = np.array([label for _, _, label in ANSWERS])
    point = max(0.0, float(np.mean([ratio(tuple(given), said) for given, said in pairs])))
    sides = np.where(labels, rewards - 0.3 * point, 0.3 * point - rewards)
    order = rewards[labels][:, None] > rewards[~labels][None, :]
    expected = {
        "eval/loss": np.mean(np.where(labels, 1.0, 2.0) / (1 + np.exp(sides))),
        "eval/kl": point,
        "eval/chosen_mean": rewards[labels].mean(),
        "eval/rejected_mean": rewards[~labels].mean(),
        "eval/margin": rewards[labels].mean() - rewards[~labels].mean(),
        "eval/auroc": order.mean(),
    }
    module = build(beta=0.3, undesirable_weight=2.0)
    run = trainer(tmp_path, callbacks=[EvalJSONL()])
    whole = loader([answers(ANSWERS[:2], pairs[:2]), answers(ANSWERS[2:], pairs[2:], 3)])
    (found,) = run.validate(module, whole, verbose=False)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-7), name
    assert module.evaluation_names() == {*expected}
    (path,) = tmp_path.glob("**/eval_scores_*.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["label"] for record in records] == labels.tolist()
    np.testing.assert_allclose([record["reward"] for record in records], rewards, rtol=1e-4)


class Broken(KTO):
    """Its gradient is not finite."""

    def outputs_of(self, rows: UnpairedRows) -> RowOutputs:
        outputs = super().outputs_of(rows)
        return outputs._replace(losses=outputs.losses * math.inf)


def test_a_dump_of_a_step_repeats_it(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    def module() -> Broken:
        guard = Guard(max_skipped=1, dirpath=tmp_path / "dumps")
        policy = build_language_model(tokenizer).double()
        return Broken(policy, tokenizer=tokenizer, precompute_reference=True, guard=guard)

    trained(module(), tmp_path, max_steps=1)
    (dump,) = (tmp_path / "dumps").iterdir()
    again = replay_dump(module(), dump)
    assert again.reproduced
    assert {row["label"] for row in again.ranks[0].rows} <= {True, False}


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "dpo"}, "loss: expected one of kto, apo_zero_unpaired, got 'dpo'"),
        ({"beta": 0.0}, "beta is 0.0; it must be above 0"),
        ({"desirable_weight": 0.0}, "desirable_weight is 0.0; it must be above 0"),
        ({"undesirable_weight": -1.0}, "undesirable_weight is -1.0; it must be above 0"),
        ({"logprob_chunk": 0}, "logprob_chunk is 0; it must be 1 or more"),
        ({"guard": Guard(max_kl=1.0)}, "guard.max_kl is about a policy's responses; KTO has none"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_out_of_range(build: Build, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_other_batches_are_refused(
    build: Build, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="needs those of UnpairedPreferenceDataModule"):
        fit(build(), [texts([((5,), (6, 1))])], tmp_path)
    with pytest.raises(ValueError, match="train with a UnpairedPreferenceDataModule"):
        fit(build(precompute_reference=True), [answers(ANSWERS)], tmp_path)
    # answers of which some are undesirable are not to be learnt
    policy = build_language_model(tokenizer).double()
    with pytest.raises(ValueError, match="SFT got a UnpairedBatch"):
        fit(SFT(policy, tokenizer=tokenizer), [answers(ANSWERS)], tmp_path)
