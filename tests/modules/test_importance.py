"""Weights against an engine that differs from the trainer: when, on what, and what must not matter.

Expected updates are computed token by token in plain Python from what the engine reported.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.callbacks import RolloutLog
from lrlhf.datamodules import ReplayDataModule
from lrlhf.functional import IMPORTANCE_MODES, POLICY_LOSSES, importance_weights
from lrlhf.models import CausalLM
from lrlhf.modules import PPO, RLOO, Critic, ImportanceSampling, OptimizerConfig, Reference, Update
from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.modules.policy.importance_sampling import (
    measure_importance,
    off_policy_rows,
    with_importance_weights,
)
from lrlhf.modules.policy.objective import Denominators, denominators, policy_loss
from lrlhf.rewards import Rewards
from lrlhf.rollout import Capabilities, Sampling, TransformersEngine, plan_micro_batches
from lrlhf.types import Experience, PromptBatch, Rollout
from tests.conftest import build_language_model
from tests.modules.policy_runs import Watcher, fit, letters
from tests.modules.test_metric_sums import CPU, one_process
from tests.modules.test_policy_objective import assembled, random_experience
from tests.modules.test_ppo import own_critic, reference_step

LR = 0.1


class SkewedEngine(TransformersEngine):
    """Reports other log-probabilities than the policy's, or weights of another iteration."""

    def __init__(self, *, spread: float = 0.5, version: int | None = None, exact: bool = False):
        super().__init__()
        self.exact = exact
        self.spread = spread
        self.claimed = version

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(exact=self.exact)

    def generate(
        self,
        prompts: PromptBatch,
        sampling: Sampling,
        *,
        num_generations: int,
        seeds: Sequence[int],
    ) -> Rollout:
        rollout = super().generate(prompts, sampling, num_generations=num_generations, seeds=seeds)
        noise = torch.randn(
            rollout.input_ids.shape, generator=torch.Generator().manual_seed(seeds[0])
        )
        version = None
        if self.claimed is not None:
            version = torch.full_like(rollout.group_ids, self.claimed)
        return replace(
            rollout,
            sampling_logprobs=rollout.sampling_logprobs
            + self.spread * noise * rollout.response_mask,
            weight_version=version,
        )


def build(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    kind: type[RLOO] = RLOO,
    **options: Any,
) -> RLOO:
    defaults: dict[str, Any] = {
        "num_generations": 4,
        "sampling": Sampling(max_new_tokens=6),
        "optimizer": OptimizerConfig(lr=LR, optimizer_class="torch.optim.SGD"),
        "update": Update(max_grad_norm=math.inf),
        "reference": Reference(kl_coef=0.0),
        "engine": SkewedEngine(),
    }
    return kind(model, Rewards([letters]), tokenizer=tokenizer, **(defaults | options))


def plain(loss: str = "sequence_clip", **options: Any) -> Update:
    return Update(loss=loss, max_grad_norm=math.inf, **options)


class OneToken:
    """What plain Python makes of one response token."""

    def __init__(self, logprob: Tensor, sampling: float, advantage: float) -> None:
        self.logprob = logprob
        self.ratio = math.exp(float(logprob.detach()) - sampling)
        self.advantage = advantage


def responses_of(policy: PreTrainedModel, experience: Experience) -> list[list[OneToken]]:
    mask = experience.attention_mask.long()
    logits = policy(experience.input_ids, attention_mask=mask).logits
    rows = []
    for row in range(len(experience)):
        columns = experience.response_mask[row].nonzero().flatten().tolist()
        rows.append(
            [
                OneToken(
                    torch.log_softmax(logits[row, c - 1], -1)[experience.input_ids[row, c]],
                    float(experience.sampling_logprobs[row, c]),
                    float(experience.advantages[row, c]),
                )
                for c in columns
            ]
        )
    return rows


def product(row: list[OneToken]) -> float:
    return math.prod(token.ratio for token in row)


