"""First tokens that are drawn at a temperature of their own, and what makes up for it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lrlhf.functional import PolicyLoss, importance_weighted_policy_loss
from lrlhf.models import sequence_logprobs
from lrlhf.modules import Reference, Update
from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.modules.policy.experience import _with_temperature_weights, as_experience
from lrlhf.rollout import Capabilities, Sampling, TransformersEngine
from lrlhf.rollout.engines.token_sampler import TokenSampler
from lrlhf.rollout.vllm.vllm_base import sampling_arguments
from lrlhf.types import Experience
from tests.modules.policy_runs import moved, sgd
from tests.modules.test_policy_objective import loss_of, rollout_of
from tests.rollout.test_episodes import Echo, play, prompt_batch
from tests.rollout.test_transformers_engine import generate, responses

HOT = Sampling(max_new_tokens=5, temperature=0.7, first_temperature=4.0, first_top_k=6)


@torch.no_grad()
def distributions(model: Any, ids: Tensor, hot: Sampling) -> tuple[Tensor, Tensor]:
    """What the policy gives the next token, and what it is drawn from."""
    logits = model.eval()(input_ids=ids).logits[0, -1].double()
    policy = (logits / hot.temperature).softmax(-1)
    kept = logits.topk(hot.first_top_k or len(logits)).indices
    drawn = torch.zeros_like(policy)
    drawn[kept] = (logits[kept] / hot.first_temperature).softmax(-1)
    return policy, drawn


@pytest.mark.parametrize("top_k", [0, 6])
def test_first_tokens_follow_the_hot_distribution(language_model, tokenizer, top_k: int) -> None:
    size, hot = 2000, replace(HOT, max_new_tokens=1, first_top_k=top_k, temperature=0.5)
    rollout = generate(language_model, tokenizer, hot, texts=("b",), num_generations=size)
    drawn = torch.tensor([response[0] for response in responses(rollout)])
    ids = torch.tensor([tokenizer("b")["input_ids"]])
    policy, expected = distributions(language_model, ids, hot)
    counts = torch.bincount(drawn, minlength=len(expected))
    assert counts[expected == 0].sum() == 0
    common = expected * size >= 10
    chi_square = ((counts - expected * size)[common].square() / (expected * size)[common]).sum()
    freedom = int(common.sum())
    # mean of chi-square is its degrees of freedom, its deviation sqrt(2 k): five of them
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5
    column = int(rollout.response_mask[0].long().argmax())
    close = {"rtol": 1e-4, "atol": 1e-5}
    found = rollout.sampling_logprobs[:, column].double()
    torch.testing.assert_close(found, expected[drawn].log(), **close)
    engine = rollout.engine_logprobs[:, column].double()
    torch.testing.assert_close(engine, policy[drawn].log(), **close)


def test_later_tokens_are_those_of_the_policy(language_model, tokenizer) -> None:
    rollout = generate(language_model, tokenizer, HOT, texts=("b", "cd"), num_generations=20)
    own = sequence_logprobs(language_model, rollout, temperature=HOT.temperature)
    own = own * rollout.response_mask
    torch.testing.assert_close(rollout.engine_logprobs, own, rtol=1e-4, atol=1e-4)
    first = rollout.response_mask & (rollout.response_mask.cumsum(dim=1) == 1)
    later = rollout.response_mask & ~first
    torch.testing.assert_close(rollout.sampling_logprobs[later], own[later], rtol=0, atol=1e-4)
    assert (rollout.sampling_logprobs - own)[first].abs().max() > 0.5
    beginnings = {response[0] for response in responses(rollout)}
    cold = generate(
        language_model,
        tokenizer,
        Sampling(max_new_tokens=5, temperature=0.7),
        texts=("b", "cd"),
        num_generations=20,
    )
    assert beginnings != {response[0] for response in responses(cold)}


@pytest.mark.parametrize("on_policy", [True, False])
def test_advantages_have_the_weight_of_the_response(build, train, on_policy: bool) -> None:
    update = Update() if on_policy else Update(num_iterations=2)
    options = {"sampling": HOT, "reference": Reference(kl_coef=0.0), "update": update}
    module = build(optimizer=sgd(1.0), **options)
    run = train(module)
    assert moved(run.before, run.after)
    module.policy.load_state_dict(
        {name.removeprefix("policy."): value for name, value in run.before.items()}
    )
    experience, mask = run.experience, run.experience.response_mask
    for row in range(len(experience)):
        start = int(mask[row].long().argmax())
        ids = experience.input_ids[row : row + 1, :start]
        policy, drawn = distributions(module.policy, ids, HOT)
        token = int(experience.input_ids[row, start])
        weight = float(policy[token] / drawn[token])
        group = experience.scores[row // 4 * 4 : row // 4 * 4 + 4]
        # leave one out: the score less the mean of its three siblings
        advantage = float(group[row % 4]) - (float(group.sum()) - float(group[row % 4])) / 3
        found = experience.advantages[row, mask[row]]
        torch.testing.assert_close(
            found, torch.full_like(found, advantage * weight), rtol=1e-3, atol=1e-4
        )
    assert run.logged["mismatch/max"] < 1e-3  # the heat is no mismatch
    assert run.logged["importance/first_token"] == pytest.approx(
        float(experience.kept_mass[mask & (mask.cumsum(dim=1) == 1)].mean()), rel=1e-4
    )


def test_the_weighted_gradient_is_that_of_the_policys_own_responses() -> None:
    """Over all responses of two tokens out of three; the reward depends on both."""
    drawn = torch.tensor([2, 1, 1]) / 4  # the first token's hot distribution
    own = torch.tensor([0.7, 0.2, 0.1])  # and the policy's
    behind = torch.tensor([[2, 1, 1], [1, 1, 2], [1, 2, 1]]) / 4
    weights = [one.log().requires_grad_() for one in (own, behind)]
    rewards = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, -1.0], [2.0, 0.1, -0.7]])

    def logprobs() -> Tensor:
        first, second = weights
        return torch.stack([first.log_softmax(0)[:, None].expand(3, 3), second.log_softmax(1)])

    expected = torch.autograd.grad(-(logprobs().sum(0).exp() * rewards).sum(), weights)
    # sixteen rows, each response as often as it comes
    often = (16 * drawn[:, None] * behind).round().long().flatten()
    rows = torch.arange(9).repeat_interleave(often)
    assert len(rows) == 16
    rollout = rollout_of(torch.ones(16, 2).bool(), torch.zeros(16).bool(), 16)
    mass = torch.ones(16, 3)
    mass[:, 1] = (own / drawn)[rows // 3]
    plain = as_experience(
        replace(rollout, kept_mass=mass),
        scores=rewards.flatten()[rows],
    )
    plain = replace(plain, advantages=plain.scores[:, None] * plain.response_mask)

    def gradient(experience: Experience) -> tuple[Tensor, ...]:
        told = torch.nn.functional.pad(logprobs().flatten(1)[:, rows].T, (1, 0))
        loss = PolicyLoss("plain", importance_weighted_policy_loss, aggregate="sequence_sum")
        terms = loss_of(told, experience, loss, entropy_coef=0.0, kl_coef=0.0)
        return torch.autograd.grad(terms.loss, weights)

    metrics = MetricSums()
    for one, other in zip(
        gradient(_with_temperature_weights(plain, metrics)), expected, strict=True
    ):
        torch.testing.assert_close(one, other)
    # the weight on the first token alone would not do
    alone = replace(plain, advantages=plain.advantages * mass)
    assert not torch.allclose(gradient(alone)[1], expected[1], atol=1e-2)


@pytest.mark.parametrize(("policy", "drawn"), [(0.01, 100.0), (1.0, 0.01)])
def test_tokens_that_one_of_the_two_distributions_hardly_has_leave_finite_numbers(
    policy: float, drawn: float
) -> None:
    """In float32 the quotient of their probabilities would be 0, whose logarithm is infinite."""
    sampling = Sampling(temperature=policy, first_temperature=drawn, max_new_tokens=1)
    sampler = TokenSampler(sampling, range(40), prompt_mask=torch.ones(40, 2).bool())
    scores = torch.tensor([0.0, -5.0, -3.0]).expand(40, 3)
    tokens = sampler(torch.zeros(40, 2).long(), scores).argmax(dim=1)
    told = [one.segments[0] for one in sampler.responses(tokens[:, None], torch.ones(40).long())]
    assert set(tokens.tolist()) == ({0, 1, 2} if policy < 1 else {0})
    for token, segment in zip(tokens.tolist(), told, strict=True):
        assert segment.kept_mass is not None
        own = torch.log_softmax(scores[0].double() / policy, dim=0)[token]
        hot = torch.log_softmax(scores[0].double() / drawn, dim=0)[token]
        # 80 nats say as well as 500 that there was nothing to learn
        expected = float((own - hot).clamp(-80, 80))
        assert float(segment.kept_mass.double().log()) == pytest.approx(expected, abs=1e-4)


def test_evaluations_and_greedy_baselines_start_as_they_go_on(build, train) -> None:
    module = build(sampling=HOT, algorithm="remax", num_generations=2)
    assert module.settings.eval_sampling.first_temperature is None
    run = train(module, val_check_interval=1, limit_val_batches=1)
    cold = train(
        build(
            sampling=replace(HOT, first_temperature=None, first_top_k=0),
            algorithm="remax",
            num_generations=2,
        )
    )
    greedy = [[record["extra_values"]["greedy"] for record in one.records] for one in (run, cold)]
    assert greedy[0] == greedy[1]


class Reticent(TransformersEngine):
    """Does not tell how likely its tokens were without the heat."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, reports_kept_mass=False)


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"sampling": replace(HOT, top_p=0.9), "allow_truncated_sampling": True}, "first_top_k"),
        ({"sampling": HOT, "engine": Reticent()}, "Reticent draws all tokens .* one temperature"),
        ({"eval_sampling": HOT, "engine": Reticent()}, "TransformersEngine"),
    ],
)
def test_what_does_not_go_with_it_is_refused(build, options: Any, culprit: str) -> None:
    with pytest.raises(ValueError, match=culprit):
        build(**options)


