"""PPO end to end on tiny models: what it computes, what must not matter, and every option."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.callbacks import EMA, KLControl, RLCheckpoint, RolloutLog
from lrlhf.datamodules import PromptDataModule, ReplayDataModule
from lrlhf.models import CausalLM, LoRA, ScoreModel, ValueHead, ValueModel, ValueNetwork
from lrlhf.modules import (
    PPO,
    RLOO,
    Advantage,
    Critic,
    DynamicSampling,
    OptimizerConfig,
    Reference,
    Update,
)
from lrlhf.rewards import Rewards
from lrlhf.rollout import Capabilities, RolloutEngine, Sampling
from lrlhf.types import Experience
from tests.conftest import build_language_model
from tests.modules.policy_runs import Watcher, fit, letters, weights

SGD = "torch.optim.SGD"
ONE_STEP = Update(loss="token_clip", aggregate="token_mean", num_minibatches=1)


def sgd(lr: float) -> OptimizerConfig:
    return OptimizerConfig(lr=lr, optimizer_class=SGD)


def own_critic(tokenizer: PreTrainedTokenizerBase, **options: Any) -> Critic:
    """A critic with a backbone of its own, and a head that is not at its start of zero."""
    backbone = build_language_model(tokenizer, seed=3).base_model
    head = ValueHead(32, "linear")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        torch.nn.init.normal_(head.output.weight, std=0.1)
    network = ValueNetwork(backbone, head)
    return Critic(model=network, **({"optimizer": OptimizerConfig(lr=1e-3)} | options))


def critic_of(kind: str, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Critic:
    if kind == "own":
        return own_critic(tokenizer, **options)
    return Critic(**({"optimizer": OptimizerConfig(lr=1e-2)} | options))


def build(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **options: Any) -> PPO:
    defaults: dict[str, Any] = {
        "num_generations": 2,
        "sampling": Sampling(max_new_tokens=6),
        "optimizer": OptimizerConfig(lr=1e-3),
        "critic": Critic(optimizer=OptimizerConfig(lr=1e-2)),
        "update": ONE_STEP,
    }
    return PPO(model, Rewards([letters]), tokenizer=tokenizer, **(defaults | options))


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    return any(not torch.equal(before[name], value) for name, value in after.items())


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor], **tolerance: float) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        if tolerance:
            torch.testing.assert_close(second[name], value, msg=name, **tolerance)
        else:
            assert torch.equal(second[name], value), name


@pytest.mark.parametrize("kind", ["head", "own"])
def test_actor_and_critic_train_and_say_how(
    language_model, tokenizer, prompts, tmp_path, kind: str
) -> None:
    module = build(language_model, tokenizer, critic=critic_of(kind, tokenizer))
    before = {role: weights(model) for role, model in module.trainable_models().items()}
    trainer = fit(module, prompts, tmp_path, steps=2)
    for role, model in module.trainable_models().items():
        assert moved(before[role], weights(model)), role
    for key in (
        "value/loss",
        "value/mean",
        "value/clip_fraction",
        "value/explained_variance",
        "value/grad_norm",
        "value/lr",
        "policy/grad_norm",
        "policy/loss",
        "train/lr",
        "rollout/score",
    ):
        assert torch.isfinite(trainer.logged_metrics[key]), key


def test_an_iteration_takes_four_steps_and_its_ratio_is_clipped(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    # in Python as in YAML: what an `Update` does not say, the module does
    for given in ({}, {"update": Update(loss="token_clip", aggregate="token_mean")}):
        module = PPO(
            language_model,
            Rewards([letters]),
            tokenizer=tokenizer,
            sampling=Sampling(max_new_tokens=6),
            optimizer=OptimizerConfig(lr=1e-2),
            **given,
        )
        taken: list[int] = []
        trainer = fit(module, prompts, tmp_path, steps=1, callbacks=[CountsSteps(taken)])
        assert taken == [0, 1] * 4
        assert trainer.logged_metrics["policy/clip_fraction"] > 0


class CountsSteps(L.Callback):
    """Takes down which optimizer steps."""

    def __init__(self, taken: list[int]) -> None:
        self.taken = taken

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for index, optimizer in enumerate(trainer.optimizers):
            optimizer.register_step_post_hook(lambda *_, index=index: self.taken.append(index))


@pytest.mark.parametrize("kind", ["head", "own"])
def test_the_values_follow_the_unit_and_the_mean_of_the_scores(
    tokenizer, prompts, tmp_path, kind: str
) -> None:
    def in_marks(completions: Sequence[str]) -> list[float]:
        return [1000 * score - 5000 for score in letters(completions)]

    values = []
    for reward in (letters, in_marks):
        backbone = build_language_model(tokenizer, seed=3).base_model
        network = ValueNetwork(backbone, ValueHead(32, "linear", relative=True))
        module = PPO(
            build_language_model(tokenizer),
            Rewards([reward]),
            tokenizer=tokenizer,
            sampling=Sampling(max_new_tokens=6),
            reference=Reference(kl_coef=0.0),
            critic=Critic(model=network if kind == "own" else None, max_grad_norm=math.inf),
        )
        watcher = Watcher()
        fit(module, prompts, tmp_path, steps=2, callbacks=[watcher])
        values.append([e.values[e.response_mask] for e in watcher.experiences])
        first = watcher.experiences[0]
        # before it has learnt anything a new critic expects the mean
        assert values[-1][0].tolist() == pytest.approx(
            [float(first.scores.mean())] * len(values[-1][0]), rel=1e-4
        )
    assert values[0][1].std() > 1e-3
    torch.testing.assert_close(
        1000 * values[0][1] - 5000, values[1][1], rtol=1e-3, atol=1e-2 * 1000 * values[0][1].std()
    )


def test_new_weights_of_a_critic_have_a_learning_rate_of_their_own(
    language_model, tokenizer
) -> None:
    def rates(critic: Critic) -> set[float]:
        module = build(language_model, tokenizer, critic=critic)
        optimizer = module.values.optimizer(100).optimizer
        return {group["lr"] for group in optimizer.param_groups}

    def network(relative: bool) -> ValueNetwork:
        backbone = build_language_model(tokenizer, seed=3).base_model
        return ValueNetwork(backbone, ValueHead(32, "linear", relative=relative))

    new = 0.5 / 32
    assert rates(Critic(optimizer=OptimizerConfig(weight_decay=0.01))) == {new}
    assert rates(Critic(model=network(True))) == {1e-5, new}
    # a head that was trained before, or a number that was asked for
    assert rates(Critic(model=network(False))) == {1e-5}
    assert rates(Critic(model=network(True), optimizer=OptimizerConfig(lr=1e-4))) == {1e-4}


def reference_step(
    policy: PreTrainedModel,
    critic: ValueNetwork,
    experience: Experience,
    *,
    kl_coef: float,
    weight_of_ratio: Callable[[float], float] = lambda ratio: 1.0,
) -> dict[str, Tensor]:
    """One on-policy PPO step, token by token and in plain Python where the module has tensors.

    Rewards are -kl_coef · (log p - log ref) per token, the score on the last one; GAE with
    γ = 1, λ = 0.95; advantages whitened over all tokens; the loss of every token counts with a
    weight made of its probability over that which the engine reported.
    """
    gamma, lam = 1.0, 0.95
    assert experience.ref_logprobs is not None
    logits = policy(experience.input_ids, attention_mask=experience.attention_mask.long()).logits
    hidden = critic.backbone(
        experience.input_ids, attention_mask=experience.attention_mask.long()
    ).last_hidden_state
    logprobs, values, advantages, targets = [], [], [], []
    given: list[float] = []
    for row in range(len(experience)):
        columns = experience.response_mask[row].nonzero().flatten().tolist()
        row_logprobs = [
            torch.log_softmax(logits[row, c - 1], -1)[experience.input_ids[row, c]] for c in columns
        ]
        row_values = [
            hidden[row, c - 1] @ critic.head.output.weight[0] + critic.head.bias for c in columns
        ]
        rewards = [
            -kl_coef * (float(p.detach()) - float(experience.ref_logprobs[row, c]))
            for p, c in zip(row_logprobs, columns, strict=True)
        ]
        rewards[-1] += float(experience.scores[row])
        given += [
            weight_of_ratio(
                math.exp(float(p.detach()) - float(experience.sampling_logprobs[row, c]))
            )
            for p, c in zip(row_logprobs, columns, strict=True)
        ]
        following = 0.0
        row_advantages = []
        for index in reversed(range(len(columns))):
            is_last = index == len(columns) - 1
            next_value = 0.0 if is_last else float(row_values[index + 1].detach())
            delta = rewards[index] + gamma * next_value - float(row_values[index].detach())
            following = delta + gamma * lam * following
            row_advantages.insert(0, following)
        logprobs += row_logprobs
        values += row_values
        advantages += row_advantages
        targets += [a + float(v.detach()) for a, v in zip(row_advantages, row_values, strict=True)]
    mean = sum(advantages) / len(advantages)
    spread = math.sqrt(sum((a - mean) ** 2 for a in advantages) / (len(advantages) - 1))
    whitened = [(a - mean) / spread for a in advantages]
    # on-policy the ratio is 1, so the surrogate's gradient is that of -A log p
    surrogate = -sum(w * a * p for w, a, p in zip(given, whitened, logprobs, strict=True)) / len(
        whitened
    )
    errors = sum((v - t) ** 2 for v, t in zip(values, targets, strict=True)) / (2 * len(targets))
    parameters = dict(policy.named_parameters())
    gradients = torch.autograd.grad(surrogate, list(parameters.values()))
    result = {f"policy.{n}": g for n, g in zip(parameters, gradients, strict=True)}
    parameters = dict(critic.named_parameters())
    gradients = torch.autograd.grad(errors, list(parameters.values()))
    return result | {f"critic.{n}": g for n, g in zip(parameters, gradients, strict=True)}


def test_one_step_is_that_of_an_independent_computation(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    other = tmp_path / "reference"
    build_language_model(tokenizer, seed=9).save_pretrained(other)
    tokenizer.save_pretrained(other)
    module = build(
        language_model,
        tokenizer,
        critic=own_critic(tokenizer, optimizer=sgd(0.1), max_grad_norm=math.inf),
        optimizer=sgd(0.1),
        update=replace(ONE_STEP, max_grad_norm=math.inf),
        reference=Reference(kl_coef=0.1, model=CausalLM(source=str(other))),
    )
    policy, critic = copy.deepcopy(module.policy), copy.deepcopy(module.critic)
    watcher = Watcher()
    fit(module, prompts, tmp_path, steps=1, callbacks=[watcher])
    gradients = reference_step(policy, critic, watcher.experiences[0], kl_coef=0.1)
    trained = dict(module.policy.named_parameters()), dict(module.critic.named_parameters())
    for role, model, after in zip(("policy", "critic"), (policy, critic), trained, strict=True):
        for name, weight in model.named_parameters():
            expected = weight - 0.1 * gradients[f"{role}.{name}"]
            torch.testing.assert_close(
                after[name], expected, rtol=1e-4, atol=1e-6, msg=f"{role}.{name}"
            )


@pytest.mark.parametrize("kind", ["head", "own"])
@pytest.mark.parametrize("frozen", ["policy", "critic"])
def test_one_of_the_two_can_wait_while_the_other_learns(
    language_model, tokenizer, prompts, tmp_path, kind: str, frozen: str
) -> None:
    critic_steps, policy_steps = (2, 0) if frozen == "critic" else (0, 2)
    module = build(
        language_model,
        tokenizer,
        critic=critic_of(kind, tokenizer, freeze_steps=critic_steps),
        update=Update(loss="token_clip", freeze_steps=policy_steps),
    )
    models = module.trainable_models()
    before = {role: weights(model) for role, model in models.items()}
    fit(module, prompts, tmp_path, steps=2)
    for role, model in models.items():
        assert moved(before[role], weights(model)) == (role != frozen), role
    fit(module, prompts, tmp_path, steps=3)  # counts anew: two frozen steps, then one that moves
    assert moved(before[frozen], weights(models[frozen]))


@pytest.mark.parametrize("kind", ["head", "own"])
def test_a_huge_gradient_of_the_critic_does_not_reach_the_actor(
    tokenizer, prompts, tmp_path, kind: str
) -> None:
    results = []
    for factor in (1.0, 1e6):
        module = build(
            build_language_model(tokenizer), tokenizer, critic=critic_of(kind, tokenizer)
        )
        for weight in module.trainable_models()["critic"].parameters():
            weight.register_hook(lambda gradient, factor=factor: gradient * factor)
        trainer = fit(module, prompts, tmp_path, steps=1)
        results.append((weights(module.policy), trainer.logged_metrics))
    assert_same(results[0][0], results[1][0])
    norms = [float(metrics["value/grad_norm"]) for _, metrics in results]
    assert norms[1] == pytest.approx(norms[0] * 1e6, rel=1e-4)
    assert results[0][1]["policy/grad_norm"] == results[1][1]["policy/grad_norm"]


def test_each_gradient_is_clipped_to_its_own_norm(tokenizer, prompts, tmp_path) -> None:
    steps = {}
    for bound in (math.inf, 1e-3):
        module = build(
            build_language_model(tokenizer),
            tokenizer,
            critic=own_critic(tokenizer, optimizer=sgd(1.0), max_grad_norm=bound),
            optimizer=sgd(0.1),
        )
        start = weights(module.critic)
        fit(module, prompts, tmp_path, steps=1)
        after = weights(module.critic)
        steps[bound] = math.sqrt(
            sum(float((after[n] - v).square().sum()) for n, v in start.items())
        )
    assert steps[1e-3] == pytest.approx(1e-3, rel=1e-2)  # lr 1: the step is the gradient
    assert steps[math.inf] > 1e-2


def test_a_head_moves_the_backbone_only_when_asked_to(tokenizer, prompts, tmp_path) -> None:
    results = []
    for coefficient in (0.0, 0.0, 10.0):
        module = build(
            build_language_model(tokenizer),
            tokenizer,
            critic=Critic(optimizer=OptimizerConfig(lr=1e-2), backbone_coef=coefficient),
        )
        torch.nn.init.normal_(
            module.value_head.output.weight, generator=torch.Generator().manual_seed(0)
        )
        fit(module, prompts, tmp_path, steps=1)
        results.append(weights(module.policy))
    assert_same(results[0], results[1])
    assert moved(results[0], results[2])


@pytest.mark.parametrize("kind", ["head", "own"])
@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean", "constant"])
def test_micro_batches_do_not_change_the_update(
    tokenizer, prompts, tmp_path, kind: str, aggregate: str
) -> None:
    results = []
    parts = []
    # four prompts of 5 or 6 tokens, two responses of 6 to each: all, two prompts, or one row
    for budget in (None, 40, 6):
        module = build(
            build_language_model(tokenizer),
            tokenizer,
            critic=critic_of(kind, tokenizer, optimizer=sgd(0.1), backbone_coef=0.0),
            optimizer=sgd(0.1),
            update=Update(
                loss="token_clip",
                aggregate=aggregate,
                micro_batch_tokens=budget,
                entropy_coef=0.01,
                high_entropy_fraction=0.5,
                num_minibatches=1,
            ),
        )
        count = 0

        def counting(loss: Tensor, *, last: bool, plain: Any = module.gradients.backward) -> None:
            nonlocal count
            count += 1
            plain(loss, last=last)

        module.gradients.backward = counting
        fit(module, prompts, tmp_path, steps=1)
        parts.append(count)
        results.append(
            {
                f"{role}.{name}": value
                for role, model in module.trainable_models().items()
                for name, value in weights(model).items()
            }
        )
    once = 1 if kind == "head" else 2  # two backward passes where there are two networks
    assert parts == [once, 2 * once, 8 * once]
    for other in results[1:]:
        assert_same(results[0], other, rtol=1e-4, atol=1e-6)


# ---------------------------------------------------------------- state


def stateful(tokenizer: PreTrainedTokenizerBase, folder: Path) -> tuple[PPO, list[L.Callback]]:
    module = build(
        build_language_model(tokenizer),
        tokenizer,
        critic=own_critic(tokenizer, optimizer=OptimizerConfig(lr=1e-3, schedule="linear")),
        optimizer=OptimizerConfig(lr=1e-3, schedule="cosine", warmup_steps=2),
        advantage=Advantage(estimator="gae", scale_rewards="mean_std"),
        reference=Reference(kl_coef=0.1, sync_every=2),
        update=Update(loss="token_clip", num_iterations=2, minibatch_size=4),
    )
    callbacks: list[L.Callback] = [
        EMA(decay=0.9),
        KLControl(target=0.01, horizon=50),
        RLCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1),
    ]
    return module, callbacks


def everything(module: PPO, trainer: L.Trainer, callbacks: list[L.Callback]) -> dict[str, Any]:
    """All that a resumed run needs, flattened to numbers and tensors."""
    state: dict[str, Any] = {
        "policy": module.policy.state_dict(),
        "critic": module.critic.state_dict(),
        "reference": module.parts.reference.state_dict(),
        "kl_coef": module.kl_coef,
        "moments": module.parts.moments.state_dict(),
        "ema": callbacks[0].state_dict(),
        "kl_control": callbacks[1].state_dict(),
        "step": trainer.global_step,
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "rates": [
            group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups
        ],
    }
    return copy.deepcopy(state)


def assert_equal_state(first: Any, second: Any, where: str = "") -> None:
    if isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for key in first:
            assert_equal_state(first[key], second[key], f"{where}.{key}")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), where
        for index, pair in enumerate(zip(first, second, strict=True)):
            assert_equal_state(*pair, f"{where}[{index}]")
    elif isinstance(first, Tensor):
        assert torch.equal(first, second), where
    else:
        assert first == second, where


def test_a_resumed_run_ends_in_the_same_state(tokenizer, prompts, tmp_path) -> None:
    module, callbacks = stateful(tokenizer, tmp_path / "straight")
    trainer = fit(module, prompts, tmp_path, steps=5, callbacks=callbacks)
    expected = everything(module, trainer, callbacks)
    resumed, callbacks = stateful(tokenizer, tmp_path / "straight")
    checkpoint = str(tmp_path / "straight" / "step=000003.ckpt")
    trainer = fit(
        resumed,
        prompts,
        tmp_path,
        steps=5,
        callbacks=callbacks,
        ckpt_path=checkpoint,
    )
    assert_equal_state(everything(resumed, trainer, callbacks), expected)
    assert expected["kl_coef"] != 0.1
    assert expected["moments"]["count"] == 5 * 8


def spoil(state: Any) -> Any:
    """Change every number of a nested state."""
    if isinstance(state, dict):
        return {key: spoil(value) for key, value in state.items()}
    if isinstance(state, Tensor):
        return state + 1 if state.is_floating_point() else state
    return state + 1 if isinstance(state, float) else state


def test_a_checkpoint_brings_back_each_piece_of_state(tokenizer, prompts, tmp_path) -> None:
    module, callbacks = stateful(tokenizer, tmp_path / "checkpoints")
    trainer = fit(module, prompts, tmp_path, steps=3, callbacks=callbacks)
    saved = everything(module, trainer, callbacks)
    spoilt, others = stateful(tokenizer, tmp_path / "checkpoints")
    with torch.no_grad():
        for parameter in [*spoilt.policy.parameters(), *spoilt.critic.parameters()]:
            parameter.add_(1.0)
    spoilt.kl_coef = 77.0
    spoilt.parts.moments.load_state_dict(spoil(saved["moments"]))
    others[0].load_state_dict(spoil(saved["ema"]))
    others[1].load_state_dict(spoil(saved["kl_control"]))
    # as many steps as the checkpoint has: everything is restored, and nothing is trained
    trainer = fit(
        spoilt,
        prompts,
        tmp_path,
        steps=3,
        callbacks=others,
        ckpt_path=str(tmp_path / "checkpoints" / "last.ckpt"),
    )
    assert_equal_state(everything(spoilt, trainer, others), saved)


# ---------------------------------------------------------------- options


def first_experience(module: PPO, prompts: Path, folder: Path, **options: Any) -> Experience:
    watcher = Watcher()
    fit(module, prompts, folder, steps=1, callbacks=[watcher], **options)
    return watcher.experiences[0]


def test_returns_are_advantages_plus_values_before_they_are_whitened(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    module = build(
        language_model,
        tokenizer,
        critic=own_critic(tokenizer),
        reference=Reference(kl_coef=0.0),
        advantage=Advantage(estimator="gae", options={"lam": 1.0, "gamma": 1.0}),
    )
    experience = first_experience(module, prompts, tmp_path)
    # Monte Carlo without a KL penalty: the return of every token is the score
    expected = torch.where(experience.response_mask, experience.scores[:, None], 0.0)
    torch.testing.assert_close(experience.returns, expected, rtol=1e-5, atol=1e-6)
    kept = experience.advantages[experience.response_mask]
    assert float(kept.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(kept.std()) == pytest.approx(1.0, abs=1e-4)


def test_the_discount_reaches_the_returns(language_model, tokenizer, prompts, tmp_path) -> None:
    module = build(
        language_model,
        tokenizer,
        reference=Reference(kl_coef=0.0),
        advantage=Advantage(estimator="gae", options={"lam": 1.0, "gamma": 0.5}),
    )
    experience = first_experience(module, prompts, tmp_path)
    row = experience.response_mask[0].nonzero().flatten()
    steps = torch.arange(len(row) - 1, -1, -1)
    expected = experience.scores[0] * 0.5**steps
    torch.testing.assert_close(experience.returns[0, row], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", [None, "k1", "k2", "k3"])
def test_the_penalty_in_the_reward_is_the_estimate_that_was_asked_for(
    language_model, tokenizer, prompts, tmp_path, estimator: str | None
) -> None:
    other = tmp_path / "reference"
    build_language_model(tokenizer, seed=9).save_pretrained(other)
    tokenizer.save_pretrained(other)
    reference = Reference(kl_coef=0.1, kl_estimator=estimator, model=CausalLM(source=str(other)))
    module = build(
        language_model,
        tokenizer,
        reference=reference,
        advantage=Advantage(estimator="gae", options={"lam": 1.0}),
    )
    experience = first_experience(module, prompts, tmp_path)
    gap = experience.old_logprobs - experience.ref_logprobs
    penalty = {"k1": gap, "k2": gap**2 / 2, "k3": torch.exp(-gap) - 1 + gap}[estimator or "k1"]
    # Monte Carlo: the return of the first token is the score less every token's penalty
    first = experience.response_mask.long().argmax(dim=1, keepdim=True)
    expected = experience.scores - 0.1 * (penalty * experience.response_mask).sum(dim=1)
    found = experience.returns.gather(1, first)[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_scores_are_scaled_by_their_running_deviation(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    def returns(scale: str) -> tuple[Tensor, Experience]:
        module = build(
            copy.deepcopy(language_model),
            tokenizer,
            reference=Reference(kl_coef=0.0),
            advantage=Advantage(estimator="gae", options={"lam": 1.0}, scale_rewards=scale),
        )
        experience = first_experience(module, prompts, tmp_path)
        last = experience.response_mask.long().cumsum(1).argmax(1)
        return experience.returns.gather(1, last[:, None])[:, 0], experience

    plain, experience = returns("none")
    torch.testing.assert_close(plain, experience.scores)
    scores = experience.scores
    torch.testing.assert_close(returns("std")[0], scores / scores.std(), rtol=1e-4, atol=1e-5)
    centred = (scores - scores.mean()) / scores.std()
    torch.testing.assert_close(returns("mean_std")[0], centred, rtol=1e-4, atol=1e-5)


def test_clipped_rewards_and_advantages_are_counted_before_they_are_clipped(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    options: dict[str, Any] = {"reward_clip_range": (0.1, 0.2), "clip": 0.5}
    module = build(language_model, tokenizer, advantage=Advantage(estimator="gae", **options))
    watcher = Watcher()
    trainer = fit(module, prompts, tmp_path, steps=1, callbacks=[watcher])
    experience = watcher.experiences[0]
    outside = (experience.scores < 0.1) | (experience.scores > 0.2)
    assert 0 < float(outside.float().mean()) < 1
    logged = trainer.logged_metrics
    assert float(logged["rollout/reward_clip_fraction"]) == pytest.approx(
        float(outside.float().mean())
    )
    assert float(experience.advantages.abs().max()) == 0.5
    at_bound = experience.advantages[experience.response_mask].abs() == 0.5
    assert float(logged["rollout/advantage_clip_fraction"]) == pytest.approx(
        float(at_bound.float().mean())
    )


def test_dynamic_sampling_draws_until_the_groups_differ(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    def by_prompt(prompts: list[str], completions: list[str]) -> list[float]:
        # "say a" to "say h" always score alike, the others by their letters
        return [
            0.0 if prompt[-1] < "i" else letters([completion])[0]
            for prompt, completion in zip(prompts, completions, strict=True)
        ]

    module = PPO(
        language_model,
        Rewards([by_prompt]),
        tokenizer=tokenizer,
        num_generations=4,
        sampling=Sampling(max_new_tokens=6),
        dynamic_sampling=DynamicSampling(prompts=3),
    )
    watcher = Watcher()
    data = PromptDataModule(train=str(prompts), batch_size=16)
    trainer = fit(module, prompts, tmp_path, steps=1, callbacks=[watcher], data=data)
    experience, records = watcher.experiences[0], watcher.records[0]
    assert len(experience) == 12
    assert {record["prompt"][-1] for record in records}.isdisjoint("abcdefgh")
    assert bool(experience.counted.all())
    groups = [records[row]["group"] for row in range(12)]
    assert [groups.count(group) for group in dict.fromkeys(groups)] == [4, 4, 4]
    assert float(trainer.logged_metrics["rollout/rounds"]) > 1
    assert experience.scores.view(3, 4).std(dim=1).min() > 0


def test_dynamic_sampling_ends_with_the_batch_and_leaves_its_fillers_out(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    module = PPO(
        language_model,
        Rewards([lambda completions: [1.0] * len(completions)], names=["same"]),
        tokenizer=tokenizer,
        num_generations=2,
        sampling=Sampling(max_new_tokens=4),
        dynamic_sampling=DynamicSampling(prompts=2),
    )
    before = weights(module.policy)
    watcher = Watcher()
    trainer = fit(module, prompts, tmp_path, steps=1, callbacks=[watcher])
    experience = watcher.experiences[0]
    assert float(trainer.logged_metrics["rollout/rounds"]) == 2  # 4 prompts, 2 at a time
    assert float(trainer.logged_metrics["rollout/filler_fraction"]) == 1
    assert not experience.counted.any()
    assert not experience.loss_mask.any()
    assert_same(before, weights(module.policy))


def test_only_the_least_certain_tokens_are_trained_on(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    update = Update(loss="token_clip", high_entropy_fraction=0.34)
    experience = first_experience(
        build(copy.deepcopy(language_model), tokenizer, update=update), prompts, tmp_path
    )
    logits = language_model(
        experience.input_ids, attention_mask=experience.attention_mask.long()
    ).logits
    entropy = torch.distributions.Categorical(logits=logits[:, :-1]).entropy()
    assert experience.selected is not None
    for row in range(len(experience)):
        columns = experience.response_mask[row].nonzero().flatten()
        best = entropy[row, columns - 1].topk(max(1, int(0.34 * len(columns)))).indices
        chosen = experience.selected[row].nonzero().flatten()
        assert set(chosen.tolist()) == set(columns[best].tolist())


@pytest.mark.parametrize(
    "changed",
    [
        {"aggregate": "sequence_mean"},
        {"aggregate": "constant"},
        {"entropy_coef": 0.5},
        {"high_entropy_fraction": 0.34},
        {"options": {"clip_high": 0.0, "clip_low": 0.0}},
        {"options": {"dual_clip": 1.001}},
        {"loss": "cpgd", "options": {"drift_coef": 1.0}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_an_option_of_the_update_changes_the_update(
    tokenizer, prompts, tmp_path, changed: dict[str, Any]
) -> None:
    base: dict[str, Any] = {
        "loss": changed.get("loss", "token_clip"),
        "aggregate": "token_mean",
        "num_iterations": 3,
    }
    results = []
    for options in (base, base | changed):
        module = build(
            build_language_model(tokenizer),
            tokenizer,
            optimizer=OptimizerConfig(lr=1e-2),
            update=Update(**options),
            # responses of different lengths: means over tokens and over sequences differ
            sampling=Sampling(max_new_tokens=6, stop=["a", "e", "i", "o"]),
        )
        fit(module, prompts, tmp_path, steps=2)
        results.append(weights(module.policy))
    assert moved(*results)


def test_the_value_clip_holds_the_critic_back(tokenizer, prompts, tmp_path) -> None:
    fractions, ends = [], []
    for bound in (None, 1e-4):
        module = build(
            build_language_model(tokenizer),
            tokenizer,
            critic=own_critic(tokenizer, value_clip_range=bound),
            update=Update(loss="token_clip", num_iterations=4),
        )
        trainer = fit(module, prompts, tmp_path, steps=1)
        fractions.append(trainer.logged_metrics.get("value/clip_fraction"))
        ends.append(weights(module.critic))
    assert fractions[0] is None
    assert float(fractions[1]) > 0.3
    assert moved(*ends)


def test_pretraining_texts_become_likelier(tokenizer, prompts, tmp_path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(f'{{"text": "the quick brown fox {i}"}}' for i in range(8)))
    ids = torch.tensor([tokenizer("the quick brown fox 3")["input_ids"]])
    likelihoods = []
    for coefficient in (0.0, 5.0):
        model = build_language_model(tokenizer)
        module = build(
            model,
            tokenizer,
            optimizer=OptimizerConfig(lr=1e-2),
            update=Update(loss="token_clip", pretraining_coef=coefficient, minibatch_size=4),
        )
        extra = {"pretraining": str(texts), "pretraining_batch_size": 4} if coefficient else {}
        data = PromptDataModule(train=str(prompts), batch_size=4, **extra)
        trainer = fit(module, prompts, tmp_path, steps=5, data=data)
        with torch.no_grad():
            likelihoods.append(-float(model.eval()(ids, labels=ids).loss))
    assert likelihoods[1] > likelihoods[0] + 1.0
    assert float(trainer.logged_metrics["policy/pretraining_loss"]) > 0


def test_pretraining_texts_keep_their_proportion_to_a_loss_that_sums_over_tokens(
    tokenizer, prompts, tmp_path
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(['{"text": "the quick brown fox"}'] * 4))
    changes = []
    for loss in ("token_clip", "gspo", "sequence_clip"):
        module = build(
            build_language_model(tokenizer),
            tokenizer,
            critic=None,
            reference=Reference(kl_coef=0.0),
            # the same score for all: the texts alone move the policy
            advantage=Advantage(estimator="rloo", reward_clip_range=(-2.0, -1.0)),
            optimizer=OptimizerConfig(lr=0.1, optimizer_class="torch.optim.SGD"),
            update=Update(
                loss=loss, num_minibatches=1, pretraining_coef=1.0, max_grad_norm=math.inf
            ),
        )
        before = weights(module.policy)
        data = PromptDataModule(
            train=str(prompts), batch_size=4, pretraining=str(texts), pretraining_batch_size=4
        )
        fit(module, prompts, tmp_path, steps=1, data=data)
        changes.append({name: new - before[name] for name, new in weights(module.policy).items()})
    text = next(iter(data.train_dataloader())).pretraining.response_mask[0]
    assert_same(changes[0], changes[1])
    summed = {name: change * int(text.sum()) for name, change in changes[0].items()}
    assert_same(summed, changes[2], rtol=1e-3, atol=1e-6)


def test_experience_that_waits_in_cpu_memory_gives_the_same_update(
    tokenizer, prompts, tmp_path
) -> None:
    results = []
    for offload in (False, True):
        module = build(
            build_language_model(tokenizer),
            tokenizer,
            update=Update(loss="token_clip", offload=offload, minibatch_size=4),
        )
        fit(module, prompts, tmp_path, steps=2)
        results.append(weights(module.policy))
    assert_same(*results)


class NoEngine(RolloutEngine):
    """Refuses to generate anything."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(exact=True)

    def attach(self, *_: Any) -> None:
        pass

    def generate(self, *_: Any, **__: Any) -> None:
        raise AssertionError("a replayed rollout needs no engine")


