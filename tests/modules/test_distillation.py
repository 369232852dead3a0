"""A policy that learns from a teacher on its own responses: alone, and beside rewards."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.datamodules import PromptDataModule
from lrlhf.models import CausalLM, LoRA
from lrlhf.models.loading.deferred_weights import is_deferred, reading
from lrlhf.modules import PPO, RLOO, Advantage, OptimizerConfig, Reference, Update
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling
from lrlhf.types import Experience
from tests.conftest import build_language_model
from tests.modules.policy_runs import SkewedEngine, assert_same, fit, letters, moved, sgd, weights
from tests.modules.test_rollout_queue import SaveAfter

TEMPERATURE = 0.8
"""Of the learner's responses."""
PLAIN = Update(max_grad_norm=math.inf)


def padded_logprobs(model: PreTrainedModel, experience: Experience) -> Tensor:
    """`[B, T, V]`: of the token in each column, from whole padded rows."""
    mask = experience.attention_mask
    logits = model(input_ids=experience.input_ids, attention_mask=mask.long()).logits
    logprobs = (logits / TEMPERATURE).log_softmax(dim=-1)
    return torch.cat([torch.zeros_like(logprobs[:, :1]), logprobs[:, :-1]], dim=1)


def of_tokens(logprobs: Tensor, experience: Experience) -> Tensor:
    return logprobs.gather(2, experience.input_ids[..., None])[..., 0]


def mean(values: Tensor, experience: Experience) -> Tensor:
    return values[experience.response_mask].mean()


def after_a_step(
    experience: Experience,
    tokenizer: PreTrainedTokenizerBase,
    loss: Callable[[Tensor], Tensor],
    rate: float = 0.5,
) -> dict[str, Tensor]:
    """What plain gradient descent on a loss of the policy's log-probabilities gives."""
    policy = build_language_model(tokenizer)
    loss(padded_logprobs(policy, experience)).backward()
    with torch.no_grad():
        for weight in policy.parameters():
            weight -= rate * weight.grad
    return weights(policy)


def teacher_of(spec: CausalLM, experience: Experience) -> Tensor:
    with torch.no_grad():
        return padded_logprobs(spec.load(), experience)


# ---- one step of each form, against the whole logits of padded rows


def test_in_the_reward_the_advantage_is_the_teachers_surprise(
    learner, train, tokenizer, other_model
) -> None:
    run = train(learner(teacher={"coef": 0.7}))
    experience = run.experience
    theirs = of_tokens(teacher_of(other_model, experience), experience)
    with torch.no_grad():
        own = of_tokens(padded_logprobs(build_language_model(tokenizer), experience), experience)
    expected = torch.where(experience.response_mask, 0.7 * (theirs - own), 0.0)
    torch.testing.assert_close(experience.advantages, expected, rtol=1e-4, atol=1e-5)
    after = after_a_step(
        experience, tokenizer, lambda p: -mean(expected * of_tokens(p, experience), experience)
    )
    assert_same(weights(run.module.policy), after, rtol=1e-4, atol=1e-5)


def divergence(own: Tensor, theirs: Tensor, beta: float) -> Tensor:
    """In other words than the library's: sums of `torch.nn.functional.kl_div`."""
    options: dict[str, Any] = {"reduction": "none", "log_target": True}
    if beta in (0, 1):
        first, second = (theirs, own) if beta == 0 else (own, theirs)
        return kl_div(second, first, **options).sum(-1)
    mixture = (beta * theirs.exp() + (1 - beta) * own.exp()).log()
    both = (kl_div(mixture, one, **options).sum(-1) for one in (theirs, own))
    return beta * next(both) + (1 - beta) * next(both)