def step_of(policy: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    """Weights after one step of plain gradient descent."""
    parameters = dict(policy.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return {
        name: (weight - LR * gradient).detach()
        for (name, weight), gradient in zip(parameters.items(), gradients, strict=True)
    }


def assert_weights(model: PreTrainedModel, expected: dict[str, Tensor]) -> None:
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def same(first: PreTrainedModel, second: PreTrainedModel) -> bool:
    other = dict(second.named_parameters())
    return all(torch.equal(weight, other[name]) for name, weight in first.named_parameters())


SEQUENCE_CASES: list[tuple[Any, Callable[[OneToken, list[OneToken]], float]]] = [
    (None, lambda token, _: min(token.ratio, 2.0)),
    (
        ImportanceSampling(mode="token_mask", high=1.5),
        lambda token, _: token.ratio if 0.5 <= token.ratio <= 1.5 else 0.0,
    ),
    (ImportanceSampling(mode="none"), lambda *_: 1.0),
    (ImportanceSampling(mode="sequence_truncate"), lambda _, row: min(product(row), 2.0)),
    (ImportanceSampling(mode="sequence_truncate", high=1.3), lambda _, row: min(product(row), 1.3)),
    (
        ImportanceSampling(mode="sequence_mask"),
        lambda _, row: product(row) if product(row) <= 3 else 0.0,
    ),
    (
        ImportanceSampling(mode="sequence_mask", low=0.5, high=1.5),
        lambda _, row: product(row) if 0.5 <= product(row) <= 1.5 else 0.0,
    ),
    (
        ImportanceSampling(mode="sequence_mean_mask"),
        lambda _, row: float(0.95 <= product(row) ** (1 / len(row)) <= 1.05),
    ),
    (
        ImportanceSampling(mode="sequence_mean_mask", low=0.8, high=1.3),
        lambda _, row: float(0.8 <= product(row) ** (1 / len(row)) <= 1.3),
    ),
]


@pytest.mark.parametrize("kl_coef", [0.0, 0.05], ids=["current", "old"])
@pytest.mark.parametrize(("settings", "weight_of"), SEQUENCE_CASES)
def test_an_rloo_step_is_that_of_an_independent_computation(
    language_model, tokenizer, prompts, tmp_path, settings: Any, weight_of: Any, kl_coef: float
) -> None:
    module = build(
        language_model,
        tokenizer,
        importance_sampling=settings,
        reference=Reference(kl_coef=kl_coef),
    )
    policy = copy.deepcopy(module.policy)
    watcher = Watcher()
    trainer = fit(module, prompts, tmp_path, steps=1, callbacks=[watcher])
    (experience,) = watcher.experiences
    assert (experience.old_logprobs is None) == (kl_coef == 0)
    rows = responses_of(policy, experience)
    # on-policy the ratio to the old policy is 1, so the surrogate's gradient is that of -A log p
    loss = -sum(
        weight_of(token, row) * token.advantage * token.logprob for row in rows for token in row
    ) / len(rows)
    assert_weights(module.policy, step_of(policy, loss))
    per_token = settings is None or settings.mode.startswith("token")
    used = [weight_of(token, row) for row in rows for token in (row if per_token else row[:1])]
    if settings is None or settings.mode != "none":
        logged = trainer.logged_metrics
        assert float(logged["importance/weight_mean"]) == pytest.approx(
            sum(used) / len(used), rel=1e-3
        )
        assert 0 < float(logged["importance/cut_fraction"]) < 1
    else:
        assert "importance/weight_mean" not in trainer.logged_metrics


TOKEN_CASES: list[tuple[str, Any, Callable[[OneToken, list[OneToken]], float]]] = [
    ("dapo", None, lambda token, _: min(token.ratio, 2.0)),
    ("cispo", None, lambda token, _: min(token.ratio, 2.0)),
    ("cpgd", ImportanceSampling(mode="token_truncate", high=1.2), lambda t, _: min(t.ratio, 1.2)),
    (
        "dapo",
        ImportanceSampling(mode="token_mask", high=1.5),
        lambda token, _: token.ratio if 0.5 <= token.ratio <= 1.5 else 0.0,
    ),
    (
        "reinforce",
        ImportanceSampling(mode="token_mask", low=0.9),
        lambda token, _: token.ratio if 0.9 <= token.ratio <= 5 else 0.0,
    ),
    (
        "dapo",
        ImportanceSampling(mode="sequence_mask"),
        lambda _, row: product(row) if product(row) <= 3 else 0.0,
    ),
]


@pytest.mark.parametrize(("loss", "settings", "weight_of"), TOKEN_CASES)
def test_a_step_with_a_loss_per_token_is_that_of_an_independent_computation(
    language_model, tokenizer, prompts, tmp_path, loss: str, settings: Any, weight_of: Any
) -> None:
    module = build(
        language_model,
        tokenizer,
        importance_sampling=settings,
        update=plain(loss, aggregate="token_mean"),
    )
    policy = copy.deepcopy(module.policy)
    watcher = Watcher()
    fit(module, prompts, tmp_path, steps=1, callbacks=[watcher])
    rows = responses_of(policy, watcher.experiences[0])
    tokens = [(token, row) for row in rows for token in row]
    used = [weight_of(token, row) for token, row in tokens]
    assert len({round(weight, 6) for weight in used}) > 5
    surrogate = -sum(
        weight * token.advantage * token.logprob
        for weight, (token, _) in zip(used, tokens, strict=True)
    ) / len(tokens)
    assert_weights(module.policy, step_of(policy, surrogate))


@pytest.mark.parametrize(
    ("settings", "weight"),
    [
        (None, lambda ratio: min(ratio, 2.0)),
        (
            ImportanceSampling(mode="token_mask", low=0.8, high=1.4),
            lambda ratio: ratio if 0.8 <= ratio <= 1.4 else 0.0,
        ),
    ],
)
def test_a_ppo_step_weighs_the_actor_and_leaves_critic_and_penalty_alone(
    language_model, tokenizer, prompts, tmp_path, settings: Any, weight: Any
) -> None:
    other = tmp_path / "reference"
    build_language_model(tokenizer, seed=9).save_pretrained(other)
    tokenizer.save_pretrained(other)
    sgd = OptimizerConfig(lr=LR, optimizer_class="torch.optim.SGD")
    module = PPO(
        language_model,
        Rewards([letters]),
        tokenizer=tokenizer,
        num_generations=2,
        sampling=Sampling(max_new_tokens=6),
        engine=SkewedEngine(),
        importance_sampling=settings,
        critic=own_critic(tokenizer, optimizer=sgd, max_grad_norm=math.inf),
        optimizer=sgd,
        update=plain("token_clip", aggregate="token_mean", num_minibatches=1),
        reference=Reference(kl_coef=0.1, model=CausalLM(source=str(other))),
    )
    policy, critic = copy.deepcopy(module.policy), copy.deepcopy(module.critic)
    watcher = Watcher()
    fit(module, prompts, tmp_path, steps=1, callbacks=[watcher])
    gradients = reference_step(
        policy, critic, watcher.experiences[0], kl_coef=0.1, weight_of_ratio=weight
    )
    for role, start, after in (
        ("policy", policy, module.policy),
        ("critic", critic, module.critic),
    ):
        assert_weights(
            after,
            {
                name: (value - LR * gradients[f"{role}.{name}"]).detach()
                for name, value in start.named_parameters()
            },
        )


def test_a_critic_on_the_policys_backbone_does_not_keep_the_weights_off(
    tokenizer, prompts, tmp_path
) -> None:
    modules = []
    for mode in ("none", "token_truncate"):
        module = PPO(
            build_language_model(tokenizer),
            Rewards([letters]),
            tokenizer=tokenizer,
            sampling=Sampling(max_new_tokens=6),
            engine=SkewedEngine(),
            importance_sampling=ImportanceSampling(mode=mode),
            optimizer=OptimizerConfig(lr=LR, optimizer_class="torch.optim.SGD"),
            critic=Critic(optimizer=OptimizerConfig(lr=0.01, optimizer_class="torch.optim.SGD")),
            update=Update(loss="token_clip", aggregate="token_mean", num_minibatches=1),
        )
        fit(module, prompts, tmp_path, steps=1)
        modules.append(module)
    assert not same(modules[0].policy, modules[1].policy)
    assert same(modules[0].value_head, modules[1].value_head)


def test_over_several_steps_the_weights_stay_those_of_the_start(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    module = build(
        language_model, tokenizer, update=plain("reinforce", num_iterations=2), num_generations=2
    )
    policy = copy.deepcopy(module.policy)
    watcher = Watcher()
    fit(module, prompts, tmp_path, steps=1, callbacks=[watcher])
    first = responses_of(policy, watcher.experiences[0])
    tokens = [token for row in first for token in row]
    for _ in range(2):
        present = responses_of(policy, watcher.experiences[0])
        loss = -sum(
            min(start.ratio, 2.0)
            * torch.exp(now.logprob - start.logprob.detach())
            * start.advantage
            for start, now in zip(tokens, [t for row in present for t in row], strict=True)
        ) / len(tokens)
        policy.load_state_dict(step_of(policy, loss), strict=False)
    assert_weights(module.policy, dict(policy.named_parameters()))


class AlwaysAhead(RLOO):
    """Computes old log-probabilities although one step does not need them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parts.scorer._needs_old = lambda *_, **__: True  # type: ignore[method-assign]


@pytest.mark.parametrize("loss", ["sequence_clip", "dapo"])
def test_log_probabilities_of_before_and_of_the_update_weigh_alike(
    tokenizer, prompts, tmp_path, loss: str
) -> None:
    results = []
    for kind in (RLOO, AlwaysAhead):
        watcher = Watcher()
        module = build(build_language_model(tokenizer), tokenizer, kind, update=plain(loss))
        trainer = fit(module, prompts, tmp_path, steps=1, callbacks=[watcher])
        assert (watcher.experiences[0].old_logprobs is None) == (kind is RLOO)
        assert (watcher.experiences[0].importance_weights is None) == (kind is RLOO)
        results.append((module.policy, trainer.logged_metrics))
    assert_weights(results[1][0], dict(results[0][0].named_parameters()))
    assert_same_metrics(results[0][1], results[1][1])


def assert_same_metrics(first: Any, second: Any) -> None:
    names = [n for n in first if n.startswith(("mismatch/", "importance/"))]
    assert len(names) == 8
    for name in names:
        assert float(second[name]) == pytest.approx(float(first[name]), rel=2e-3, abs=1e-6), name


@pytest.mark.parametrize("loss", ["sequence_clip", "dapo"])
@pytest.mark.parametrize("several", [False, True])
def test_one_two_and_eight_micro_batches_give_one_update(
    tokenizer, prompts, tmp_path, loss: str, several: bool
) -> None:
    results = []
    for budget, parts in ((None, 1), (44, 2), (1, 8)):
        watcher = Watcher()
        kind = AlwaysAhead if several else RLOO
        module = build(
            build_language_model(tokenizer),
            tokenizer,
            kind,
            num_generations=2,
            update=plain(loss, micro_batch_tokens=budget),
        )
        trainer = fit(module, prompts, tmp_path, steps=1, callbacks=[watcher])
        plan = plan_micro_batches(watcher.experiences[0], max_tokens=budget, packed=True)
        assert len(plan) == parts
        results.append((module.policy, trainer.logged_metrics))
    for policy, logged in results[1:]:
        assert_weights(policy, dict(results[0][0].named_parameters()))
        assert_same_metrics(results[0][1], logged)


@pytest.mark.parametrize(
    ("engine", "settings", "updated", "steps"),
    [
        (SkewedEngine(exact=True), None, False, 1),
        (SkewedEngine(exact=False), None, True, 1),
        (SkewedEngine(exact=False), ImportanceSampling(mode="none"), False, 1),
        (SkewedEngine(exact=True), ImportanceSampling(mode="sequence_truncate"), True, 1),
        # version 0 is the present one in the first iteration, and one behind in the second
        (SkewedEngine(exact=True, version=0), None, False, 1),
        (SkewedEngine(exact=True, version=0), None, True, 2),
        (SkewedEngine(exact=True, version=1), None, False, 2),
    ],
)
def test_weights_are_used_where_the_engine_is_not_exact_or_its_weights_were_older(
    tokenizer, prompts, tmp_path, engine: Any, settings: Any, updated: bool, steps: int
) -> None:
    trained = []
    for options in (
        {"engine": engine, "importance_sampling": settings},
        {"engine": engine, "importance_sampling": ImportanceSampling(mode="none")},
    ):
        module = build(build_language_model(tokenizer), tokenizer, **options)
        trainer = fit(module, prompts, tmp_path, steps=steps)
        trained.append((module.policy, trainer.logged_metrics))
    assert ("importance/weight_mean" in trained[0][1]) == updated
    assert same(trained[0][0], trained[1][0]) != updated
    assert "importance/weight_mean" not in trained[1][1]


def test_only_the_responses_of_older_weights_are_weighed() -> None:
    experience = random_experience(rows=3)
    versions = torch.tensor([4, 5, 6])
    aged = replace(
        experience,
        weight_version=versions,
        sampling_logprobs=-math.log(1.5) * experience.response_mask,
    )
    rows = off_policy_rows(aged, exact=True, step=5)
    assert rows.tolist() == [True, False, False]
    assert off_policy_rows(aged, exact=False, step=5).all()
    weighted = with_importance_weights(aged, torch.zeros(3, 8), None, exact=True, step=5)
    found = weighted.importance_weights
    assert found is not None
    torch.testing.assert_close(found[0], torch.where(aged.response_mask[0], 1.5, 1.0))
    assert found[1:].eq(1).all()


def test_what_the_engine_cut_off_is_not_weighed() -> None:
    experience = random_experience(rows=3)
    trainer = -torch.rand(3, 8) * experience.response_mask
    # the engine kept a quarter of the probability, and found each token 0.8 times as likely
    drawn = replace(
        experience,
        sampling_logprobs=trainer + math.log(0.8) - math.log(0.25),
        kept_mass=torch.full((3, 8), 0.25),
    )
    settings = ImportanceSampling(mode="token_truncate")
    weighted = with_importance_weights(drawn, trainer, settings, exact=True, step=0)
    found = weighted.importance_weights
    torch.testing.assert_close(found, torch.where(drawn.response_mask, 1 / 0.8, 1.0))


def test_the_mean_weight_is_over_tokens_or_over_responses() -> None:
    experience = random_experience(rows=2, width=4)
    mask = torch.tensor([[False, True, False, False, False], [False, True, True, True, False]])
    given = torch.where(mask, torch.tensor([[2.0], [0.5]]), 1.0)
    micro = replace(experience, loss_mask=mask, response_mask=mask, importance_weights=given)
    values = {}
    for mode in ("token_truncate", "sequence_truncate"):
        metrics = MetricSums()
        measure_importance(micro, metrics, ImportanceSampling(mode=mode))
        values[mode] = metrics.reduce(one_process(), CPU)
    # tokens: (2 + 3 · 0.5) / 4; responses: (2 + 0.5) / 2; what is at the bound of 2 was cut
    assert values["token_truncate"] == {
        "importance/weight_mean": 0.875,
        "importance/cut_fraction": 0.25,
    }
    assert values["sequence_truncate"] == {
        "importance/weight_mean": 1.25,
        "importance/cut_fraction": 0.5,
    }


def loss_of(logprobs: Tensor, experience: Experience, update: Update, totals: Denominators) -> Any:
    return policy_loss(
        logprobs,
        experience,
        loss=assembled(update=update).loss,
        entropy_coef=update.entropy_coef,
        kl_estimator="k2",
        kl_coef=0.1,
        totals=totals,
        max_new_tokens=9,
        entropy=logprobs.exp(),
    )


def test_the_weights_reach_the_policy_term_and_no_other() -> None:
    experience = random_experience()
    given = torch.where(experience.response_mask, torch.rand(8, 8) * 2, 1.0)
    experience = replace(experience, importance_weights=given)
    totals = Denominators(*denominators(experience))
    assert experience.old_logprobs is not None
    assert experience.ref_logprobs is not None
    new = (experience.old_logprobs + 0.3 * torch.randn(8, 8)).requires_grad_()
    terms = loss_of(new, experience, Update(loss="reinforce", entropy_coef=0.2), totals)
    (gradient,) = torch.autograd.grad(terms.loss, new)
    now = new.detach()
    tokens = experience.response_mask.sum()
    # -w ρ A / N of the policy, 0.1 (new - ref) / N of k2, and -0.2 e^new / N of the "entropy" e^new
    expected = (
        -given * (now - experience.old_logprobs).exp() * experience.advantages
        + 0.1 * (now - experience.ref_logprobs)
        - 0.2 * now.exp()
    ) / tokens
    torch.testing.assert_close(
        gradient, torch.where(experience.response_mask, expected, 0.0), rtol=1e-4, atol=1e-6
    )
    bare = loss_of(
        new, replace(experience, importance_weights=None), Update(loss="reinforce"), totals
    )
    assert torch.equal(bare.kl, terms.kl)
    assert not torch.equal(bare.policy, terms.policy)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_no_split_changes_a_weighted_gradient(name: str) -> None:
    experience = random_experience()
    mask = experience.response_mask
    given = torch.rand(8, 1 if POLICY_LOSSES[name].level == "sequence" else 8).expand(8, 8) * 2
    experience = replace(experience, importance_weights=torch.where(mask, given, 1.0))
    totals = Denominators(*denominators(experience))
    new = (experience.old_logprobs + 0.3 * torch.randn(8, 8)).requires_grad_()
    whole = loss_of(new, experience, Update(loss=name), totals).loss
    (expected,) = torch.autograd.grad(whole, new)
    for parts in (2, 8):
        cuts = torch.randperm(8).tensor_split(parts)
        shares = [
            loss_of(new[rows], experience.select(rows), Update(loss=name), totals).loss
            for rows in cuts
        ]
        (split,) = torch.autograd.grad(sum(shares), new)
        torch.testing.assert_close(split, expected)
        torch.testing.assert_close(sum(shares), whole)


def test_an_engine_that_agrees_is_measured_too_and_needs_no_weights(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    module = build(language_model, tokenizer, engine=TransformersEngine())
    logged = fit(module, prompts, tmp_path, steps=2).logged_metrics
    assert float(logged["mismatch/max"]) < 1e-4
    for name in ("p01", "p50", "p99"):
        assert float(logged[f"mismatch/ratio_{name}"]) == pytest.approx(1.0, abs=1.1e-3)
    assert not any(name.startswith("importance/") for name in logged)


def test_the_mismatch_is_measured_while_the_policy_waits(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    module = build(language_model, tokenizer, update=Update(freeze_steps=1))
    logged = fit(module, prompts, tmp_path, steps=1).logged_metrics
    # the absolute values of normal numbers of spread 0.5 have the mean 0.5 √(2/π) = 0.40
    assert 0.25 < float(logged["mismatch/mean"]) < 0.55


@pytest.mark.parametrize("settings", [None, ImportanceSampling(mode="token_truncate")])
def test_stored_rollouts_are_not_weighed_and_show_no_mismatch(
    tokenizer, prompts, tmp_path, settings: ImportanceSampling | None
) -> None:
    log = RolloutLog(dirpath=tmp_path / "log", save_tensors=True, print_every=None)
    options: dict[str, Any] = {
        "engine": SkewedEngine(version=0),
        "update": plain("dapo"),
        "sampling": Sampling(max_new_tokens=6, top_k=50),
        "allow_truncated_sampling": True,
    }
    first = build(build_language_model(tokenizer), tokenizer, **options)
    drawn = fit(first, prompts, tmp_path, steps=1, callbacks=[log])
    assert "importance/weight_mean" in drawn.logged_metrics
    trained = []
    for chosen in (settings, ImportanceSampling(mode="none")):
        again = build(
            build_language_model(tokenizer), tokenizer, importance_sampling=chosen, **options
        )
        data = ReplayDataModule(folder=tmp_path / "log" / "rollouts")
        logged = fit(again, prompts, tmp_path, steps=2, data=data).logged_metrics
        assert not any(name.startswith(("importance/", "mismatch/")) for name in logged)
        trained.append(again.policy)
    assert same(*trained)


def test_the_modes_of_the_option_are_those_of_the_function() -> None:
    names = get_args(get_type_hints(ImportanceSampling)["mode"])
    assert names == ("none", *IMPORTANCE_MODES)


@pytest.mark.parametrize(
    ("mode", "bounds"),
    [
        ("token_truncate", (0.0, 2.0)),
        ("token_mask", (0.5, 5.0)),
        ("sequence_truncate", (0.0, 2.0)),
        ("sequence_mask", (0.0, 3.0)),
        ("sequence_mean_mask", (0.95, 1.05)),
    ],
)
def test_each_mode_has_bounds_of_its_own(mode: Any, bounds: tuple[float, float]) -> None:
    assert ImportanceSampling(mode=mode).bounds == bounds
    assert ImportanceSampling(mode=mode, high=1.5).bounds == (bounds[0], 1.5)


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"mode": "token_trunc"}, "did you mean 'token_truncate'"),
        ({"mode": "none", "high": 2.0}, r"importance_sampling\.high is 2.0, but mode 'none'"),
        ({"mode": "token_truncate", "low": 0.5}, r"importance_sampling\.low is 0.5"),
        ({"mode": "token_mask", "low": 1.5}, r"importance_sampling\.low is 1.5"),
        ({"mode": "token_mask", "low": -0.5}, r"importance_sampling\.low is -0.5"),
        ({"mode": "token_mask", "high": 0.5}, r"importance_sampling\.high is 0.5"),
        ({"mode": "token_mask", "high": math.nan}, r"importance_sampling\.high is nan"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(options: dict[str, Any], culprit: str) -> None:
    with pytest.raises(ValueError, match=culprit):
        ImportanceSampling(**options)


@pytest.mark.parametrize("loss", ["sequence_clip", "gspo"])
def test_weights_per_token_weigh_the_tokens_of_a_loss_per_response(loss: str) -> None:
    experience = random_experience()
    mask, old = experience.response_mask, experience.old_logprobs
    assert old is not None
    given = torch.where(mask, torch.rand(8, 8) * 2, 1.0)
    experience = replace(experience, importance_weights=given, ref_logprobs=None)
    new = old.clone().requires_grad_()
    totals = Denominators(*denominators(experience))
    (gradient,) = torch.autograd.grad(loss_of(new, experience, Update(loss=loss), totals).loss, new)
    # at the ratio 1: -w A of each token, over 8 responses, and for gspo over their tokens
    lengths = mask.sum(dim=1, keepdim=True) if loss == "gspo" else 1
    expected = torch.where(mask, -given * experience.advantages / lengths / 8, 0.0)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("loss", sorted(POLICY_LOSSES))
def test_what_is_chosen_automatically_keeps_the_batch_at_4096_tokens(
    language_model, tokenizer, loss: str
) -> None:
    module = build(language_model, tokenizer, update=Update(loss=loss))
    chosen = module.settings.importance
    # normal differences of 0.03 nats in the mean, so that a ratio is 1 in the mean
    spread = 0.03 * math.sqrt(math.pi / 2)
    difference = spread * torch.randn(200, 4096) - spread**2 / 2
    weights = importance_weights(
        difference,
        torch.zeros_like(difference),
        torch.ones_like(difference, dtype=torch.bool),
        mode=chosen.mode,
        low=chosen.bounds[0],
        high=chosen.bounds[1],
    )
    per_row = weights.mean(dim=1)
    effective = per_row.sum().square() / per_row.square().sum() / len(per_row)
    assert float(effective) > 0.95