def test_stored_rollouts_are_trained_on_without_an_engine(tokenizer, prompts, tmp_path) -> None:
    log = RolloutLog(dirpath=tmp_path / "log", save_tensors=True, print_every=None)
    watcher = Watcher()
    first = build(build_language_model(tokenizer), tokenizer)
    fit(first, prompts, tmp_path, steps=2, callbacks=[log, watcher])
    again = build(build_language_model(tokenizer), tokenizer, engine=NoEngine())
    replayed = Watcher()
    data = ReplayDataModule(folder=tmp_path / "log" / "rollouts", shuffle=False)
    trainer = fit(again, prompts, tmp_path, steps=2, callbacks=[replayed], data=data)
    for drawn, stored in zip(watcher.experiences, replayed.experiences, strict=True):
        assert torch.equal(drawn.input_ids, stored.input_ids)
        assert torch.equal(drawn.scores, stored.scores)
        # the ratio starts from the policy that drew the responses
        assert torch.equal(stored.old_logprobs, drawn.sampling_logprobs)
    assert "rewards/letters/mean" in trainer.logged_metrics
    assert replayed.records[1][0]["step"] == 1
    # the first iteration is on-policy here as it was there, so it trains alike
    torch.testing.assert_close(
        replayed.experiences[0].advantages,
        watcher.experiences[0].advantages,
        rtol=1e-3,
        atol=1e-4,
    )


