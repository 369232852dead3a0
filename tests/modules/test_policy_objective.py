"""One fixed rollout through the module's own path gives TRL's advantages and TRL's loss."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lrlhf.functional import POLICY_LOSSES, Algorithm, PolicyLoss
from lrlhf.modules.policy.experience import as_experience, compute_advantages
from lrlhf.modules.policy.objective import Denominators, denominators, policy_loss, summed_tokens
from lrlhf.modules.policy.policy_settings import assemble_algorithm
from lrlhf.modules.settings import Advantage, Reference, Update
from lrlhf.rewards import Rewards
from lrlhf.run import Collectives
from lrlhf.types import Experience, Rollout

GOLDEN = Path(__file__).parents[1] / "functional" / "golden" / "trl.json"
CASES = json.loads(GOLDEN.read_text())["rloo"]


def assembled(advantage: Advantage = Advantage(), update: Update = Update()) -> Algorithm:  # noqa: B008
    return assemble_algorithm(None, default="rloo", advantage=advantage, update=update)


def one_process() -> Collectives:
    return Collectives(SimpleNamespace(world_size=1, global_rank=0))  # type: ignore[arg-type]


def rollout_of(mask: Tensor, truncated: Tensor, num_generations: int) -> Rollout:
    """A rollout with a prompt of one token before each response."""
    rows = mask.shape[0]
    nothing = torch.zeros(rows, 1, dtype=torch.bool)
    response = torch.cat([nothing, mask], dim=1)
    return Rollout(
        input_ids=torch.ones_like(response, dtype=torch.long),
        attention_mask=torch.cat([~nothing, mask], dim=1),
        response_mask=response,
        sampling_logprobs=torch.zeros(response.shape),
        group_ids=torch.arange(rows) // num_generations,
        truncated=truncated,
    )


def shifted(values: Any) -> Tensor:
    tensor = torch.tensor(values)
    return torch.cat([torch.zeros(len(tensor), 1), tensor], dim=1)


def scored(case: dict[str, Any]) -> Tensor:
    """Scores as the runner of the rewards makes them, None included."""
    table = case["rewards_per_function"]

    def column(index: int) -> Any:
        return lambda completions: [row[index] for row in table]

    rewards = Rewards(
        [column(0), column(1)],
        weights=case["reward_weights"],
        names=["first", "second"],
        max_unscorable_fraction=1.0,
    )
    rows = len(table)
    return rewards.score(
        prompts=[""] * rows,
        completions=[""] * rows,
        completion_ids=[[0]] * rows,
        columns=[{}] * rows,
    ).scores


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_advantages_and_loss_equal_trl_on_the_same_rollout(case: dict[str, Any]) -> None:
    mask = torch.tensor(case["completion_mask"]).bool()
    truncated = torch.zeros(len(mask), dtype=torch.bool)
    if case["mask_truncated"]:
        # TRL recorded an empty mask for these; here they keep their tokens and are left out later
        truncated = ~torch.tensor(case["ends_with_eos"])
        mask = mask | truncated[:, None]
    experience = as_experience(
        rollout_of(mask, truncated, case["num_generations"]),
        scores=scored(case),
        old_logprobs=shifted(case["old_logprobs"]),
        ref_logprobs=shifted(case["ref_logprobs"]) if case["beta"] else None,
    )
    settings = Advantage(
        unscorable="trl",
        estimator="rloo",
        reward_clip_range=case["reward_clip_range"],
        normalize=case["normalize_advantages"],
        truncated="trl" if case["mask_truncated"] else "train",
    )
    experience = compute_advantages(
        experience,
        algorithm=assembled(settings),
        settings=settings,
        reward_kl="k1",
        kl_coef=case["beta"],
        num_generations=case["num_generations"],
        whiten=one_process().whiten,
    )
    expected = case["expected"]
    per_row = experience.advantages.sum(dim=1) / experience.response_mask.sum(dim=1)
    torch.testing.assert_close(per_row, torch.tensor(expected["advantages"]), rtol=1e-5, atol=1e-6)
    totals = Denominators(*denominators(experience))
    terms = policy_loss(
        shifted(case["new_logprobs"]),
        experience,
        loss=POLICY_LOSSES["sequence_clip"]._replace(
            options={"clip_low": case["epsilon_low"], "clip_high": case["epsilon_high"]}
        ),
        entropy_coef=0.0,
        kl_estimator="k3",
        kl_coef=0.0,
        totals=totals,
        max_new_tokens=mask.shape[1],
    )
    torch.testing.assert_close(terms.loss, torch.tensor(expected["loss"]), rtol=1e-5, atol=1e-6)


def random_experience(rows: int = 8, width: int = 7) -> Experience:
    lengths = torch.randint(1, width, (rows,))
    mask = torch.arange(width) < lengths[:, None]
    rollout = rollout_of(mask, torch.zeros(rows, dtype=torch.bool), 4)
    old, ref = -torch.rand(2, rows, width + 1) * rollout.response_mask
    experience = as_experience(
        rollout, scores=torch.randn(rows), old_logprobs=old, ref_logprobs=ref
    )
    return replace(experience, advantages=torch.randn(rows, 1) * rollout.response_mask)


def loss_of(
    logprobs: Tensor, experience: Experience, loss: PolicyLoss, totals: Denominators
) -> Tensor:
    return policy_loss(
        logprobs,
        experience,
        loss=loss,
        entropy_coef=0.01,
        kl_estimator="k3",
        kl_coef=0.1,
        totals=totals,
        max_new_tokens=9,
        entropy=logprobs.exp(),
    ).loss


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_the_gradient_does_not_depend_on_the_split_into_micro_batches(name: str) -> None:
    experience = random_experience()
    term = POLICY_LOSSES[name]
    totals = Denominators(*denominators(experience))
    new = (experience.old_logprobs + 0.3 * torch.randn(8, 8)).requires_grad_()
    loss = loss_of(new, experience, term, totals)
    (whole,) = torch.autograd.grad(loss, new)
    parts = [torch.tensor([0, 5]), torch.tensor([1, 2, 3]), torch.tensor([4, 6, 7])]
    shares = [loss_of(new[rows], experience.select(rows), term, totals) for rows in parts]
    (split,) = torch.autograd.grad(sum(shares), new)
    torch.testing.assert_close(split, whole)
    torch.testing.assert_close(sum(shares), loss)


@pytest.mark.parametrize("length", [16, 512])
@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in POLICY_LOSSES), ("sequence_clip", {"length_normalized": True})],
)
def test_kl_and_entropy_keep_their_proportion_to_the_policy_term(
    name: str, options: dict[str, Any], length: int
) -> None:
    mask = torch.ones(2, length, dtype=torch.bool)
    rollout = rollout_of(mask, torch.zeros(2, dtype=torch.bool), 2)
    old = torch.full(rollout.response_mask.shape, -0.7)
    experience = as_experience(
        rollout, scores=torch.zeros(2), old_logprobs=old, ref_logprobs=old - 0.5
    )
    experience = replace(experience, advantages=torch.ones_like(old) * rollout.response_mask)
    new = old.clone().requires_grad_()
    loss = POLICY_LOSSES[name]

    def gradient(kl_coef: float, entropy_coef: float) -> Tensor:
        terms = policy_loss(
            new,
            experience,
            loss=loss._replace(options={**loss.options, **options}),
            entropy_coef=entropy_coef,
            kl_estimator="k3",
            kl_coef=kl_coef,
            totals=Denominators(*denominators(experience)),
            max_new_tokens=512,
            entropy=new.exp(),
        )
        return torch.autograd.grad(terms.loss, new)[0]

    policy = gradient(0.0, 0.0)
    # a token's gradient is -1 (advantage 1, ratio 1) beside 0.3 (1 - e^-0.5) of k3, and beside
    # -0.2 e^-0.7 of the "entropy" e^logprob, whatever the terms are summed over
    for change, expected in (
        (gradient(0.3, 0.0) - policy, -0.3 * (1 - math.exp(-0.5))),
        (gradient(0.0, 0.2) - policy, 0.2 * math.exp(-0.7)),
    ):
        torch.testing.assert_close(change, expected * policy, rtol=1e-3, atol=1e-7)


def test_means_per_token_are_summed_where_the_policy_term_is() -> None:
    tokens, rows = torch.tensor([600.0, 4.0])
    summed = {
        name: float(summed_tokens(loss, tokens=tokens, rows=rows))
        for name, loss in POLICY_LOSSES.items()
    }
    assert summed == {
        name: 150.0 if name in ("sequence_clip", "remax") else 1.0 for name in POLICY_LOSSES
    }


def test_an_excluded_truncated_response_changes_nothing_for_its_siblings() -> None:
    # scores 1, 0, 5 of which the third is truncated: without it, 1 - 0 and 0 - 1
    mask = torch.ones(3, 2, dtype=torch.bool)
    truncated = torch.tensor([False, False, True])
    experience = as_experience(
        rollout_of(mask, truncated, 3),
        scores=torch.tensor([1.0, 0.0, 5.0]),
        old_logprobs=None,
        ref_logprobs=None,
    )
    computed = compute_advantages(
        experience,
        algorithm=assembled(Advantage()),
        settings=Advantage(truncated="exclude"),
        reward_kl="k1",
        kl_coef=0.0,
        num_generations=3,
        whiten=one_process().whiten,
    )
    assert computed.advantages[:, 1].tolist() == [1.0, -1.0, 0.0]
    assert computed.counted.tolist() == [True, True, False]
    assert not computed.loss_mask[2].any()
    kept = compute_advantages(
        experience,
        algorithm=assembled(Advantage()),
        settings=Advantage(truncated="trl"),
        reward_kl="k1",
        kl_coef=0.0,
        num_generations=3,
        whiten=one_process().whiten,
    )
    # siblings' means with it: 1 - (0 + 5) / 2, 0 - (1 + 5) / 2, 5 - (1 + 0) / 2
    assert kept.advantages[:, 1].tolist() == [-1.5, -3.0, 4.5]
    assert kept.counted.all()
    assert not kept.loss_mask[2].any()


def test_unscorable_responses_get_no_advantage_even_when_whitened() -> None:
    mask = torch.ones(4, 2, dtype=torch.bool)
    experience = as_experience(
        rollout_of(mask, torch.zeros(4, dtype=torch.bool), 4),
        scores=torch.tensor([1.0, float("nan"), 0.0, 2.0]),
        old_logprobs=None,
        ref_logprobs=None,
    )
    computed = compute_advantages(
        experience,
        algorithm=assembled(Advantage(normalize=True)),
        settings=Advantage(normalize=True),
        reward_kl="k1",
        kl_coef=0.0,
        num_generations=4,
        whiten=one_process().whiten,
    )
    # leave one out of 1, 0, 2: 0, -1.5, 1.5; their deviation is 1.5
    expected = torch.tensor([0.0, 0.0, -1.5 / 1.5001, 1.5 / 1.5001])
    torch.testing.assert_close(computed.advantages[:, 1], expected)


@pytest.mark.parametrize(
    ("build", "culprit"),
    [
        (lambda: Reference(kl_coef=-0.1), "reference.kl_coef"),
        (lambda: Reference(sync_every=0), "reference.sync_every"),
        (lambda: Reference(kl_coef=0.0, sync_every=2), "reference.sync_every"),
        (lambda: Reference(mixup=0.0), "reference.mixup"),
        (lambda: assembled(Advantage(estimator="rlo")), "rloo"),
        (lambda: assembled(Advantage(estimator="no.such.function")), "no.such.function"),
        (lambda: Advantage(reward_clip_range=(1.0, -1.0)), "reward_clip_range"),
        (lambda: assembled(update=Update(loss="sequence_clp")), "sequence_clip"),
        (
            lambda: assembled(update=Update(loss="dapo", options={"clip_hgih": 0.3})),
            "clip_high",
        ),
        (
            lambda: assembled(update=Update(loss="cpgd", options={"clip_low": 0.3})),
            "update.options",
        ),
        (
            lambda: assembled(Advantage(estimator="rloo", options={"gamma": 0.9})),
            "advantage.options",
        ),
        (lambda: Update(num_iterations=0), "update.num_iterations"),
        (lambda: Update(micro_batch_tokens=0), "update.micro_batch_tokens"),
        (lambda: Update(max_grad_norm=0.0), "update.max_grad_norm"),
    ],
)
def test_impossible_settings_are_refused_by_name(build: Any, culprit: str) -> None:
    with pytest.raises(ValueError, match=culprit):
        build()


@pytest.mark.parametrize("value", [0.7, 0.9, 5.3, 1.0])
@pytest.mark.parametrize("eps", [1e-8, 1e-4])
def test_whitening_equal_values_gives_zeros(value: float, eps: float) -> None:
    # 37 · 0.7 is rounded: a plain mean would leave 6e-8, and the deviation is as small
    values = torch.full((37,), value)
    mask = torch.ones(37, dtype=torch.bool)
    assert one_process().whiten(values, mask, eps=eps).tolist() == [0.0] * 37
    nothing = one_process().whiten(values, ~mask, eps=eps)
    assert torch.equal(nothing, values)
