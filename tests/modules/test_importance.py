"""Weights against an engine that differs from the trainer: when, on what, and what must not matter.

Expected updates are computed token by token in plain Python from what the engine reported.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lrlhf.functional import IMPORTANCE_MODES, IMPORTANCE_PRESETS, POLICY_LOSSES
from lrlhf.models import ValueNetwork
from lrlhf.modules import PPO, RLOO, Critic, ImportanceSampling, Reference, Update
from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.modules.policy.experience import (
    measure_importance,
    off_policy_rows,
    with_importance_weights,
)
from lrlhf.modules.policy.objective import Denominators, denominators
from lrlhf.rollout import TransformersEngine, plan_micro_batches
from lrlhf.types import Experience
from tests.modules.policy_runs import SkewedEngine, assert_same, moved, one_process, sgd
from tests.modules.test_policy_objective import loss_of, random_experience

LR = 0.1
CLOSE = {"rtol": 1e-4, "atol": 1e-6}
NONE = ImportanceSampling(mode="none")


@pytest.fixture
def skewed(build: Any) -> Callable[..., RLOO]:
    """Builds a module that takes one step of plain gradient descent after a skewed engine."""
    defaults: dict[str, Any] = {
        "optimizer": sgd(LR),
        "update": Update(max_grad_norm=math.inf),
        "reference": Reference(kl_coef=0.0),
        "engine": SkewedEngine(),
    }
    return lambda **options: build(**(defaults | options))


def plain(loss: str = "sequence_clip", **options: Any) -> Update:
    return Update(loss=loss, max_grad_norm=math.inf, **options)


# ---- one step by hand


@dataclass
class OneToken:
    """What plain Python makes of one response token."""

    logprob: Tensor
    ratio: float
    """To the engine's probability."""
    column: int
    advantage: float


def responses_of(policy: PreTrainedModel, experience: Experience) -> list[list[OneToken]]:
    mask = experience.attention_mask.long()
    spread = policy(experience.input_ids, attention_mask=mask).logits.log_softmax(-1)
    rows: list[list[OneToken]] = []
    for row in range(len(experience)):
        rows.append([])
        for column in experience.response_mask[row].nonzero().flatten().tolist():
            logprob = spread[row, column - 1, experience.input_ids[row, column]]
            sampling = float(experience.sampling_logprobs[row, column])
            ratio = math.exp(float(logprob.detach()) - sampling)
            advantage = float(experience.advantages[row, column])
            rows[-1].append(OneToken(logprob, ratio, column, advantage))
    return rows