def stored_run(tokenizer, prompts: Path, folder: Path, **options: Any) -> Watcher:
    """One iteration whose rollout is kept in ``folder / "log" / "rollouts"``."""
    log = RolloutLog(dirpath=folder / "log", save_tensors=True, print_every=None)
    watcher = Watcher()
    module = build(build_language_model(tokenizer), tokenizer, **options)
    fit(module, prompts, folder, steps=1, callbacks=[log, watcher])
    return watcher


@pytest.mark.parametrize(
    ("drawn", "options", "culprit"),
    [
        ({}, {"num_generations": 4}, "groups of 2 responses"),
        ({}, {"sampling": Sampling(max_new_tokens=6, temperature=0.3)}, "was sampled at 1.0"),
        (
            {"sampling": Sampling(max_new_tokens=6, top_k=9), "allow_truncated_sampling": True},
            {},
            "allow_truncated_sampling",
        ),
        ({}, {"dynamic_sampling": DynamicSampling(prompts=1)}, "the data holds stored ones"),
    ],
)
def test_a_stored_rollout_that_was_drawn_otherwise_is_refused(
    tokenizer, prompts, tmp_path, drawn: dict[str, Any], options: dict[str, Any], culprit: str
) -> None:
    stored_run(tokenizer, prompts, tmp_path, **drawn)
    data = ReplayDataModule(folder=tmp_path / "log" / "rollouts")
    module = build(build_language_model(tokenizer), tokenizer, **options)
    with pytest.raises(ValueError, match=culprit):
        fit(module, prompts, tmp_path, steps=1, data=data)


