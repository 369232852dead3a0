"""One fixed rollout through the module's own path gives TRL's advantages and TRL's loss."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lrlhf.functional import POLICY_LOSSES, Algorithm, PolicyLoss
from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.modules.metrics.rollout_metrics import measure_update
from lrlhf.modules.policy.experience import as_experience, compute_advantages
from lrlhf.modules.policy.objective import (
    Denominators,
    LossTerms,
    denominators,
    loss_terms,
    summed_tokens,
)
from lrlhf.modules.policy.settings import assemble_algorithm
from lrlhf.modules.settings import Advantage, Update
from lrlhf.rewards import Rewards
from lrlhf.types import Experience, Rollout
from tests.modules.policy_runs import one_process

GOLDEN = Path(__file__).parents[1] / "functional" / "golden" / "trl.json"
CASES = json.loads(GOLDEN.read_text())["rloo"]
NAN = float("nan")


def assembled(advantage: Advantage = Advantage(), update: Update = Update()) -> Algorithm:  # noqa: B008
    return assemble_algorithm(None, default="rloo", advantage=advantage, update=update)


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


def with_advantages(
    experience: Experience, settings: Advantage, num_generations: int, kl_coef: float = 0.0
) -> Experience:
    return compute_advantages(
        experience,
        algorithm=assembled(settings),
        settings=settings,
        reward_kl_estimator="k1",
        kl_coef=kl_coef,
        num_generations=num_generations,
        whiten=one_process().whiten,
    )


def judged(scores: list[float], settings: Advantage, *truncated: int) -> Experience:
    """One group of responses of two tokens, of which some are truncated."""
    rows = len(scores)
    cut = torch.tensor([row in truncated for row in range(rows)])
    rollout = rollout_of(torch.ones(rows, 2, dtype=torch.bool), cut, rows)
    experience = as_experience(rollout, scores=torch.tensor(scores))
    return with_advantages(experience, settings, rows)


def loss_of(
    logprobs: Tensor,
    experience: Experience,
    loss: PolicyLoss,
    totals: Denominators | None = None,
    **options: Any,
) -> LossTerms:
    defaults = {"entropy_coef": 0.01, "kl_estimator": "k3", "kl_coef": 0.1, "max_new_tokens": 9}
    totals = totals or Denominators(*denominators(experience))
    return loss_terms(
        logprobs,
        experience,
        loss=loss,
        totals=totals,
        entropy=logprobs.exp(),
        **(defaults | options),
    )


# ---- against TRL


def shifted(values: Any) -> Tensor:
    tensor = torch.tensor(values)
    return torch.cat([torch.zeros(len(tensor), 1), tensor], dim=1)


def scored(case: dict[str, Any]) -> Tensor:
    """Scores as the runner of the rewards makes them, None included.

    TRL lets a function decline single responses of a group, which here leaves the group out. Each
    row is a group of its own, so that the others decide as they do there.
    """
    table = case["rewards_per_function"]
    rewards = Rewards(
        {
            name: lambda completions, index=index: [row[index] for row in table]
            for index, name in enumerate(("first", "second"))
        },
        weights=case["reward_weights"],
        max_unscorable_fraction=1.0,
    )
    texts, ids, columns = ([one] * len(table) for one in ("", [0], {}))
    return rewards.score(
        prompts=texts,
        completions=texts,
        completion_ids=ids,
        columns=columns,
        group_ids=range(len(table)),
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
    experience = with_advantages(experience, settings, case["num_generations"], case["beta"])
    per_row = experience.advantages.sum(dim=1) / experience.response_mask.sum(dim=1)
    close = {"rtol": 1e-5, "atol": 1e-6}
    expected = case["expected"]
    torch.testing.assert_close(per_row, torch.tensor(expected["advantages"]), **close)
    clip = {"clip_low": case["epsilon_low"], "clip_high": case["epsilon_high"]}
    loss = POLICY_LOSSES["sequence_clip"]._replace(options=clip)
    new = shifted(case["new_logprobs"])
    terms = loss_of(new, experience, loss, entropy_coef=0.0, kl_coef=0.0)
    torch.testing.assert_close(terms.loss, torch.tensor(expected["loss"]), **close)


# ---- the loss


def random_experience(rows: int = 8, width: int = 7) -> Experience:
    lengths = torch.randint(1, width, (rows,))
    mask = torch.arange(width) < lengths[:, None]
    rollout = rollout_of(mask, torch.zeros(rows, dtype=torch.bool), 4)
    old, ref = -torch.rand(2, rows, width + 1) * rollout.response_mask
    experience = as_experience(
        rollout, scores=torch.randn(rows), old_logprobs=old, ref_logprobs=ref
    )
    advantages = torch.randn(rows, 1) * rollout.response_mask
    covariant = (torch.rand(rows, width + 1) < 0.3) & rollout.response_mask
    return replace(experience, advantages=advantages, covariant=covariant)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_the_gradient_does_not_depend_on_the_split_into_micro_batches(
    name: str, weighted: bool
) -> None:
    experience, loss = random_experience(), POLICY_LOSSES[name]
    if weighted:
        given = torch.rand(8, 1 if loss.level == "sequence" else 8).expand(8, 8) * 2
        given = torch.where(experience.response_mask, given, 1.0)
        experience = replace(experience, importance_weights=given)
    totals = Denominators(*denominators(experience))
    new = (experience.old_logprobs + 0.3 * torch.randn(8, 8)).requires_grad_()
    whole = loss_of(new, experience, loss, totals).loss
    (expected,) = torch.autograd.grad(whole, new)
    for rows in ([[0, 5], [1, 2, 3], [4, 6, 7]], [[row] for row in range(8)]):
        shares = sum(
            loss_of(new[part], experience.select(torch.tensor(part)), loss, totals).loss
            for part in rows
        )
        (split,) = torch.autograd.grad(shares, new)
        torch.testing.assert_close(split, expected)
        torch.testing.assert_close(shares, whole)


@pytest.mark.parametrize("length", [16, 512])
@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in POLICY_LOSSES), ("sequence_clip", {"length_normalized": True})],
)
def test_kl_and_entropy_keep_their_proportion_to_the_policy_term(
    name: str, options: dict[str, Any], length: int
) -> None:
    rollout = rollout_of(torch.ones(2, length, dtype=torch.bool), torch.zeros(2).bool(), 2)
    old = torch.full(rollout.response_mask.shape, -0.7)
    experience = as_experience(
        rollout, scores=torch.zeros(2), old_logprobs=old, ref_logprobs=old - 0.5
    )
    nothing = torch.zeros_like(rollout.response_mask)
    advantages = torch.ones_like(old) * rollout.response_mask
    experience = replace(experience, advantages=advantages, covariant=nothing)
    new = old.clone().requires_grad_()
    loss = POLICY_LOSSES[name]
    loss = loss._replace(options={**loss.options, **options})

    def gradient(kl_coef: float, entropy_coef: float) -> Tensor:
        weights = {"kl_coef": kl_coef, "entropy_coef": entropy_coef}
        terms = loss_of(new, experience, loss, max_new_tokens=512, **weights)
        return torch.autograd.grad(terms.loss, new)[0]

    policy = gradient(0.0, 0.0)
    # a token's gradient is -1 (advantage 1, ratio 1) beside 0.3 (1 - e^-0.5) of k3, and beside
    # -0.2 e^-0.7 of the "entropy" e^logprob, whatever the terms are summed over
    for change, expected in (
        (gradient(0.3, 0.0) - policy, -0.3 * (1 - math.exp(-0.5))),
        (gradient(0.0, 0.2) - policy, 0.2 * math.exp(-0.7)),
    ):
        torch.testing.assert_close(change, expected * policy, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(("name", "clipped"), [("gmpo", 1 / 2), ("gspo", 1.0)])
def test_clip_fractions_are_of_what_the_loss_clips(name: str, clipped: float) -> None:
    rollout = rollout_of(torch.ones(1, 2, dtype=torch.bool), torch.zeros(1).bool(), 1)
    old = torch.full(rollout.response_mask.shape, -2.0) * rollout.response_mask
    experience = as_experience(rollout, scores=torch.zeros(1), old_logprobs=old)
    experience = replace(experience, advantages=torch.ones_like(old))
    # of two tokens one has moved: by more than any range, as has their mean of 0.75
    moved = torch.tensor([[0.0, 1.5, 0.0]])
    metrics = MetricSums()
    measure_update(old + moved, None, experience, metrics, loss=POLICY_LOSSES[name])
    found = metrics.reduce(one_process(), torch.device("cpu"))
    assert found["policy/clip_fraction"] == found["policy/clip_fraction_high"] == clipped
    assert found["policy/ratio_max"] == pytest.approx(math.exp(1.5 if name == "gmpo" else 0.75))


def test_means_per_token_are_summed_where_the_policy_term_is() -> None:
    tokens, rows = torch.tensor([600.0, 4.0])
    for name, loss in POLICY_LOSSES.items():
        expected = 150.0 if name in ("sequence_clip", "remax", "luspo") else 1.0
        assert float(summed_tokens(loss, tokens=tokens, rows=rows)) == expected, name


# ---- rows that are left out


def test_an_excluded_truncated_response_changes_nothing_for_its_siblings() -> None:
    # scores 1, 0, 5 of which the third is truncated: without it, 1 - 0 and 0 - 1
    computed = judged([1.0, 0.0, 5.0], Advantage(truncated="exclude"), 2)
    assert computed.advantages[:, 1].tolist() == [1.0, -1.0, 0.0]
    assert computed.counted.tolist() == [True, True, False]
    assert not computed.loss_mask[2].any()
    kept = judged([1.0, 0.0, 5.0], Advantage(truncated="trl"), 2)
    # siblings' means with it: 1 - (0 + 5) / 2, 0 - (1 + 5) / 2, 5 - (1 + 0) / 2
    assert kept.advantages[:, 1].tolist() == [-1.5, -3.0, 4.5]
    assert kept.counted.all()
    assert not kept.loss_mask[2].any()


def test_unscorable_responses_get_no_advantage_even_when_whitened() -> None:
    computed = judged([1.0, NAN, 0.0, 2.0], Advantage(normalize=True))
    # leave one out of 1, 0, 2: 0, -1.5, 1.5; their deviation is 1.5
    expected = torch.tensor([0.0, 0.0, -1.5 / 1.5001, 1.5 / 1.5001])
    torch.testing.assert_close(computed.advantages[:, 1], expected)
    assert computed.counted.tolist() == [True, False, True, True]
    assert torch.equal(computed.loss_mask, computed.response_mask & computed.counted[:, None])


def test_a_critic_learns_from_no_response_that_nothing_has_scored() -> None:
    # as TRL has it, the second one counts in the policy's means all the same
    computed = judged([1.0, NAN, 0.0, 2.0], Advantage(unscorable="trl", truncated="exclude"), 3)
    assert computed.counted.tolist() == [True, True, True, False]
    assert computed.value_mask[:, 1:].tolist() == [[row in (0, 2)] * 2 for row in range(4)]
    assert float(Denominators(*denominators(computed)).valued) == 4


@pytest.mark.parametrize(("value", "eps"), [(0.7, 1e-8), (0.9, 1e-4), (5.3, 1e-8), (1.0, 1e-4)])
def test_whitening_equal_values_gives_zeros(value: float, eps: float) -> None:
    # 37 · 0.7 is rounded: a plain mean would leave 6e-8, and the deviation is as small
    values = torch.full((37,), value)
    mask = torch.ones(37, dtype=torch.bool)
    assert one_process().whiten(values, mask, eps=eps).tolist() == [0.0] * 37
    assert torch.equal(one_process().whiten(values, ~mask, eps=eps), values)
