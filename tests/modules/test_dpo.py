"""`DPO`: implicit rewards, their losses, and what must not change them."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.datamodules import PreferenceDataModule
from lrlhf.functional.preference import PreferenceLoss
from lrlhf.guard.dump_replay import replay_dump
from lrlhf.models import CausalLM, LoRA, ReferencePolicy
from lrlhf.modules import DPO, Guard, OptimizerConfig
from lrlhf.modules.pairs.pair_module import PairOutputs
from lrlhf.modules.pairs.pair_step import PairScores
from lrlhf.modules.policy import iteration
from lrlhf.types import PreferenceBatch, SequenceBatch
from tests.conftest import build_language_model
from tests.modules.language_runs import SGD, fit, gradients, loader, pairs, weights
from tests.modules.reward_runs import trainer

PAIRS = [
    ((5, 6, 7), (8, 9, 1), (10, 1)),
    ((10,), (11, 12, 13, 14, 1), (15, 1)),
    ((20, 21), (4, 1), (16, 17, 18, 1)),
    ((30,), (31, 1), (32, 33, 1)),
]
Build = Callable[..., DPO]


@pytest.fixture
def build(tokenizer: PreTrainedTokenizerBase) -> Build:
    """Builds a module on the tiny model in float64, the same every time."""

    def build(policy: Any = None, **options: Any) -> DPO:
        policy = policy or build_language_model(tokenizer).double()
        defaults: dict[str, Any] = {"optimizer": SGD, "max_grad_norm": math.inf}
        own = None if isinstance(policy, CausalLM) else tokenizer
        return DPO(policy, tokenizer=own, **(defaults | options))

    return build


def logprob(model: PreTrainedModel, given: tuple[int, ...], said: tuple[int, ...]) -> Tensor:
    logits = model(torch.tensor([[*given, *said]])).logits[0].log_softmax(dim=-1)
    return torch.stack([logits[len(given) + i - 1, token] for i, token in enumerate(said)]).sum()


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert max(value.abs().max() for value in expected.values()) > 1e-4
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6)


# ---- the loss


def test_rewards_are_those_of_plain_log_probabilities(
    build: Build, tokenizer: PreTrainedTokenizerBase, model_folder: str
) -> None:
    policy = build_language_model(tokenizer, seed=4).double()
    module = build(policy, beta=0.3, reference=CausalLM(source=model_folder))
    scores = module.score_pairs(pairs(PAIRS))
    reference = build_language_model(tokenizer).double()
    for place, given in enumerate(PAIRS):
        for candidate, said in zip(scores, given[1:], strict=True):
            gap = logprob(policy, given[0], said) - logprob(reference, given[0], said)
            assert candidate[place].item() == pytest.approx(0.3 * gap.item(), rel=1e-4)


def test_a_policy_that_has_not_moved_has_rewards_of_zero(build: Build, tmp_path: Path) -> None:
    _, logged = gradients(build(), [pairs(PAIRS)], tmp_path)
    assert float(logged["train/loss"]) == pytest.approx(math.log(2))
    assert float(logged["rewards/chosen_mean"]) == 0.0
    assert logged["perf/memory_gib"] > 0.1  # torch alone takes more


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "simpo"])
def test_the_order_of_candidates_and_padding_do_not_matter(
    build: Build, tmp_path: Path, loss: str
) -> None:
    expected, _ = gradients(build(loss=loss), [pairs(PAIRS)], tmp_path)
    swapped = [(given, second, first) for given, first, second in reversed(PAIRS)]
    found, _ = gradients(build(loss=loss), [pairs(swapped, [-1.0] * 4, width=12)], tmp_path)
    assert_same(found, expected)


@pytest.mark.parametrize(("attention", "first", "rest"), [("sdpa", 8, 22), ("eager", 11, 26)])
def test_the_utilisation_of_a_gpu_counts_the_micro_batches_of_a_step(
    build: Build,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attention: str,
    first: int,
    rest: int,
) -> None:
    passes = []

    def training_flops(model: nn.Module, tokens: float, pairs: float) -> float:
        passes.append((model, tokens, pairs))
        return 3e9

    monkeypatch.setattr(iteration, "peak_flops", lambda device: 2e12)
    monkeypatch.setattr(iteration, "training_flops", training_flops)
    policy = build_language_model(tokenizer, attn_implementation=attention).double()
    parts = [pairs(PAIRS[:1], width=9), pairs(PAIRS[1:])]
    _, logged = gradients(build(policy), parts, tmp_path, accumulate_grad_batches=2)
    # 3 + 3 + 2 tokens; 1 + 5 + 2, 2 + 2 + 4, 1 + 2 + 3: prompts once if rows are packed, no padding
    assert [(model, tokens) for model, tokens, _ in passes] == [(policy, first), (policy, rest)]
    assert passes[0][2] == pytest.approx((6**2 + 5**2) * first / 11)
    seconds = float(logged["perf/update_s"])
    tokens = float(logged["perf/update_tokens_per_s"])
    assert tokens == pytest.approx((first + rest) / seconds, rel=1e-5)
    assert float(logged["perf/mfu"]) == pytest.approx(2 * 3e9 / seconds / 2e12, rel=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_accumulation_and_shared_prompts_do_not_matter(
    build: Build, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, attention: str
) -> None:
    expected, _ = gradients(build(sft_coef=0.2), [pairs(PAIRS)], tmp_path)
    model = build_language_model(tokenizer, attn_implementation=attention).double()
    parts = [pairs(PAIRS[:1]), pairs(PAIRS[1:])]
    found, _ = gradients(build(model, sft_coef=0.2), parts, tmp_path, accumulate_grad_batches=2)
    assert_same(found, expected)


def test_margins_of_pairs_and_ties(build: Build, tmp_path: Path) -> None:
    """At rewards of 0 a margin m gives -log σ(-m); a tie and no label give nothing."""
    _, logged = gradients(build(), [pairs(PAIRS[:1], margin=[2.0])], tmp_path)
    assert float(logged["train/loss"]) == pytest.approx(math.log1p(math.exp(2.0)))
    both, _ = gradients(build(), [pairs(PAIRS[:2], [1.0, 0.0])], tmp_path)
    alone, _ = gradients(build(), [pairs(PAIRS[:1])], tmp_path)
    assert_same(both, {name: value / 2 for name, value in alone.items()})


def test_the_likelihood_of_chosen_answers_is_one_more_term(
    build: Build, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    without, _ = gradients(build(), [pairs(PAIRS, [1.0, -1.0, 1.0, 1.0])], tmp_path)
    module = build(sft_coef=0.5)
    found, logged = gradients(module, [pairs(PAIRS, [1.0, -1.0, 1.0, 1.0])], tmp_path)
    model = build_language_model(tokenizer).double()
    chosen = [pair[2] if place == 1 else pair[1] for place, pair in enumerate(PAIRS)]
    each = [
        -logprob(model, pair[0], said) / len(said) for pair, said in zip(PAIRS, chosen, strict=True)
    ]
    term = torch.stack(each).mean()
    term.backward()
    assert float(logged["train/sft_loss"]) == pytest.approx(term.item(), rel=1e-6)
    expected = {
        name: without[name] + 0.5 * weight.grad
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }
    assert_same(found, expected)


def squared(chosen: Tensor, rejected: Tensor) -> Tensor:
    return (chosen - rejected - 1).square()


MINE = PreferenceLoss(name="mine", function=squared, beta=0.7, length_normalized=True)


def test_a_loss_of_ones_own(build: Build, tmp_path: Path) -> None:
    _, logged = gradients(build(loss=f"{__name__}.squared"), [pairs(PAIRS)], tmp_path)
    assert float(logged["train/loss"]) == pytest.approx(1.0)
    module = build(loss=f"{__name__}.MINE")
    assert (module.beta, module.length_normalized) == (0.7, True)


def test_options_of_a_loss_may_be_overridden(build: Build) -> None:
    simpo = build(loss="simpo")
    assert simpo.reference is None
    assert (simpo.beta, simpo.objective.margin, simpo.length_normalized) == (2.0, 1.0, True)
    other = build(loss="sigmoid", beta=0.4, margin=0.2, length_normalized=True)
    assert (other.beta, other.objective.margin, other.length_normalized) == (0.4, 0.2, True)


# ---- a run


def test_lora_has_itself_without_adapters_as_reference(
    build: Build, model_folder: str, tmp_path: Path
) -> None:
    module = build(
        CausalLM(source=model_folder, lora=LoRA(r=2)), optimizer=OptimizerConfig(lr=1e-2)
    )
    before = module.score_pairs(pairs(PAIRS))
    assert not any(part.any() for part in before)
    fit(module, [pairs(PAIRS)] * 5, tmp_path)
    module.eval()
    first, second = module.score_pairs(pairs(PAIRS))
    assert bool((first > second).all())
    trained = [name for name, one in module.policy.named_parameters() if one.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)


def test_a_resumed_run_ends_with_the_same_bits(build: Build, tmp_path: Path) -> None:
    rows = [{"prompt": f"say {word}", "chosen": word * 3, "rejected": "z"} for word in "abcdefgh"]

    def run(folder: str, steps: int, ckpt: Path | None = None) -> tuple[DPO, Any]:
        module = build(optimizer=OptimizerConfig(lr=1e-2), beta=0.5)
        goes = trainer(tmp_path / folder, max_steps=steps, max_epochs=-1)
        goes.fit(module, PreferenceDataModule(rows, batch_size=2), ckpt_path=ckpt)
        return module, goes

    whole, _ = run("whole", 6)
    _, half = run("half", 3)
    half.save_checkpoint(tmp_path / "half.ckpt")
    rest, _ = run("rest", 6, tmp_path / "half.ckpt")
    for name, weight in weights(whole).items():
        assert torch.equal(weights(rest)[name], weight)
    # the reference is the policy as it started, not as it was resumed
    first = whole.score_pairs(pairs(PAIRS)).candidate0
    assert torch.equal(first, rest.score_pairs(pairs(PAIRS)).candidate0)


def test_evaluation_without_a_fit(build: Build, tmp_path: Path) -> None:
    run = trainer(tmp_path)
    (found,) = run.validate(build(), loader([pairs(PAIRS)]), verbose=False)
    assert found["eval/loss"] == pytest.approx(math.log(2))
    assert found["eval/score_ties"] == 1.0


# ---- a reference that is asked beforehand

ROWS = [
    {"prompt": f"say {word}", "chosen": word * (1 + place % 3), "rejected": "z" * (1 + place % 4)}
    for place, word in enumerate("abcdefgh")
]


def trained(module: DPO, folder: Path, precision: Any = None, **data: Any) -> dict[str, Tensor]:
    """Its weights after two epochs of shuffled rows and an evaluation."""
    options: dict[str, Any] = {"batch_size": 3, "val_batch_size": 2, "val_size": 2} | data
    run = trainer(folder, max_epochs=2, precision=precision)
    run.fit(module, PreferenceDataModule(ROWS, **options))
    return weights(module)


@pytest.mark.parametrize("lora", [False, True])
def test_what_the_reference_said_beforehand_trains_alike(
    build: Build, model_folder: str, tmp_path: Path, lora: bool
) -> None:
    def module(**options: Any) -> DPO:
        L.seed_everything(1, verbose=False)
        spec = CausalLM(source=model_folder, lora=LoRA(r=2)) if lora else None
        return build(spec, optimizer=OptimizerConfig(lr=1e-2, eps=1e-3), **options)

    expected = trained(module(), tmp_path)
    before = module(precompute_reference=True)
    found = trained(before, tmp_path)
    assert before.reference is None
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)
    assert any(bool((found[name] != weight).any()) for name, weight in weights(module()).items())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_in_batches_of_the_same_rows_they_are_the_same_bits(
    build: Build, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, precision: str
) -> None:
    same = {"shuffle": False, "batch_size": len(ROWS), "val_size": 0, "precision": precision}
    options: dict[str, Any] = {"optimizer": OptimizerConfig(lr=1e-2)}
    expected = trained(build(build_language_model(tokenizer), **options), tmp_path, **same)
    options["precompute_reference"] = True
    found = trained(build(build_language_model(tokenizer), **options), tmp_path, **same)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_a_reference_that_is_asked_beforehand_says_the_same_in_mixed_precision(
    build: Build, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """A policy that has not moved has rewards of 0, and a loss of log 2."""
    module = build(build_language_model(tokenizer), precompute_reference=True)
    run = trainer(tmp_path, max_steps=1, precision="bf16-mixed")
    run.fit(module, PreferenceDataModule(ROWS, batch_size=len(ROWS), shuffle=False))
    assert float(run.callback_metrics["train/loss"]) == pytest.approx(math.log(2), abs=1e-6)


class Broken(DPO):
    """Its gradient is not finite."""

    def outputs_of(self, batch: PreferenceBatch) -> PairOutputs:
        outputs = super().outputs_of(batch)
        scores = PairScores(*(part * math.inf for part in outputs.scores))
        return outputs._replace(scores=scores)


def test_a_step_of_a_run_that_asked_beforehand_can_be_taken_again(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    def module() -> Broken:
        guard = Guard(max_skipped=1, dirpath=tmp_path / "dumps")
        policy = build_language_model(tokenizer).double()
        return Broken(policy, tokenizer=tokenizer, precompute_reference=True, guard=guard)

    run = trainer(tmp_path, max_steps=1)
    run.fit(module(), PreferenceDataModule(ROWS, batch_size=4))
    (dump,) = (tmp_path / "dumps").iterdir()
    assert replay_dump(module(), dump).reproduced


def test_data_of_an_earlier_fit_are_not_what_is_asked_about(build: Build, tmp_path: Path) -> None:
    run = trainer(tmp_path, max_epochs=1)
    run.fit(build(), PreferenceDataModule(ROWS, batch_size=4))
    with pytest.raises(ValueError, match="train with a PreferenceDataModule"):
        run.fit(build(precompute_reference=True), loader([pairs(PAIRS)]))


def test_the_reference_is_asked_about_each_row_once(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def logprobs(_self: ReferencePolicy, batch: SequenceBatch, **_: Any) -> Tensor:
        asked.append(len(batch))
        return torch.zeros(batch.input_ids.shape, dtype=torch.float64)

    monkeypatch.setattr(ReferencePolicy, "logprobs", logprobs)
    trained(build(precompute_reference=True), tmp_path)
    assert sum(asked) == 2 * len(ROWS)


def test_rows_that_were_not_there_before_training(build: Build, tmp_path: Path) -> None:
    module = build(precompute_reference=True)
    trained(module, tmp_path)
    with pytest.raises(ValueError, match="this is another: leave precompute_reference out"):
        module.score_pairs(pairs(PAIRS))
    with pytest.raises(ValueError, match="train with a PreferenceDataModule"):
        fit(build(precompute_reference=True), [pairs(PAIRS)], tmp_path)


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "sigmod"}, "unknown loss 'sigmod', .* did you mean 'sigmoid'"),
        ({"loss": f"{__name__}.PAIRS"}, "neither a PreferenceLoss nor a function"),
        ({"beta": 0.0}, "beta is 0.0; it must be above 0"),
        ({"sft_coef": -1.0}, "sft_coef is -1.0; it must be 0 or more"),
        ({"label_smoothing": 0.5}, "label_smoothing is 0.5, expected 0 or more and below 0.5"),
        ({"logprob_chunk": 0}, "logprob_chunk is 0; it must be 1 or more"),
        ({"loss": "simpo", "reference": "x"}, "has no reference: leave reference out"),
        ({"loss": "simpo", "precompute_reference": True}, "leave precompute_reference out"),
        ({"guard": Guard(max_kl=1.0)}, "guard.max_kl is about a policy's responses; DPO has none"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_out_of_range(build: Build, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)