def step_of(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    """Weights after one step of plain gradient descent."""
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return {
        name: (weight - LR * gradient).detach()
        for (name, weight), gradient in zip(parameters.items(), gradients, strict=True)
    }


def within(low: float, high: float, value: float) -> float:
    return value if low <= value <= high else 0.0


@pytest.mark.parametrize(
    ("loss", "mode", "weight_of", "kl_coef"),
    [
        ("sequence_clip", {}, lambda ratio, *_: min(ratio, 2.0), 0.0),
        ("sequence_clip", {}, lambda ratio, *_: min(ratio, 2.0), 0.05),
        ("sequence_clip", {"mode": "none"}, lambda *_: 1.0, 0.05),
        (
            "sequence_clip",
            {"mode": "sequence_truncate", "high": 1.3},
            lambda _, whole, __: min(whole, 1.3),
            0.0,
        ),
        (
            "sequence_clip",
            {"mode": "sequence_mean_mask", "low": 0.8, "high": 1.3},
            lambda _, whole, length: float(0.8 <= whole ** (1 / length) <= 1.3),
            0.05,
        ),
        ("dapo", {"mode": "sequence_mask"}, lambda _, whole, __: within(0, 3, whole), 0.0),
        (
            "reinforce",
            {"mode": "token_mask", "low": 0.9},
            lambda ratio, *_: within(0.9, 5, ratio),
            0.0,
        ),
        ("cpgd", {"mode": "token_truncate", "high": 1.2}, lambda ratio, *_: min(ratio, 1.2), 0.0),
        (
            "reinforce",
            {"mode": "decoupled_geo_rs", "reject": {"seq_mean_k1": (0.8, 1.2)}},
            lambda _, whole, length: float(0.8 <= whole ** (-1 / length) <= 1.2),
            0.0,
        ),
        (
            "dapo",
            {"mode": "decoupled_token_is", "reject": {"token_k3": (0.0, 0.02)}},
            lambda ratio, *_: min(ratio, 2.0) * (ratio - 1 - math.log(ratio) <= 0.02),
            0.05,
        ),
    ],
)
def test_an_rloo_step_is_that_of_an_independent_computation(
    skewed, train, loss: str, mode: dict[str, Any], weight_of: Any, kl_coef: float
) -> None:
    """A weight is made of a token's ratio, its response's ratio, and that one's length."""
    per_response = loss == "sequence_clip"
    module = skewed(
        importance_sampling=ImportanceSampling(**mode) if mode else None,
        update=plain(loss, aggregate=None if per_response else "token_mean"),
        reference=Reference(kl_coef=kl_coef),
    )
    policy = copy.deepcopy(module.policy)
    run = train(module)
    # with a penalty the weights are computed before the update, else within it
    assert (run.experience.old_logprobs is None) == (kl_coef == 0)
    rows = responses_of(policy, run.experience)
    # on-policy the ratio to the old policy is 1, so the surrogate's gradient is that of -A log p
    surrogate, used = 0.0, []
    for row in rows:
        whole = math.prod(token.ratio for token in row)
        weights = [weight_of(token.ratio, whole, len(row)) for token in row]
        for weight, token in zip(weights, row, strict=True):
            surrogate = surrogate - weight * token.advantage * token.logprob
        used += weights[:1] if {"sequence", "geo"} & {*mode.get("mode", "").split("_")} else weights
    count = len(rows) if per_response else sum(map(len, rows))
    expected = step_of(policy, surrogate / count)
    assert_same(expected, dict(module.policy.named_parameters()), **CLOSE)
    if mode.get("mode") == "none":
        assert "importance/weight_mean" not in run.logged
    else:
        mean = sum(used) / len(used)
        assert run.logged["importance/weight_mean"] == pytest.approx(mean, rel=1e-3)
        assert 0 < run.logged["importance/cut_fraction"] < 1


def ppo_step(
    policy: PreTrainedModel,
    critic: ValueNetwork,
    experience: Experience,
    weight_of_ratio: Callable[[float], float],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of actor and critic after one on-policy step.

    Rewards are -0.1 · (log p - log ref) per token, the score on the last one; GAE with γ = 1,
    λ = 0.95; advantages whitened over all tokens; the loss of every token counts with a weight
    made of its probability over that which the engine reported.
    """
    assert experience.ref_logprobs is not None
    mask = experience.attention_mask.long()
    hidden = critic.backbone(experience.input_ids, attention_mask=mask).last_hidden_state
    tokens, values, advantages, targets = [], [], [], []
    for row, responses in enumerate(responses_of(policy, experience)):
        row_values = [
            hidden[row, token.column - 1] @ critic.head.output.weight[0] + critic.head.bias
            for token in responses
        ]
        row_advantages: list[float] = []
        next_value = following = 0.0
        reward = float(experience.scores[row])
        for token, value in reversed(list(zip(responses, row_values, strict=True))):
            given = float(experience.ref_logprobs[row, token.column])
            reward -= 0.1 * (float(token.logprob.detach()) - given)
            following = reward + next_value - float(value.detach()) + 0.95 * following
            row_advantages.insert(0, following)
            next_value, reward = float(value.detach()), 0.0
        tokens += responses
        values += row_values
        advantages += row_advantages
        targets += [a + float(v.detach()) for a, v in zip(row_advantages, row_values, strict=True)]
    mean = sum(advantages) / len(advantages)
    spread = math.sqrt(sum((a - mean) ** 2 for a in advantages) / (len(advantages) - 1))
    weighted = [weight_of_ratio(token.ratio) * token.logprob for token in tokens]
    surrogate = -sum(w * (a - mean) / spread for w, a in zip(weighted, advantages, strict=True))
    errors = sum((v - t) ** 2 for v, t in zip(values, targets, strict=True)) / (2 * len(targets))
    return step_of(policy, surrogate / len(tokens)), step_of(critic, errors)


@pytest.mark.parametrize(
    ("engine", "settings", "weight"),
    [
        (None, None, lambda _: 1.0),
        (SkewedEngine(), None, lambda ratio: min(ratio, 2.0)),
        (
            SkewedEngine(),
            ImportanceSampling(mode="token_mask", high=1.4),
            lambda ratio: within(0.5, 1.4, ratio),
        ),
    ],
)
def test_a_ppo_step_is_that_of_an_independent_computation(
    ppo, train, critic_of, other_model, engine: Any, settings: Any, weight: Any
) -> None:
    """Weights reach the actor, neither the critic nor the penalty."""
    module = ppo(
        engine=engine,
        importance_sampling=settings,
        critic=critic_of("own", optimizer=sgd(LR), max_grad_norm=math.inf),
        optimizer=sgd(LR),
        update=plain("token_clip", aggregate="token_mean", num_minibatches=1),
        reference=Reference(kl_coef=0.1, model=other_model),
    )
    policy, critic = copy.deepcopy(module.policy), copy.deepcopy(module.critic)
    experience = train(module).experience
    expected = ppo_step(policy, critic, experience, weight)
    for after, wanted in zip((module.policy, module.critic), expected, strict=True):
        assert_same(wanted, dict(after.named_parameters()), **CLOSE)


def test_over_several_steps_the_weights_stay_those_of_the_start(skewed, train) -> None:
    module = skewed(update=plain("reinforce", num_iterations=2), num_generations=2)
    policy = copy.deepcopy(module.policy)
    experience = train(module).experience
    tokens = [token for row in responses_of(policy, experience) for token in row]
    for _ in range(2):
        present = [token for row in responses_of(policy, experience) for token in row]
        loss = -sum(
            min(start.ratio, 2.0)
            * torch.exp(now.logprob - start.logprob.detach())
            * start.advantage
            for start, now in zip(tokens, present, strict=True)
        )
        policy.load_state_dict(step_of(policy, loss / len(tokens)), strict=False)
    assert_same(dict(policy.named_parameters()), dict(module.policy.named_parameters()), **CLOSE)


# ---- what must not matter


def assert_same_metrics(first: dict[str, float], second: dict[str, float]) -> None:
    names = [n for n in first if n.startswith(("mismatch/", "importance/"))]
    assert len(names) == 8
    for name in names:
        assert second[name] == pytest.approx(first[name], rel=2e-3, abs=1e-6), name


@pytest.mark.parametrize("loss", ["sequence_clip", "dapo"])
def test_neither_micro_batches_nor_old_probabilities_of_before_change_an_update(
    skewed, train, loss: str
) -> None:
    runs = []
    for budget, parts, ahead in ((None, 1, False), (44, 2, False), (1, 8, False), (44, 2, True)):
        module = skewed(num_generations=2, update=plain(loss, micro_batch_tokens=budget))
        if ahead:  # one step does not need them: the update has them too
            module.scorer._needs_old = lambda *_, **__: True
        run = train(module)
        assert len(plan_micro_batches(run.experience, max_tokens=budget, packed=True)) == parts
        assert (run.experience.importance_weights is not None) == ahead
        runs.append(run)
    for other in runs[1:]:
        assert_same(runs[0].after, other.after, **CLOSE)
        assert_same_metrics(runs[0].logged, other.logged)


# ---- where weights are used


@pytest.mark.parametrize(
    ("engine", "settings", "updated", "steps"),
    [
        (SkewedEngine(exact=True), None, False, 1),
        (SkewedEngine(), None, True, 1),
        (SkewedEngine(exact=True), ImportanceSampling(mode="sequence_truncate"), True, 1),
        # version 0 is the present one in the first iteration, and one behind in the second
        (SkewedEngine(exact=True, version=0), None, False, 1),
        (SkewedEngine(exact=True, version=0), None, True, 2),
        (SkewedEngine(exact=True, version=1), None, False, 2),
    ],
)
def test_weights_are_used_where_the_engine_is_not_exact_or_its_weights_were_older(
    skewed, train, engine: Any, settings: Any, updated: bool, steps: int
) -> None:
    run, without = (
        train(skewed(engine=engine, importance_sampling=chosen), steps=steps)
        for chosen in (settings, NONE)
    )
    assert ("importance/weight_mean" in run.logged) == updated
    assert moved(run.after, without.after) == updated
    assert "importance/weight_mean" not in without.logged


def test_a_critic_on_the_policys_backbone_does_not_keep_the_weights_off(ppo, train) -> None:
    ends = []
    for mode in ("none", "token_truncate"):
        module = ppo(
            engine=SkewedEngine(),
            importance_sampling=ImportanceSampling(mode=mode),
            optimizer=sgd(LR),
            critic=Critic(optimizer=sgd(0.01)),
        )
        assert isinstance(train(module).module, PPO)
        ends.append(module)
    assert moved(ends[0].policy.state_dict(), ends[1].policy.state_dict())
    assert_same(ends[0].value_head.state_dict(), ends[1].value_head.state_dict())


def test_only_the_responses_of_older_weights_are_weighed() -> None:
    experience = random_experience(rows=3)
    sampling = -math.log(1.5) * experience.response_mask
    versions = torch.tensor([4, 5, 6])
    aged = replace(experience, weight_version=versions, sampling_logprobs=sampling)
    assert off_policy_rows(aged, exact=True, step=5).tolist() == [True, False, False]
    assert off_policy_rows(aged, exact=False, step=5).all()
    weighted = with_importance_weights(aged, torch.zeros(3, 8), None, exact=True, step=5)
    found = weighted.importance_weights
    assert found is not None
    torch.testing.assert_close(found[0], torch.where(aged.response_mask[0], 1.5, 1.0))
    assert found[1:].eq(1).all()
    # a response that older weights began is weighed in all of its tokens, the fresh ones by 1
    begun = torch.tensor([[0, 4, 4, 4, 5, 5, 5, 5]]).expand(3, -1)
    fresh = begun == 5
    mixed = replace(aged, token_versions=begun, sampling_logprobs=sampling.masked_fill(fresh, 0.0))
    found = with_importance_weights(
        mixed, torch.zeros(3, 8), None, exact=True, step=5
    ).importance_weights
    assert found is not None
    older = aged.response_mask[0] & ~fresh[0]
    assert older.any()
    torch.testing.assert_close(found[0], torch.where(older, 1.5, 1.0))


def test_what_the_engine_cut_off_is_not_weighed() -> None:
    experience = random_experience(rows=3)
    trainer = -torch.rand(3, 8) * experience.response_mask
    # the engine kept a quarter of the probability, and found each token 0.8 times as likely
    sampling = trainer + math.log(0.8) - math.log(0.25)
    cut = replace(experience, sampling_logprobs=sampling, kept_mass=torch.full((3, 8), 0.25))
    settings = ImportanceSampling(mode="token_truncate")
    found = with_importance_weights(cut, trainer, settings, exact=True, step=0).importance_weights
    torch.testing.assert_close(found, torch.where(cut.response_mask, 1 / 0.8, 1.0))


@pytest.mark.parametrize(
    ("mode", "mean", "cut"),
    # tokens: (2 + 3 · 0.5) / 4; responses: (2 + 0.5) / 2; what is at the bound of 2 was cut
    [("token_truncate", 0.875, 0.25), ("sequence_truncate", 1.25, 0.5)],
)
def test_the_mean_weight_is_over_tokens_or_over_responses(
    mode: Any, mean: float, cut: float
) -> None:
    mask = torch.tensor([[False, True, False, False, False], [False, True, True, True, False]])
    given = torch.where(mask, torch.tensor([[2.0], [0.5]]), 1.0)
    experience = random_experience(rows=2, width=4)
    micro = replace(experience, loss_mask=mask, response_mask=mask, importance_weights=given)
    metrics = MetricSums()
    measure_importance(micro, metrics, ImportanceSampling(mode=mode))
    expected = {"importance/weight_mean": mean, "importance/cut_fraction": cut}
    assert metrics.reduce(one_process(), torch.device("cpu")) == expected


def test_the_weights_reach_the_policy_term_and_no_other() -> None:
    experience = random_experience()
    given = torch.where(experience.response_mask, torch.rand(8, 8) * 2, 1.0)
    weighted = replace(experience, importance_weights=given)
    assert experience.old_logprobs is not None
    assert experience.ref_logprobs is not None
    new = (experience.old_logprobs + 0.3 * torch.randn(8, 8)).requires_grad_()
    loss, options = POLICY_LOSSES["reinforce"], {"kl_estimator": "k2", "entropy_coef": 0.2}
    terms = loss_of(new, weighted, loss, **options)
    (gradient,) = torch.autograd.grad(terms.loss, new)
    now = new.detach()
    # -w ρ A / N of the policy, 0.1 (new - ref) / N of k2, and -0.2 e^new / N of the "entropy" e^new
    expected = (
        -given * (now - experience.old_logprobs).exp() * experience.advantages
        + 0.1 * (now - experience.ref_logprobs)
        - 0.2 * now.exp()
    ) / experience.response_mask.sum()
    expected = torch.where(experience.response_mask, expected, 0.0)
    torch.testing.assert_close(gradient, expected, **CLOSE)
    bare = loss_of(new, experience, loss, **options)
    assert torch.equal(bare.kl, terms.kl)
    assert not torch.equal(bare.policy, terms.policy)


@pytest.mark.parametrize("loss", ["sequence_clip", "gspo", "gmpo"])
def test_weights_per_token_weigh_the_tokens_of_a_loss_per_response(loss: str) -> None:
    experience = random_experience()
    mask = experience.response_mask
    given = torch.where(mask, torch.rand(8, 8) * 2, 1.0)
    weighted = replace(experience, importance_weights=given, ref_logprobs=None)
    assert weighted.old_logprobs is not None
    new = weighted.old_logprobs.clone().requires_grad_()
    totals = Denominators(*denominators(weighted))
    terms = loss_of(new, weighted, POLICY_LOSSES[loss], totals, entropy_coef=0.0)
    (gradient,) = torch.autograd.grad(terms.loss, new)
    # at the ratio 1: -w A of each token, over 8 responses, and for the others over their tokens
    lengths = 1 if loss == "sequence_clip" else mask.sum(dim=1, keepdim=True)
    expected = torch.where(mask, -given * weighted.advantages / lengths / 8, 0.0)
    torch.testing.assert_close(gradient, expected)


# ---- what is measured


def test_an_engine_that_agrees_is_measured_too_and_needs_no_weights(skewed, train) -> None:
    logged = train(skewed(engine=TransformersEngine()), steps=2).logged
    assert logged["mismatch/max"] < 1e-4
    assert logged["mismatch/ratio_p99"] == pytest.approx(1.0, abs=1.1e-3)
    assert not any(name.startswith("importance/") for name in logged)


def test_the_mismatch_is_measured_while_the_policy_waits(skewed, train) -> None:
    logged = train(skewed(update=Update(freeze_steps=1))).logged
    # the absolute values of normal numbers of spread 0.5 have the mean 0.5 √(2/π) = 0.40
    assert 0.25 < logged["mismatch/mean"] < 0.55


# ---- settings


def test_the_modes_of_the_option_are_those_of_the_function_and_have_bounds_of_their_own() -> None:
    names = get_args(get_type_hints(ImportanceSampling)["mode"])
    assert names == ("none", *IMPORTANCE_MODES, *IMPORTANCE_PRESETS)
    bounds = {mode: ImportanceSampling(mode=mode).bounds for mode in IMPORTANCE_MODES}
    assert bounds == {
        "token_truncate": (0.0, 2.0),
        "token_mask": (0.5, 5.0),
        "sequence_truncate": (0.0, 2.0),
        "sequence_mask": (0.0, 3.0),
        "sequence_mean_mask": (0.95, 1.05),
    }
    assert ImportanceSampling(mode="token_mask", high=1.5).bounds == (0.5, 1.5)


def test_presets_have_the_names_and_values_of_verl() -> None:
    chosen = ImportanceSampling(mode="decoupled_geo_rs_seq_tis")
    assert (chosen.weights, chosen.bounds) == ("sequence_truncate", (0.0, 2.0))
    assert chosen.rejection == {"seq_mean_k1": (0.999, 1.001)}
    k3 = ImportanceSampling(mode="decoupled_k3_rs", reject={"token_k2": (0.0, 0.5)})
    assert (k3.weights, k3.rejection) == ("none", {"token_k2": (0.0, 0.5)})


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"mode": "decoupled_geo_rs", "high": 2.0}, "no such bound"),
        ({"mode": "none", "reject": {"seq_mean_k1": (1.1, 1.2)}}, "seq_mean_k1 is bounded"),
        ({"mode": "none", "reject": {"token_k3": (0.1, 0.2)}}, "token_k3 is bounded"),
        ({"mode": "none", "reject": {"seq_k3": (0.0, 0.2)}}, "unknown rejection criterion"),
        ({"mode": "decoupled_geo"}, "decoupled_geo_rs"),
    ],
)
def test_what_would_reject_equal_probabilities_is_refused(
    options: dict[str, Any], culprit: str
) -> None:
    with pytest.raises(ValueError, match=culprit):
        ImportanceSampling(**options)
