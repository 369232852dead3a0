"""Truncated sampling: what was left is recorded, and probabilities are renormalised over it.

Expected sets and probabilities come from NumPy and from one plain forward pass per row.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lrlhf.apps.verify import VerifyRollouts
from lrlhf.callbacks import RolloutLog
from lrlhf.datamodules import PromptDataModule, ReplayDataModule
from lrlhf.environments import Episodes
from lrlhf.guard.dump import StepBundle, read_bundle, write_bundle
from lrlhf.models import CausalLM
from lrlhf.modules import PPO, RLOO, DynamicSampling, Reference, Teacher, Update
from lrlhf.rewards import Rewards
from lrlhf.rollout import (
    Capabilities,
    EngineWrapper,
    Sampling,
    TransformersEngine,
    VLLMEngine,
    VLLMServerEngine,
)
from lrlhf.types import Experience, Rollout
from tests.conftest import build_language_model
from tests.matrices import few_of
from tests.modules.policy_runs import Run, assert_same, sgd
from tests.modules.test_episode_runs import Letters

SAMPLINGS = {
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 7},
    "one": {"top_k": 1},
    "min_p": {"min_p": 0.5},
    "min_new_tokens": {"min_new_tokens": 3},
    "cold": {"top_p": 0.7, "temperature": 0.6},
    "hot": {"top_p": 0.9, "temperature": 1.7},
    "all": {"top_k": 60, "top_p": 0.9, "min_p": 0.3, "min_new_tokens": 2, "temperature": 0.8},
}
TOP_P = Sampling(max_new_tokens=6, top_p=0.7, temperature=0.8)


def sets_of(experience: Rollout) -> dict[tuple[int, int], list[int]]:
    """The recorded ids by row and column; empty: all of them."""
    mask = experience.sampling_mask
    assert mask is not None
    assert int(mask.sizes[~experience.response_mask].sum()) == 0
    assert int(mask.sizes.sum()) == len(mask.ids)
    ids, found, start = mask.ids.tolist(), {}, 0
    for row, column in np.ndindex(*mask.sizes.shape):
        size = int(mask.sizes[row, column])
        if experience.response_mask[row, column]:
            found[row, column] = ids[start : start + size]
        start += size
    return found


def left(logits: np.ndarray, sampling: Sampling, *, position: int, eos: int) -> set[int]:
    """What top_k, then top_p, then min_p leave of the probabilities at a temperature."""
    scaled = logits / sampling.temperature
    if position < sampling.min_new_tokens:
        scaled[eos] = -np.inf
    order = np.argsort(-scaled, kind="stable")
    order = order[np.isfinite(scaled[order])]
    if sampling.top_k:
        order = order[: sampling.top_k]
    probabilities = np.exp(scaled[order] - scaled[order].max())
    probabilities /= probabilities.sum()
    if sampling.top_p < 1:
        count = int((np.cumsum(probabilities) < sampling.top_p).sum()) + 1
        order, probabilities = order[:count], probabilities[:count]
        probabilities /= probabilities.sum()
    return {int(id_) for id_ in order[probabilities >= sampling.min_p * probabilities[0]]}


def rows_of(model: PreTrainedModel, experience: Rollout) -> list[Tensor]:
    """Logits that predict each token of each row, without its padding."""
    return [
        model(experience.input_ids[row : row + 1, :length], use_cache=False).logits[0]
        for row, length in enumerate(experience.lengths.tolist())
    ]


def restricted(
    model: PreTrainedModel, experience: Rollout, temperature: float
) -> dict[tuple[int, int], Tensor]:
    """Log-probabilities of the recorded ids, in their order, at each response token."""
    logits = rows_of(model, experience)
    return {
        (row, column): (logits[row][column - 1, ids or slice(None)] / temperature).log_softmax(0)
        for (row, column), ids in sets_of(experience).items()
    }


def chosen(spread: Tensor, ids: list[int], token: int) -> Tensor:
    return spread[ids.index(token) if ids else token]


def logprobs_of(model: PreTrainedModel, experience: Rollout, temperature: float) -> Tensor:
    """`[B, T]`, of the sampled tokens."""
    result = torch.zeros(experience.input_ids.shape)
    sets = sets_of(experience)
    for (row, column), spread in restricted(model, experience, temperature).items():
        token = int(experience.input_ids[row, column])
        result[row, column] = chosen(spread, sets[row, column], token)
    return result


def before(run: Run, tokenizer: Any) -> PreTrainedModel:
    """The policy as it began."""
    model = build_language_model(tokenizer).eval()
    model.load_state_dict(
        {name.removeprefix("policy."): value for name, value in run.before.items()}, strict=False
    )
    return model


@pytest.mark.parametrize("options", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("several", few_of([False, True], [True]))
def test_the_ratio_is_1_before_the_first_step(
    build, train, tokenizer, options: dict[str, Any], several: bool
) -> None:
    sampling = Sampling(max_new_tokens=6, **options)
    update = Update(num_minibatches=2) if several else Update()
    run = train(build(sampling=sampling, update=update, reference=Reference(kl_coef=0.0)))
    assert run.logged["mismatch/max"] <= 1e-5
    # and the engine's log-probabilities are those of a plain pass over what was left
    with torch.no_grad():
        expected = logprobs_of(before(run, tokenizer), run.experience, sampling.temperature)
    gap = (expected - run.experience.sampling_logprobs).abs()
    assert float(gap.max()) <= 1e-5


@pytest.mark.parametrize("options", SAMPLINGS.values(), ids=SAMPLINGS)
def test_the_recorded_sets_are_those_that_the_options_leave(
    build, train, tokenizer, options: dict[str, Any]
) -> None:
    sampling = Sampling(max_new_tokens=6, **options)
    run = train(build(sampling=sampling))
    with torch.no_grad():
        logits = [each.double().numpy() for each in rows_of(before(run, tokenizer), run.experience)]
    begin = run.experience.response_mask.int().argmax(dim=1).tolist()
    vocabulary, seen = len(logits[0][0]), set()
    for (row, column), ids in sets_of(run.experience).items():
        expected = left(
            logits[row][column - 1].copy(),
            sampling,
            position=column - begin[row],
            eos=tokenizer.eos_token_id,
        )
        assert set(ids or range(vocabulary)) == expected
        assert len(ids) == len(set(ids))
        seen.add(len(ids))
    assert seen != {0}


def test_the_mass_that_was_left_is_still_reported(build, train, tokenizer) -> None:
    run = train(build(sampling=TOP_P))
    with torch.no_grad():
        logits = rows_of(before(run, tokenizer), run.experience)
    masses = [
        float((logits[row][column - 1] / 0.8).softmax(0)[ids].sum())
        for (row, column), ids in sets_of(run.experience).items()
    ]
    assert run.logged["rollout/kept_mass"] == pytest.approx(np.mean(masses), rel=1e-5)
    assert 0.7 <= min(masses) < max(masses) < 1


def test_policy_old_policy_and_reference_are_renormalised_over_the_same_ids(
    build, train, tokenizer, other_model: CausalLM
) -> None:
    reference = Reference(model=other_model, kl_coef=0.1, placement="reward")
    run = train(build(sampling=TOP_P, reference=reference, update=Update(num_minibatches=2)))
    experience = run.experience
    with torch.no_grad():
        own = logprobs_of(before(run, tokenizer), experience, 0.8)
        other = logprobs_of(other_model.load().eval(), experience, 0.8)
    torch.testing.assert_close(experience.old_logprobs, own, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(experience.ref_logprobs, other, rtol=1e-4, atol=1e-5)
    kl = (own - other)[experience.response_mask].sum() / len(experience)
    assert run.logged["kl/sequence"] == pytest.approx(float(kl), rel=1e-3)


def test_a_reference_that_is_the_policy_has_no_distance_at_first(build, train) -> None:
    run = train(build(sampling=TOP_P, reference=Reference(kl_coef=0.1)))
    assert run.logged["kl/sequence"] == pytest.approx(0, abs=1e-4)


def test_a_step_follows_the_gradient_over_what_was_left(build, train, tokenizer) -> None:
    """The loss -Σ A log π_S / N - 0.1 Σ H_S / N, with π_S of one plain pass per row."""
    update = Update(max_grad_norm=1e9, entropy_coef=0.1)
    run = train(
        build(
            algorithm="dapo",
            sampling=TOP_P,
            optimizer=sgd(0.1),
            update=update,
            reference=Reference(kl_coef=0.0),
        )
    )
    experience, model = run.experience, before(run, tokenizer)
    sets, loss = sets_of(experience), torch.zeros(())
    for (row, column), spread in restricted(model, experience, 0.8).items():
        token = int(experience.input_ids[row, column])
        advantage = experience.advantages[row, column]
        loss = loss - advantage * chosen(spread, sets[row, column], token)
        loss = loss + 0.1 * (spread.exp() * spread).sum()
    (loss / experience.loss_mask.sum()).backward()
    stepped = {
        f"policy.{name}": (weight - 0.1 * weight.grad).detach()
        for name, weight in model.named_parameters()
    }
    after = {name: run.after[name] for name in stepped}
    assert_same(stepped, after, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [RLOO, PPO])
def test_neither_packing_nor_micro_batches_matter(
    build, train, model_folder, kind: type[RLOO | PPO]
) -> None:
    runs = []
    for attention, budget in (("sdpa", None), ("sdpa", 40), ("eager", None), ("eager", 40)):
        policy = CausalLM(source=model_folder, attn_implementation=attention)
        update = Update(micro_batch_tokens=budget, minibatch_size=8, entropy_coef=0.05)
        sampling = replace(TOP_P, max_new_tokens=8, min_new_tokens=1)
        runs.append(
            train(
                build(policy, kind=kind, sampling=sampling, update=update, optimizer=sgd(1e-2)),
                steps=2,
            )
        )
    first, *others = runs
    assert first.logged["perf/shared_fraction"] > 0
    for other in others:
        assert_same(first.after, other.after, rtol=1e-4, atol=2e-6)
        assert other.logged["mismatch/max"] <= 1e-5


@pytest.mark.parametrize("history", ["tokens", "template"])
def test_turns_and_forks_have_their_own_sets(
    language_model, tokenizer, train, history: str
) -> None:
    rows = [{"prompt": f"write {n} ", "letter": letter} for n, letter in enumerate("aZm5")]
    if history == "template":
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = tokenizer.chat_template.replace(
            "message['content']",
            "(message['content'] if message['role'] == 'user' else "
            "message['content'] | replace('e', '') | upper)",
        )
        rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    module = RLOO(
        language_model,
        Rewards(["environment_reward"]),
        tokenizer=tokenizer,
        num_generations=2,
        sampling=Sampling(max_new_tokens=150, top_p=0.8, temperature=0.9),
        episodes=Episodes(environment=Letters, max_turn_tokens=5, history=history),
        reference=Reference(kl_coef=0.0),
        update=Update(micro_batch_tokens=100),
        optimizer=sgd(0.05),
    )
    run = train(module, data=PromptDataModule(rows, batch_size=4))
    experience = run.experience
    assert (experience.forks is not None) == (history == "template")
    assert run.logged["mismatch/max"] <= 1e-5
    sets = sets_of(experience)
    assert len(sets) == int(experience.response_mask.sum())
    assert all(int(experience.input_ids[place]) in ids for place, ids in sets.items() if ids)


def test_responses_of_other_lengths_are_merged_with_their_sets(build, train) -> None:
    run = train(
        build(
            sampling=replace(TOP_P, max_new_tokens=12),
            dynamic_sampling=DynamicSampling(prompts=3),
            reward=lambda completions: [float(text[:1].isalpha()) for text in completions],
        )
    )
    assert run.logged["rollout/rounds"] > 1
    counted = run.experience.select(run.experience.counted.nonzero()[:, 0])
    assert all(int(counted.input_ids[place]) in ids for place, ids in sets_of(counted).items())
    assert run.logged["mismatch/max"] <= 1e-5


def test_a_stored_rollout_is_replayed_with_its_sets(build, train, tmp_path: Path) -> None:
    log = RolloutLog(dirpath=tmp_path / "log", save_tensors=True, print_every=None)
    options: dict[str, Any] = {"sampling": TOP_P, "optimizer": sgd(0.1)}
    run = train(build(**options), callbacks=[log])
    data = ReplayDataModule(folder=tmp_path / "log" / "rollouts", shuffle=False)
    again = train(build(**options), data=data)
    assert sets_of(again.experience) == sets_of(run.experience)
    assert_same(run.after, again.after, rtol=1e-4, atol=1e-6)
    # the option of the run does not change how they were sampled
    plain = train(build(**(options | {"sampling": replace(TOP_P, top_p=1.0)})), data=data)
    assert_same(again.after, plain.after)


def test_a_stored_rollout_without_sets_is_refused(build, train, tmp_path: Path) -> None:
    log = RolloutLog(dirpath=tmp_path / "log", save_tensors=True, print_every=None)
    biased = train(build(sampling=TOP_P, allow_truncated_sampling=True), callbacks=[log])
    assert biased.experience.sampling_mask is None
    data = ReplayDataModule(folder=tmp_path / "log" / "rollouts", shuffle=False)
    with pytest.raises(ValueError, match="does not hold which ids these left"):
        train(build(sampling=TOP_P), data=data)


def test_evaluations_and_extra_samples_record_nothing(build, train) -> None:
    seen: list[bool] = []

    class Watches(EngineWrapper):
        def generate(self, prompts: Any, sampling: Sampling, **options: Any) -> Rollout:
            seen.append(sampling.keep_mask)
            return super().generate(prompts, sampling, **options)

    module = build(
        engine=Watches(TransformersEngine()),
        sampling=TOP_P,
        eval_sampling=TOP_P,
        algorithm="remax",
        num_generations=1,
    )
    train(module, limit_val_batches=1, num_sanity_val_steps=0, val_check_interval=1)
    assert seen == [True, False, False]
    seen.clear()
    module.generate("a", n=2)
    assert seen == [False]


class Forgets(EngineWrapper):
    """Returns responses of its own, which have no masks."""

    def generate(self, *args: Any, **options: Any) -> Rollout:
        return replace(super().generate(*args, **options), sampling_mask=None)


class NoMask(TransformersEngine):
    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, max_sampling_mask=0)


def test_a_wrapper_that_loses_the_sets_is_refused(build, train) -> None:
    with pytest.raises(ValueError, match=r"Forgets returned responses without the ids"):
        train(build(engine=Forgets(TransformersEngine()), sampling=TOP_P))


class Shifts(EngineWrapper):
    """Returns sets of other ids."""

    def generate(self, *args: Any, **options: Any) -> Rollout:
        rollout = super().generate(*args, **options)
        mask = rollout.sampling_mask
        return replace(rollout, sampling_mask=replace(mask, ids=(mask.ids + 1) % 100))


def test_a_token_that_is_not_in_its_set_is_refused(build, train) -> None:
    """Its probability would be 0, and the loss infinite."""
    with pytest.raises(ValueError, match=r"Shifts returned token \d+ \(row 0, column \d+\), which"):
        train(build(engine=Shifts(TransformersEngine()), sampling=replace(TOP_P, top_k=1)))


K = Sampling(top_k=1000)


@pytest.mark.parametrize(
    ("engine", "sampling", "culprit"),
    [
        (NoMask, TOP_P, r"NoMask returns which were left in no case"),
        (VLLMEngine, TOP_P, r"VLLMEngine returns .* only with sampling.top_k from 1 to 992"),
        (VLLMServerEngine, K, r"VLLMServerEngine returns .* only with sampling.top_k from 1"),
        (lambda: VLLMEngine(options={"max_logprobs": 20}), replace(K, top_k=5), "in no case"),
    ],
)
def test_engines_that_cannot_return_the_sets_are_refused(
    build, engine: Callable[[], Any], sampling: Sampling, culprit: str
) -> None:
    with pytest.raises(ValueError, match=culprit):
        build(engine=engine(), sampling=sampling)
    build(engine=engine(), sampling=Sampling(), eval_sampling=sampling)


@pytest.mark.parametrize(
    ("options", "limit"), [({}, 992), ({"max_logprobs": 60}, 28), ({"max_logprobs": -1}, 10**6)]
)
def test_vllm_takes_a_top_k_whose_ties_it_returns_too(
    build, options: dict[str, Any], limit: int
) -> None:
    build(engine=VLLMEngine(options=options), sampling=Sampling(top_k=limit, top_p=0.9))


def test_a_teacher_is_refused(build, other_model: CausalLM) -> None:
    options: dict[str, Any] = {"teacher": Teacher(model=other_model), "algorithm": "dapo"}
    with pytest.raises(ValueError, match="do not compare with the teacher's"):
        build(sampling=TOP_P, **options)
    build(sampling=TOP_P, allow_truncated_sampling=True, **options)


def test_a_teacher_of_stored_sets_is_refused(
    build, train, tmp_path: Path, other_model: CausalLM
) -> None:
    log = RolloutLog(dirpath=tmp_path / "log", save_tensors=True, print_every=None)
    train(build(sampling=TOP_P), callbacks=[log])
    data = ReplayDataModule(folder=tmp_path / "log" / "rollouts", shuffle=False)
    options: dict[str, Any] = {"teacher": Teacher(model=other_model), "algorithm": "dapo"}
    with pytest.raises(ValueError, match="the teacher's over all: sample"):
        train(build(sampling=replace(TOP_P, top_p=1.0), **options), data=data)


def test_a_dump_holds_the_sets(build, train, tmp_path: Path) -> None:
    run = train(build(sampling=TOP_P))
    bundle = StepBundle(
        stage="policy", batches={"part": run.experience}, seeds=[(1, 2)], context={}
    )
    write_bundle(tmp_path, 0, bundle)
    part = read_bundle(tmp_path, 0).batches["part"]
    assert isinstance(part, Experience)
    assert sets_of(part) == sets_of(run.experience)


def test_verify_takes_the_same_set_on_both_sides_for_no_factor_in_the_ratio(build, train) -> None:
    update = Update(num_minibatches=2)
    options: dict[str, Any] = {"sampling": Sampling(max_new_tokens=6, top_k=20), "update": update}
    run = train(build(**options), callbacks=[VerifyRollouts(every=1, stop=True)])
    assert run.logged["verify/faults"] == 0