def merged(logprobs: Tensor, kept: Tensor) -> Tensor:
    """Log-probabilities of some ids, and of all others together."""
    best = logprobs.gather(-1, kept)
    others = logprobs.scatter(-1, kept, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([best, others], dim=-1)


@pytest.mark.parametrize(
    ("beta", "top_k"), [(1.0, None), (0.0, None), (0.3, None), (1.0, 3), (0.5, 2)]
)
def test_in_the_loss_the_step_is_down_the_divergence(
    learner, train, tokenizer, other_model, beta: float, top_k: int | None
) -> None:
    run = train(learner(teacher={"placement": "loss", "beta": beta, "top_k": top_k, "coef": 0.6}))
    experience = run.experience
    theirs = teacher_of(other_model, experience)

    def loss(own: Tensor) -> Tensor:
        if top_k is None:
            return 0.6 * mean(divergence(own, theirs, beta), experience)
        kept = theirs.topk(top_k, dim=-1).indices
        return 0.6 * mean(divergence(merged(own, kept), merged(theirs, kept), beta), experience)

    after = after_a_step(experience, tokenizer, loss)
    assert_same(weights(run.module.policy), after, rtol=1e-4, atol=1e-5)
    assert run.logged["teacher/loss"] == pytest.approx(run.logged["train/loss"] / 0.6, rel=1e-5)


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_the_distance_is_measured_over_the_vocabulary_and_on_the_sampled_tokens(
    learner, train, tokenizer, other_model, placement: str
) -> None:
    run = train(learner(teacher={"placement": placement}))
    experience = run.experience
    theirs = teacher_of(other_model, experience)
    with torch.no_grad():
        own = padded_logprobs(build_language_model(tokenizer), experience)
    distance = (own.exp() * (own - theirs)).sum(-1)
    sampled = of_tokens(own, experience) - of_tokens(theirs, experience)
    agrees = (own.argmax(-1) == theirs.argmax(-1)).float()
    for name, values in (
        ("reverse_kl", distance),
        ("reverse_kl_sampled", sampled),
        ("top_agreement", agrees),
    ):
        expected = mean(values, experience).item()
        assert run.logged[f"teacher/{name}"] == pytest.approx(expected, rel=1e-4), name


def test_an_evaluation_measures_the_distance_of_each_response(learner, train) -> None:
    run = train(learner(), limit_val_batches=1, num_sanity_val_steps=0, val_check_interval=1)
    names = {f"eval/teacher_{name}" for name in ("reverse_kl", "reverse_kl_sampled")}
    assert names | {"eval/teacher_top_agreement"} <= run.logged.keys()
    assert run.logged["eval/teacher_reverse_kl"] > 0.1
    assert 0 <= run.logged["eval/teacher_top_agreement"] <= 1
    assert run.module.evaluation_names() >= names


def test_an_evaluation_without_training_reads_a_teacher_that_was_built_unread(
    learner, prompts, tmp_path, model_folder
) -> None:
    def found(later: bool) -> float:
        with reading(later=later):
            module = learner(CausalLM(source=model_folder))
        assert is_deferred(module.teacher.model.model) == later
        trainer = L.Trainer(logger=False, accelerator="cpu", devices=1, default_root_dir=tmp_path)
        data = PromptDataModule(train=str(prompts), batch_size=4, val=str(prompts))
        trainer.validate(module, datamodule=data, verbose=False)
        return float(trainer.logged_metrics["eval/teacher_reverse_kl"])

    assert found(True) == pytest.approx(found(False), rel=1e-6)
    assert found(False) > 0.1


# ---- what must not matter


@pytest.mark.parametrize(
    "teacher", [{}, {"placement": "loss"}, {"placement": "loss", "top_k": 4}], ids=str
)
def test_micro_batches_chunks_and_padding_do_not_matter(
    learner, train, model_folder, teacher: dict[str, Any]
) -> None:
    runs = []
    for attention, update in (
        ("sdpa", PLAIN),
        ("eager", Update(max_grad_norm=math.inf, micro_batch_tokens=50, logprob_chunk=3)),
    ):
        policy = CausalLM(source=model_folder, attn_implementation=attention)
        runs.append(
            train(learner(policy, teacher=teacher, update=update, optimizer=sgd(1e-2)), steps=2)
        )
    first, second = runs
    assert first.logged["perf/padding_fraction"] == 0
    assert moved(first.before, first.after)
    assert_same(first.after, second.after, rtol=1e-4, atol=1e-6)
    for name in ("teacher/reverse_kl", "teacher/reverse_kl_sampled", "teacher/top_agreement"):
        assert second.logged[name] == pytest.approx(first.logged[name], rel=1e-3), name


@pytest.mark.parametrize("placement", ["reward", "loss"])
@pytest.mark.parametrize("kind", [RLOO, PPO])
def test_no_micro_batch_is_larger_to_a_teacher_that_pads_than_to_a_policy_that_packs(
    learner, train, other_model, model_folder, kind: Any, placement: str
) -> None:
    limit = 40
    module = learner(
        CausalLM(source=model_folder, attn_implementation="sdpa"),
        kind=kind,
        rewards=Rewards([letters]),
        # responses of many lengths: padded, rows take more than they do packed
        sampling=Sampling(max_new_tokens=24, stop=("a", "e", "i", "o", "s", "t")),
        update=Update(micro_batch_tokens=limit, loss="token_clip"),
        teacher={
            "model": replace(other_model, attn_implementation="eager"),
            "placement": placement,
        },
    )
    sizes: list[int] = []

    def note(_: Any, __: Any, given: dict[str, Any]) -> None:
        sizes.append(given["attention_mask"].numel())

    body = module.teacher.model.model.base_model
    body.register_forward_pre_hook(note, with_kwargs=True)
    run = train(module)
    assert run.experience.attention_mask.sum(1).unique().numel() > 1
    assert len(sizes) > 1
    assert max(sizes) <= limit


@pytest.mark.parametrize("teacher", [{"discount": 1.0}, {"placement": "loss", "top_k": 4}], ids=str)
def test_a_resumed_run_goes_on_as_the_whole_one(
    learner, prompts, tmp_path, teacher: dict[str, Any]
) -> None:
    adam = OptimizerConfig(lr=1e-2)
    whole = learner(teacher=teacher, optimizer=adam)
    file = tmp_path / "first.ckpt"
    fit(whole, prompts, tmp_path, steps=3, callbacks=[SaveAfter(1, file)], limit_val_batches=0)
    resumed = learner(teacher=teacher, optimizer=adam)
    fit(resumed, prompts, tmp_path, steps=3, ckpt_path=str(file), limit_val_batches=0)
    assert_same(weights(whole), weights(resumed))


def test_a_teacher_of_the_policys_weights_moves_nothing(learner, train, model_folder) -> None:
    for placement in ("reward", "loss"):
        run = train(learner(teacher={"model": model_folder, "placement": placement}))
        assert_same(run.before, run.after, rtol=0, atol=1e-6)
        assert run.logged["teacher/reverse_kl"] == pytest.approx(0, abs=1e-6)
        assert run.logged["teacher/top_agreement"] == 1


# ---- beside what else a run may have


def test_extra_samples_rewards_the_teachers_term_is_added_to_the_advantages(learner, train) -> None:
    options: dict[str, Any] = {
        "rewards": Rewards([letters]),
        "algorithm": "grpo",
        "reference": Reference(kl_coef=0.0),
    }
    with_both = train(learner(**options))
    rewards_alone = train(learner(teacher=None, **options))
    teacher_alone = train(learner())
    assert torch.equal(with_both.experience.input_ids, teacher_alone.experience.input_ids)
    torch.testing.assert_close(
        with_both.experience.advantages,
        rewards_alone.experience.advantages + teacher_alone.experience.advantages,
    )
    assert with_both.experience.scores.std() > 0


def test_rewards_may_be_logged_beside_a_teacher_that_alone_is_learnt_from(learner, train) -> None:
    both = train(learner(rewards=Rewards([letters]), algorithm="distillation"))
    alone = train(learner())
    assert_same(both.after, alone.after)
    assert moved(both.before, both.after)
    assert both.logged["rollout/score"] > 0
    assert both.module.eval_metric == "eval/score"


def test_advantages_are_bounded_with_the_teachers_term(learner, train) -> None:
    run = train(learner(advantage=Advantage(clip=0.5)))
    assert run.experience.advantages.abs().max() == 0.5
    assert 0 < run.logged["rollout/advantage_clip_fraction"] < 1


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_a_critic_values_the_rewards_beside_a_teacher(learner, train, placement: str) -> None:
    run = train(learner(kind=PPO, rewards=Rewards([letters]), teacher={"placement": placement}))
    assert {"value/loss", "teacher/reverse_kl"} <= run.logged.keys()
    assert moved(run.before, run.after)


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_adapters_learn_from_a_teacher(learner, train, model_folder, placement: str) -> None:
    policy = CausalLM(source=model_folder, lora=LoRA(r=4))
    run = train(learner(policy, teacher={"placement": placement}, optimizer=sgd(0.5)), steps=3)
    learnt = {name for name, weight in run.after.items() if not weight.equal(run.before[name])}
    assert learnt
    assert all("lora_" in name for name in learnt)


def test_what_another_policy_sampled_is_compared_with_the_policys_own_probabilities(
    learner, train, tokenizer, other_model
) -> None:
    run = train(learner(engine=SkewedEngine(spread=0.3)))
    experience = run.experience
    assert experience.importance_weights is not None
    theirs = of_tokens(teacher_of(other_model, experience), experience)
    with torch.no_grad():
        own = of_tokens(padded_logprobs(build_language_model(tokenizer), experience), experience)
    expected = torch.where(experience.response_mask, theirs - own, 0.0)
    torch.testing.assert_close(experience.advantages, expected, rtol=1e-4, atol=1e-5)
