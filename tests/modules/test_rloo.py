"""RLOO end to end on a model of 27,000 parameters: learning, resuming, and what must not matter."""

import copy
import dataclasses
from typing import Any

import lightning as L
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.models import CausalLM, LoRA
from lrlhf.modules import RLOO, Advantage, Guard, OptimizerConfig, Reference, Update
from lrlhf.modules.policy import scorer
from lrlhf.rewards import Rewards
from lrlhf.rollout import Capabilities, Sampling, TransformersEngine
from lrlhf.types import Rollout
from tests.modules.policy_runs import Watcher, fit, letters, weights


def build(
    model: PreTrainedModel | CausalLM, tokenizer: PreTrainedTokenizerBase, **options: Any
) -> RLOO:
    defaults: dict[str, Any] = {
        "num_generations": 4,
        "sampling": Sampling(max_new_tokens=6),
        "optimizer": OptimizerConfig(lr=1e-3),
        "reference": Reference(kl_coef=0.05),
    }
    tokenizer_option = {} if isinstance(model, CausalLM) else {"tokenizer": tokenizer}
    return RLOO(model, Rewards([letters]), **tokenizer_option, **(defaults | options))


def test_a_notebook_builds_and_trains_two_iterations_without_yaml(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    module = build(language_model, tokenizer)
    before = weights(module.policy)
    watcher = Watcher()
    trainer = fit(module, prompts, tmp_path, callbacks=[watcher], val_check_interval=1)
    assert trainer.global_step == 2
    assert any(
        not torch.equal(before[name], value) for name, value in weights(module.policy).items()
    )
    logged = trainer.logged_metrics
    for key in (
        "train/loss",
        "rollout/score",
        "rollout/score_std",
        "rollout/response_length",
        "rollout/truncated_fraction",
        "rollout/zero_variance_groups",
        "rewards/letters/mean",
        "rewards/letters/std",
        "policy/loss",
        "policy/approx_kl",
        "policy/clip_fraction",
        "policy/ratio_max",
        "policy/grad_norm",
        "kl/reference",
        "kl/sequence",
        "kl/coef",
        "mismatch/mean",
        "mismatch/max",
        "mismatch/kl",
        "perf/generate_s",
        "perf/reward_s",
        "perf/logprob_s",
        "perf/update_s",
        "perf/tokens_per_s",
        "perf/padding_fraction",
        "eval/score",
    ):
        assert key in trainer.callback_metrics | logged, key
    phases = [phase for phase in watcher.phases if phase]
    first_update = phases.index("update")
    assert phases[first_update - 3 : first_update] == ["generate", "reward", "logprob"]
    assert len(watcher.records[0]) == 16
    record = watcher.records[0][0]
    assert record["score"] == pytest.approx(letters([record["completion"]])[0])
    assert record["columns"]["answer"] in "abcdefghijklmnop"


def test_the_policy_learns_to_say_what_is_rewarded(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    module = build(
        language_model,
        tokenizer,
        reference=Reference(kl_coef=0.0),
        num_generations=8,
        optimizer=OptimizerConfig(lr=1e-2),
    )
    watcher = Watcher()
    fit(module, prompts, tmp_path, steps=25, callbacks=[watcher])
    scores = [float(experience.scores.mean()) for experience in watcher.experiences]
    assert sum(scores[:3]) / 3 < 0.5
    assert sum(scores[-3:]) / 3 > 0.9


def test_a_resumed_run_ends_with_the_same_weights(
    tokenizer, model_folder, prompts, tmp_path
) -> None:
    def fresh() -> RLOO:
        return build(
            CausalLM(source=model_folder),
            tokenizer,
            reference=Reference(kl_coef=0.1, sync_every=2),
            update=Update(num_iterations=2, minibatch_size=8),
            optimizer=OptimizerConfig(lr=1e-3, schedule="linear"),
        )

    straight = fresh()
    fit(straight, prompts, tmp_path, steps=6)
    first = fresh()
    checkpoint = str(tmp_path / "step3.ckpt")

    class SaveAtThree(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(checkpoint)

    fit(first, prompts, tmp_path, steps=6, callbacks=[SaveAtThree()])
    resumed = fresh()
    fit(resumed, prompts, tmp_path, steps=6, ckpt_path=checkpoint)
    expected = weights(straight.policy)
    for name, value in weights(resumed.policy).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("loss", ["sequence_clip", "dapo"])
def test_micro_batches_do_not_change_the_update(
    language_model, tokenizer, prompts, tmp_path, loss: str
) -> None:
    results = []
    for budget in (None, 40):
        module = build(
            copy.deepcopy(language_model),
            tokenizer,
            update=Update(loss=loss, micro_batch_tokens=budget),
            optimizer=OptimizerConfig(lr=1e-3, optimizer_class="torch.optim.SGD"),
        )
        fit(module, prompts, tmp_path, steps=1)
        results.append(weights(module.policy))
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("lora", [None, LoRA(r=4, alpha=8)])
@pytest.mark.parametrize("budget", [None, 60])
def test_packed_rows_train_as_padded_ones(
    model_folder, tokenizer, prompts, tmp_path, lora: LoRA | None, budget: int | None
) -> None:
    runs = []
    for attention in ("sdpa", "eager"):  # rows are packed, or padded
        L.seed_everything(5, verbose=False)  # of the adapters
        module = build(
            CausalLM(source=model_folder, attn_implementation=attention, lora=lora),
            tokenizer,
            update=Update(micro_batch_tokens=budget, minibatch_size=8),
            optimizer=OptimizerConfig(lr=1e-2, optimizer_class="torch.optim.SGD"),
        )
        logged = fit(module, prompts, tmp_path, steps=2).logged_metrics
        runs.append((weights(module.policy), logged))
    (packed, of_packed), (padded, of_padded) = runs
    for name, value in packed.items():
        torch.testing.assert_close(padded[name], value, rtol=1e-4, atol=1e-6)
    assert of_packed.keys() == of_padded.keys()
    for name in sorted(of_packed.keys() - {name for name in of_packed if "perf/" in name}):
        assert float(of_packed[name]) == pytest.approx(float(of_padded[name]), rel=1e-3, abs=1e-5)
    assert float(of_packed["perf/padding_fraction"]) == 0
    assert float(of_packed["perf/shared_fraction"]) > 0.2
    assert float(of_padded["perf/shared_fraction"]) == 0


class Claiming(TransformersEngine):
    """Says of itself whether it is exact."""

    def __init__(self, exact: bool) -> None:
        super().__init__()
        self.exact = exact

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(exact=self.exact)


def test_what_an_exact_engine_drew_with_is_not_computed_again(
    language_model, tokenizer, prompts, tmp_path, monkeypatch
) -> None:
    passes: list[int] = []
    original = scorer.sequence_outputs

    def counting(*args: Any, **options: Any) -> Any:
        passes.append(1)
        return original(*args, **options)

    monkeypatch.setattr(scorer, "sequence_outputs", counting)
    ends = []
    for exact, needed in ((True, 0), (False, 2)):
        passes.clear()
        engine = Claiming(exact)
        module = build(
            copy.deepcopy(language_model),
            tokenizer,
            engine=engine,
            update=Update(minibatch_size=8),
            optimizer=OptimizerConfig(lr=1e-2, optimizer_class="torch.optim.SGD"),
        )
        logged = fit(module, prompts, tmp_path, steps=2).logged_metrics
        assert len(passes) == needed
        # how far engine and trainer are apart is measured all the same
        assert 0 < float(logged["mismatch/max"]) < 1e-4
        ends.append((weights(module.policy), logged))
    for name, value in ends[0][0].items():
        torch.testing.assert_close(ends[1][0][name], value, rtol=1e-3, atol=1e-5)
    for name in ("kl/reference", "policy/approx_kl", "train/loss"):
        first, second = (float(logged[name]) for _, logged in ends)
        assert first == pytest.approx(second, rel=1e-2, abs=1e-5), name


def test_an_engine_that_only_says_it_is_exact_is_found_out(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    class Wrong(TransformersEngine):
        def generate(self, *args: Any, **options: Any) -> Rollout:
            rollout = super().generate(*args, **options)
            moved = rollout.sampling_logprobs - 0.5 * rollout.response_mask
            return dataclasses.replace(rollout, sampling_logprobs=moved)

    before = weights(language_model)
    module = build(language_model, tokenizer, engine=Wrong(), guard=Guard(max_mismatch=0.4))
    logged = fit(module, prompts, tmp_path, steps=1).logged_metrics
    assert float(logged["mismatch/max"]) == pytest.approx(0.5, abs=1e-3)
    assert module.skipped_steps == 1
    assert all(torch.equal(before[name], value) for name, value in weights(module.policy).items())


def test_validation_in_between_does_not_change_the_run(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    results = []
    for options in ({"limit_val_batches": 0}, {"val_check_interval": 1}):
        module = build(copy.deepcopy(language_model), tokenizer)
        fit(module, prompts, tmp_path, steps=3, **options)
        results.append(weights(module.policy))
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value)


@pytest.mark.parametrize(
    ("estimator", "loss"),
    [
        ("rloo", "sequence_clip"),
        ("rloo", "gspo"),
        ("grpo", "token_clip"),
        ("grpo", "dapo"),
        ("grpo", "cispo"),
        ("dr_grpo", "dr_grpo"),
        ("rloo_openrlhf", "token_clip"),
        ("reinforce", "reinforce"),
        ("reinforce_baseline", "token_clip"),
        ("reinforce_plus_plus", "token_clip"),
        ("grpo", "cpgd"),
    ],
)
def test_every_estimator_and_loss_trains(
    language_model, tokenizer, prompts, tmp_path, estimator: str, loss: str
) -> None:
    module = build(
        language_model,
        tokenizer,
        advantage=Advantage(estimator=estimator),
        update=Update(loss=loss, entropy_coef=0.01, minibatch_size=8, num_iterations=2),
    )
    before = weights(module.policy)
    trainer = fit(module, prompts, tmp_path, steps=1)
    assert torch.isfinite(trainer.logged_metrics["train/loss"])
    assert "policy/entropy" in trainer.logged_metrics
    assert any(
        not torch.equal(before[name], value) for name, value in weights(module.policy).items()
    )


def test_an_adapter_trains_and_its_reference_is_the_base_model(
    model_folder, tokenizer, prompts, tmp_path
) -> None:
    spec = CausalLM(source=model_folder, lora=LoRA(r=4, alpha=8))
    module = build(spec, tokenizer, optimizer=OptimizerConfig(lr=1e-2))
    base = {n: p.clone() for n, p in module.policy.named_parameters() if "lora" not in n}
    watcher = Watcher()
    fit(module, prompts, tmp_path, steps=3, callbacks=[watcher])
    first, last = watcher.experiences[0], watcher.experiences[-1]
    assert first.old_logprobs is not None
    assert first.ref_logprobs is not None
    torch.testing.assert_close(first.old_logprobs, first.ref_logprobs, atol=1e-5, rtol=1e-5)
    assert last.old_logprobs is not None
    assert last.ref_logprobs is not None
    assert (last.old_logprobs - last.ref_logprobs).abs().max() > 1e-3
    for name, value in module.policy.named_parameters():
        if "lora" not in name:
            assert torch.equal(value, base[name]), name


@pytest.mark.parametrize("lora", [None, LoRA(r=4, alpha=8)])
def test_an_exported_policy_loads_with_transformers(
    model_folder, tokenizer, prompts, tmp_path, lora: LoRA | None
) -> None:
    module = build(
        CausalLM(source=model_folder, lora=lora), tokenizer, optimizer=OptimizerConfig(lr=1e-2)
    )
    fit(module, prompts, tmp_path)
    module.export_pretrained(tmp_path / "export")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    start = AutoModelForCausalLM.from_pretrained(model_folder)
    ids = torch.tensor([tokenizer("hello")["input_ids"]])
    logits = loaded(ids).logits
    torch.testing.assert_close(logits, module.policy.eval()(ids).logits, atol=1e-5, rtol=1e-4)
    assert (logits - start(ids).logits).abs().max() > 1e-3


def test_a_step_with_a_gradient_that_is_not_finite_moves_nothing_and_is_counted(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    module = build(language_model, tokenizer, guard=Guard(max_skipped=5))
    language_model.model.layers[0].mlp.down_proj.weight.register_hook(
        lambda gradient: gradient * float("nan")
    )
    before = weights(module.policy)
    trainer = fit(module, prompts, tmp_path, steps=2)
    assert trainer.logged_metrics["train/skipped_steps"] == 2
    for name, value in weights(module.policy).items():
        assert torch.equal(value, before[name])


def test_too_many_skipped_steps_stop_the_run(language_model, tokenizer, prompts, tmp_path) -> None:
    module = build(language_model, tokenizer, guard=Guard(max_skipped=1))
    language_model.model.layers[0].mlp.down_proj.weight.register_hook(
        lambda gradient: gradient * float("nan")
    )
    with pytest.raises(ValueError, match=r"guard\.max_skipped"):
        fit(module, prompts, tmp_path, steps=5)


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"num_generations": 0}, "num_generations"),
        ({"num_generations": 1}, "num_generations is 1; the nearest value is 2"),
        ({"sampling": Sampling(temperature=0.0)}, "sampling.temperature"),
        ({"sampling": Sampling(top_p=0.9)}, "allow_truncated_sampling"),
        (
            {"advantage": Advantage(estimator="reinforce"), "update": Update(loss="gspo")},
            "update.loss",
        ),
        (
            {
                "advantage": Advantage(estimator="reinforce", options={"gamma": 0.9}),
                "update": Update(loss="gspo"),
                "reference": Reference(kl_coef=0.0),
            },
            "gamma below 1",
        ),
        (
            {
                "advantage": Advantage(estimator="grpo"),
                "reference": Reference(kl_coef=0.1, kl_estimator="k1"),
            },
            "kl_estimator is k1 and the penalty is in the loss",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(
    language_model, tokenizer, options: dict[str, Any], culprit: str
) -> None:
    with pytest.raises(ValueError, match=culprit):
        build(language_model, tokenizer, **options)


def test_a_minibatch_that_does_not_divide_names_the_nearest_sizes(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    module = build(language_model, tokenizer, update=Update(minibatch_size=6))
    with pytest.raises(ValueError, match=r"16 responses.* 4 and 8"):
        fit(module, prompts, tmp_path)


def test_weights_in_pure_bfloat16_are_refused(language_model, tokenizer, prompts, tmp_path) -> None:
    module = build(language_model, tokenizer)
    with pytest.raises(ValueError, match="bf16-mixed"):
        fit(module, prompts, tmp_path, precision="bf16-true")


def test_trained_weights_that_are_loaded_in_16_bits_are_refused(
    model_folder, tokenizer, prompts, tmp_path
) -> None:
    module = build(CausalLM(source=model_folder, dtype="bfloat16"), tokenizer)
    with pytest.raises(ValueError, match="dtype: float32"):
        fit(module, prompts, tmp_path)


def test_a_kl_coefficient_without_a_reference_is_refused(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    module = build(language_model, tokenizer, reference=Reference(kl_coef=0.0))
    module.kl_coef = 0.1
    with pytest.raises(ValueError, match=r"reference\.kl_coef"):
        fit(module, prompts, tmp_path)


def test_an_adapter_refuses_a_reference_that_moves(model_folder, tokenizer) -> None:
    spec = CausalLM(source=model_folder, lora=LoRA(r=4, alpha=8))
    with pytest.raises(ValueError, match=r"reference\.sync_every"):
        build(spec, tokenizer, reference=Reference(sync_every=2))


def test_the_seed_is_that_of_seed_everything_unless_it_is_given(language_model, tokenizer) -> None:
    L.seed_everything(7, verbose=False)
    assert build(language_model, tokenizer).seed == 7
    assert build(language_model, tokenizer, seed=3).seed == 3


def test_resuming_with_another_kl_coefficient_takes_the_new_one(language_model, tokenizer) -> None:
    module = build(language_model, tokenizer)
    module.kl_coef = 0.2  # as a controller would have moved it
    checkpoint: dict[str, Any] = {}
    module.on_save_checkpoint(checkpoint)
    same = build(language_model, tokenizer)
    same.on_load_checkpoint(checkpoint)
    assert same.kl_coef == 0.2
    other = build(language_model, tokenizer, reference=Reference(kl_coef=0.01))
    other.on_load_checkpoint(checkpoint)
    assert other.kl_coef == 0.01


def test_truncated_sampling_is_allowed_when_asked_for_and_its_mass_is_logged(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    module = build(
        language_model,
        tokenizer,
        sampling=Sampling(max_new_tokens=4, top_k=50),
        allow_truncated_sampling=True,
    )
    trainer = fit(module, prompts, tmp_path, steps=1)
    assert 0 < trainer.logged_metrics["rollout/kept_mass"] < 1