def test_the_distance_in_a_replay_is_that_of_the_policy_which_learns(
    tokenizer, prompts, tmp_path
) -> None:
    stored_run(tokenizer, prompts, tmp_path)
    data = ReplayDataModule(folder=tmp_path / "log" / "rollouts")
    module = build(build_language_model(tokenizer), tokenizer, optimizer=OptimizerConfig(lr=5e-3))
    trainer = fit(module, prompts, tmp_path, steps=4, data=data)
    assert float(trainer.logged_metrics["kl/sequence"]) > 0.01


def test_fillers_are_left_out_of_a_replay_too(tokenizer, prompts, tmp_path) -> None:
    log = RolloutLog(dirpath=tmp_path / "log", save_tensors=True, print_every=None)
    module = PPO(
        build_language_model(tokenizer),
        Rewards([lambda completions: [0.7] * len(completions)], names=["same"]),
        tokenizer=tokenizer,
        num_generations=2,
        sampling=Sampling(max_new_tokens=4),
        dynamic_sampling=DynamicSampling(prompts=2),
    )
    fit(module, prompts, tmp_path, steps=1, callbacks=[log])
    again = build(build_language_model(tokenizer), tokenizer)
    watcher = Watcher()
    data = ReplayDataModule(folder=tmp_path / "log" / "rollouts")
    fit(again, prompts, tmp_path, steps=1, callbacks=[watcher], data=data)
    assert not watcher.experiences[0].counted.any()


