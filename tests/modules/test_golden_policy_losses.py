"""Losses, masks and advantages as TRL's and verl's own functions gave them for the same tensors."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lrlhf.functional import (
    ALGORITHMS,
    EstimatorInputs,
    PolicyLoss,
    rejection_mask,
    token_covariance,
)
from lrlhf.modules.policy.experience import as_experience, mark_covariant
from lrlhf.modules.policy.objective import Denominators, denominators, loss_terms
from lrlhf.types import Experience, Rollout

GOLDEN = Path(__file__).parents[1] / "functional" / "golden" / "policy_losses.json"
RECORD = json.loads(GOLDEN.read_text())
CASES = pytest.mark.parametrize("case", RECORD["cases"], ids=range(len(RECORD["cases"])))
FIRST = {name: torch.tensor(rows) for name, rows in RECORD["cases"][0]["inputs"].items()}


def loss_named(name: str, **options: Any) -> PolicyLoss:
    loss = ALGORITHMS[name].loss
    return loss._replace(options={**loss.options, **options})


def experience_of(inputs: dict[str, Tensor], loss: PolicyLoss) -> Experience:
    mask = inputs["mask"].bool()
    rows = len(mask)
    rollout = Rollout(
        input_ids=torch.ones_like(mask, dtype=torch.long),
        attention_mask=mask,
        response_mask=mask,
        sampling_logprobs=inputs["sampling_logprobs"],
        group_ids=torch.arange(rows) // 3,
        truncated=torch.zeros(rows, dtype=torch.bool),
    )
    experience = as_experience(
        rollout,
        scores=torch.zeros(rows),
        old_logprobs=inputs["old_logprobs"],
        ref_logprobs=inputs["ref_logprobs"],
    )
    experience = replace(experience, advantages=inputs["advantages"][:, None] * mask)
    if loss.choose is None:
        return experience
    chosen = torch.zeros_like(mask)
    covariance = token_covariance(inputs["logprobs"][mask], experience.advantages[mask])
    chosen[mask] = loss.choose_tokens(covariance, seed=0)
    return replace(experience, covariant=chosen)


def evaluate(
    inputs: dict[str, Tensor], loss: PolicyLoss, rows: list[int] | None = None, **options: Any
) -> tuple[float, Tensor]:
    """Loss and its gradient, of all rows or of a micro-batch of the same optimizer step."""
    experience = experience_of(inputs, loss)
    totals = Denominators(*denominators(experience))
    logprobs = inputs["logprobs"].clone().requires_grad_()
    index = torch.arange(len(logprobs)) if rows is None else torch.tensor(rows)
    settings = {"kl_coef": 0.0, "kl_estimator": "k3", "entropy_coef": 0.0, "max_new_tokens": 9}
    terms = loss_terms(
        logprobs[index],
        experience.select(index),
        loss=loss,
        totals=totals,
        **(settings | options),
    )
    (gradient,) = torch.autograd.grad(terms.loss, logprobs)
    return float(terms.loss.detach()), gradient


SETTINGS: dict[str, tuple[PolicyLoss, dict[str, Any]]] = {
    "sapo": (loss_named("sapo"), {}),
    "sapo_verl": (loss_named("sapo"), {}),
    "luspo": (loss_named("luspo", clip_low=0.2, clip_high=0.2), {}),
    "vespo": (loss_named("vespo"), {}),
    "bnpo": (loss_named("bnpo"), {}),
    "unbiased_kl": (loss_named("grpo"), {"kl_coef": 0.3, "kl_estimator": "unbiased"}),
    "off_policy_mask": (loss_named("grpo"), {"off_policy_threshold": 0.02}),
    "dppo_tv": (loss_named("dppo", low=0.2, high=0.2), {}),
    "dppo_kl": (loss_named("dppo", divergence="kl", low=0.2, high=0.2), {}),
    "clip_cov": (loss_named("clip_cov", fraction=1.0, cov_low=0.2), {}),
    "kl_cov": (loss_named("kl_cov", fraction=0.2), {}),
}
NAMED = pytest.mark.parametrize("name", SETTINGS)


@CASES
@NAMED
def test_losses_equal_those_of_trl_and_verl(case: dict[str, Any], name: str) -> None:
    inputs = {key: torch.tensor(rows) for key, rows in case["inputs"].items()}
    loss, options = SETTINGS[name]
    value, gradient = evaluate(inputs, loss, **options)
    expected = case["losses"][name]
    # verl's mean over responses leaves out the one without tokens, TRL's and ours count it
    share = 5 / 6 if name == "sapo_verl" else 1.0
    torch.testing.assert_close(
        gradient, share * torch.tensor(expected["gradient"]), rtol=1e-5, atol=1e-6
    )
    # verl keeps the value, not the gradient, of a token that both the clip and the choice hold back
    if name != "clip_cov":
        assert value == pytest.approx(share * expected["loss"], rel=1e-5, abs=1e-6)


@NAMED
def test_no_split_into_micro_batches_changes_them(name: str) -> None:
    loss, options = SETTINGS[name]
    value, gradient = evaluate(FIRST, loss, **options)
    parts = [evaluate(FIRST, loss, rows, **options) for rows in ([0, 3], [1], [2, 4, 5])]
    assert sum(part for part, _ in parts) == pytest.approx(value, abs=1e-6)
    torch.testing.assert_close(sum(slope for _, slope in parts), gradient)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_tokens_are_chosen_among_those_of_all_ranks(name: str) -> None:
    loss = loss_named(name, fraction=0.3)
    if name == "clip_cov":
        loss = loss_named(name, fraction=0.2, cov_low=-0.5)
    experience = replace(experience_of(FIRST, loss), covariant=None)

    def marked(rows: Experience, rank: int, sent: list[Tensor]) -> Tensor:
        def gather(own: Tensor) -> list[Tensor]:
            sent.append(own)
            return sent

        step: Any = SimpleNamespace(
            ranks=SimpleNamespace(gather=gather, rank=rank),
            step=3,
            module=SimpleNamespace(seed=1),
        )
        chosen = mark_covariant(rows, loss, step).covariant
        assert chosen is not None
        return chosen

    whole = marked(experience, 0, [])
    assert 0 < whole.sum() < experience.loss_mask.sum()
    first, second = (experience.select(torch.tensor(rows)) for rows in ([0, 1], [2, 3, 4, 5]))
    sent: list[Tensor] = []
    marked(first, 0, sent)
    assert torch.equal(marked(second, 1, sent), whole[2:])


@CASES
@pytest.mark.parametrize("criterion", RECORD["criteria"])
def test_the_same_tokens_are_rejected_as_in_verl(case: dict[str, Any], criterion: str) -> None:
    old, sampling, mask = (
        torch.tensor(case["inputs"][name]) for name in ("old_logprobs", "sampling_logprobs", "mask")
    )
    low, _, high = RECORD["criteria"][criterion].rpartition("_")
    accepted = rejection_mask(
        old, sampling, mask.bool(), criterion=criterion, low=float(low or 0), high=float(high)
    )
    assert torch.equal(accepted & mask.bool(), torch.tensor(case["accepted"][criterion]).bool())
    assert accepted[~mask.bool()].all()


@pytest.mark.parametrize("name", RECORD["estimators"])
def test_advantages_equal_those_of_verl(name: str) -> None:
    for record in RECORD["estimators"][name]:
        mask = torch.tensor(record["mask"]).bool()
        inputs = EstimatorInputs(
            scores=torch.tensor(record["scores"]),
            kl=torch.zeros(mask.shape),
            response_mask=mask,
            num_generations=3,
            kl_coef=0.0,
            baseline_mask=torch.ones(len(mask), dtype=torch.bool),
        )
        found = ALGORITHMS[name].estimator(inputs)
        torch.testing.assert_close(found, torch.tensor(record["advantages"]), rtol=1e-5, atol=1e-6)