@pytest.mark.parametrize(
    ("options", "culprit"),
    [
        ({"first_temperature": 0.0}, "first_temperature is 0.0; it must be above 0"),
        ({"first_temperature": 2.0, "first_top_k": -1}, "first_top_k is -1"),
        ({"first_top_k": 8}, "there is no first_temperature"),
    ],
)
def test_options_out_of_range_are_refused(options: Any, culprit: str) -> None:
    with pytest.raises(ValueError, match=culprit):
        Sampling(**options)


def test_every_turn_of_an_episode_starts_hot(language_model) -> None:
    options: dict[str, Any] = {
        "policy": language_model,
        "num_generations": 2,
        "max_turn_tokens": 6,
        "sampling": replace(HOT, max_new_tokens=60),
    }
    prompts = prompt_batch("one ", "and two ", word=["x", "yz"])
    rollout, _ = play(TransformersEngine(), Echo, prompts, **options)
    mask = rollout.response_mask
    own = sequence_logprobs(language_model, rollout, temperature=HOT.temperature) * mask
    torch.testing.assert_close(rollout.engine_logprobs, own, rtol=1e-4, atol=1e-4)
    differs = (rollout.sampling_logprobs - own).abs() > 1e-3
    begins = mask & ~mask.roll(1, dims=1)
    assert begins.sum() > 2 * len(mask)  # several turns
    assert (differs <= begins).all()
    assert differs.sum() > 0.9 * begins.sum()


def test_vllm_is_not_asked_for_it(language_model, tokenizer) -> None:
    with pytest.raises(ValueError, match="vLLM draws all tokens of a response at one temperature"):
        sampling_arguments(HOT, language_model, tokenizer)