@pytest.mark.parametrize("kind", ["head", "own"])
@pytest.mark.parametrize("score", [None, 0.7])
def test_an_iteration_that_teaches_nothing_moves_nothing(
    tokenizer, prompts, tmp_path, kind: str, score: float | None
) -> None:
    calls = 0

    def reward(completions: list[str]) -> list[float | None]:
        nonlocal calls
        calls += 1
        # the first iteration fills the optimizers' momentum
        return letters(completions) if calls == 1 else [score] * len(completions)

    module = PPO(
        build_language_model(tokenizer),
        Rewards([reward], max_unscorable_fraction=1.0, max_failures_in_a_row=None),
        tokenizer=tokenizer,
        num_generations=2,
        sampling=Sampling(max_new_tokens=6),
        optimizer=OptimizerConfig(lr=1e-2),
        reference=Reference(kl_coef=0.0),
        critic=None if score else critic_of(kind, tokenizer),
        advantage=Advantage(estimator="reinforce_plus_plus" if score else "gae"),
    )
    seen: list[dict[str, Tensor]] = []

    class Keeper(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(weights(module))

    watcher = Watcher()
    fit(module, prompts, tmp_path, steps=2, callbacks=[Keeper(), watcher])
    assert (watcher.experiences[1].advantages == 0).all()
    if score is None:
        assert_same(seen[0], seen[1])


def test_unscorable_responses_count_in_no_mean(tokenizer, prompts, tmp_path) -> None:
    def half(completions: list[str]) -> list[float | None]:
        return [s if i % 2 else None for i, s in enumerate(letters(completions))]

    module = PPO(
        build_language_model(tokenizer),
        Rewards([half], max_unscorable_fraction=1.0),
        tokenizer=tokenizer,
        num_generations=2,
        sampling=Sampling(max_new_tokens=6),
    )
    experience = first_experience(module, prompts, tmp_path)
    assert experience.counted.tolist() == [False, True] * 4
    assert (experience.loss_mask == experience.response_mask & experience.counted[:, None]).all()


@pytest.mark.parametrize(
    "advantage",
    [
        Advantage(estimator="gae", truncated="exclude"),
        Advantage(estimator="gae", reward_clip_range=(-1.0, 0.0)),
    ],
)
def test_dynamic_sampling_looks_at_the_scores_that_are_trained_on(
    language_model, tokenizer, prompts, tmp_path, advantage: Advantage
) -> None:
    module = build(
        language_model,
        tokenizer,
        advantage=advantage,
        dynamic_sampling=DynamicSampling(prompts=2),
    )
    trainer = fit(module, prompts, tmp_path, steps=1)
    # all responses are truncated, or all scores are clipped to 0: nothing differs
    assert float(trainer.logged_metrics["rollout/rounds"]) == 2
    assert float(trainer.logged_metrics["rollout/filler_fraction"]) == 1


def test_the_clip_fraction_is_that_of_the_loss(tokenizer, prompts, tmp_path) -> None:
    fractions = []
    for clip_range in (0.01, 0.9):
        module = build(
            build_language_model(tokenizer),
            tokenizer,
            optimizer=OptimizerConfig(lr=1e-3),
            update=Update(loss="cpgd", options={"clip_range": clip_range}, num_iterations=3),
        )
        trainer = fit(module, prompts, tmp_path, steps=1)
        fractions.append(float(trainer.logged_metrics["policy/clip_fraction"]))
    assert fractions[0] > 0.3 > fractions[1]


def test_the_kind_of_head_reaches_a_critic_that_is_named_by_its_source(
    language_model, model_folder, tokenizer
) -> None:
    module = build(language_model, tokenizer, critic=Critic(model=model_folder, head="mlp"))
    assert isinstance(module.critic.head.projection, torch.nn.Sequential)


def test_a_critic_on_the_policys_own_weights_is_refused(language_model, tokenizer) -> None:
    network = ValueNetwork(language_model.base_model, ValueHead(32, "linear"))
    with pytest.raises(ValueError, match="shares weights with the policy"):
        build(language_model, tokenizer, critic=Critic(model=network))


def test_a_strategy_that_waits_for_every_gradient_is_refused(language_model, tokenizer) -> None:
    module = build(language_model, tokenizer)
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, strategy="ddp")
    module.trainer = trainer
    with pytest.raises(ValueError, match="ddp_find_unused_parameters_true"):
        module.setup("fit")


def test_a_critic_starts_as_the_reward_model_it_came_from(tokenizer, prompts, tmp_path) -> None:
    folder = tmp_path / "base"
    build_language_model(tokenizer, seed=4).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    reward = ScoreModel(source=str(folder)).load()
    reward.save_pretrained(tmp_path / "reward", tokenizer)
    critic = ValueModel(source=str(tmp_path / "reward")).load().eval()
    module = build(build_language_model(tokenizer), tokenizer, critic=Critic(model=critic))
    experience = first_experience(module, prompts, tmp_path)
    start = ValueModel(source=str(tmp_path / "reward")).load().eval()
    scores = reward.eval()(experience)[:, 0]
    # the value before a token is the reward of what stands before it
    for row in range(len(experience)):
        end = int(experience.response_mask[row].nonzero().max())
        shorter = experience.attention_mask.clone()
        shorter[row, end:] = False
        cut = replace(experience, attention_mask=shorter)
        expected = reward(cut)[row, 0]
        torch.testing.assert_close(start(experience)[row, end], expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(scores, torch.zeros_like(scores))


def test_an_exported_critic_loads_again(tokenizer, prompts, tmp_path) -> None:
    module = build(build_language_model(tokenizer), tokenizer, critic=own_critic(tokenizer))
    experience = first_experience(module, prompts, tmp_path)
    module.export_pretrained(tmp_path / "export")
    loaded = ValueModel(source=str(tmp_path / "export" / "critic")).load().eval()
    torch.testing.assert_close(
        loaded(experience), module.critic.eval()(experience), rtol=1e-5, atol=1e-6
    )


def test_an_exported_critic_keeps_its_unit_and_learns_as_trained_weights_do(
    tokenizer, prompts, tmp_path
) -> None:
    backbone = build_language_model(tokenizer, seed=3).base_model
    network = ValueNetwork(backbone, ValueHead(32, "linear", relative=True))
    network.head.measure_in(3.0, 5.0)
    network.save_pretrained(tmp_path / "critic", tokenizer)
    loaded = ValueModel(source=str(tmp_path / "critic")).load()
    module = build(build_language_model(tokenizer), tokenizer, critic=Critic(model=loaded))
    rates = {group["lr"] for group in module.values.optimizer(100).optimizer.param_groups}
    assert rates == {1e-5}
    fit(module, prompts, tmp_path, steps=1)
    assert (float(loaded.head.scale), float(loaded.head.shift)) == (3.0, 5.0)


def test_a_critic_with_adapters_trains_them_only(
    model_folder, tokenizer, prompts, tmp_path
) -> None:
    spec = ValueModel(source=model_folder, lora=LoRA(r=4, alpha=8))
    module = build(
        build_language_model(tokenizer),
        tokenizer,
        critic=Critic(model=spec, optimizer=OptimizerConfig(lr=1e-2)),
    )
    before = weights(module.critic)
    fit(module, prompts, tmp_path, steps=2)
    for name, value in weights(module.critic).items():
        changes = "lora" in name or name.startswith("head.")
        assert torch.equal(before[name], value) != changes or "lora_A" in name, name


@pytest.mark.parametrize("estimator", ["rloo", "reinforce_baseline", "grpo", "cpgd"])
def test_an_estimator_without_values_needs_no_critic(
    language_model, tokenizer, prompts, tmp_path, estimator: str
) -> None:
    module = build(language_model, tokenizer, critic=None, advantage=Advantage(estimator=estimator))
    before = weights(module.policy)
    trainer = fit(module, prompts, tmp_path, steps=1)
    assert moved(before, weights(module.policy))
    assert not [name for name in trainer.logged_metrics if name.startswith("value/")]


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"critic": None}, "needs a critic, and critic is null"),
        ({"advantage": Advantage(estimator="rloo")}, "set critic: null"),
        ({"update": Update(loss="sequence_clip")}, "gives one per token"),
        ({"update": Update(loss="token_clip", router_loss_coef=0.1)}, "router_loss_coef"),
        ({"num_generations": 1, "dynamic_sampling": DynamicSampling(prompts=1)}, "nearest value"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(
    language_model, tokenizer, options: dict[str, Any], culprit: str
) -> None:
    with pytest.raises(ValueError, match=culprit):
        build(language_model, tokenizer, **options)


def test_rloo_sends_an_estimator_with_values_to_ppo(language_model, tokenizer) -> None:
    with pytest.raises(ValueError, match=r"use lrlhf\.modules\.PPO"):
        RLOO(
            language_model,
            Rewards([letters]),
            tokenizer=tokenizer,
            advantage=Advantage(estimator="gae"),
            update=Update(loss="token_clip"),
        )


@pytest.mark.parametrize(
    ("make", "culprit"),
    [
        (lambda: Critic(value_clip_range=0.0), "value_clip_range"),
        (lambda: Critic(max_grad_norm=0.0), "max_grad_norm"),
        (lambda: Critic(freeze_steps=-1), "freeze_steps"),
        (lambda: Critic(model="x", backbone_coef=0.5), "backbone_coef"),
        (lambda: Update(high_entropy_fraction=0.0, loss="dapo"), "high_entropy_fraction"),
        (lambda: Update(pretraining_coef=-1.0), "pretraining_coef"),
        (lambda: Update(entropy_coef=-0.1), "entropy_coef"),
        (lambda: Critic(model=ValueModel(source="x"), head="mlp"), "critic.head"),
        (lambda: Advantage(clip=0.0), "advantage.clip"),
        (lambda: DynamicSampling(prompts=0), "dynamic_sampling.prompts"),
    ],
)
def test_a_setting_out_of_range_names_itself(make: Any, culprit: str) -> None:
    with pytest.raises(ValueError, match=culprit):
        make()


def test_pretraining_needs_both_its_weight_and_its_texts(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    module = build(
        language_model, tokenizer, update=Update(loss="token_clip", pretraining_coef=0.1)
    )
    with pytest.raises(ValueError, match="set both, or neither"):
        fit(module, prompts, tmp_path, steps=1)


def test_a_critic_with_another_vocabulary_is_refused(language_model, tokenizer) -> None:
    backbone = build_language_model(tokenizer, seed=3)
    backbone.resize_token_embeddings(50)
    critic = Critic(model=ValueNetwork(backbone.base_model, ValueHead(32, "linear")))
    with pytest.raises(ValueError, match="reads the policy's own ids"):
        build(language_model, tokenizer, critic=critic)
