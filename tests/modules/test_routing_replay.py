"""Routing replay in runs: experts that sampled a token are recorded, kept and trained through."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.callbacks import RolloutLog
from lrlhf.datamodules import PromptDataModule, ReplayDataModule
from lrlhf.environments import Episodes
from lrlhf.guard.dump import StepBundle, read_bundle, write_bundle
from lrlhf.models import sequence_logprobs
from lrlhf.modules import PPO, RLOO, DynamicSampling, Reference, Update
from lrlhf.rewards import Rewards
from lrlhf.rollout import (
    EngineWrapper,
    Sampling,
    TransformersEngine,
    VLLMEngine,
    assemble_rollout,
    continued_prompts,
    responses_of,
)
from lrlhf.rollout.responses import token_prompts
from lrlhf.types import Rollout
from tests.models.test_routing_replay import looped_logprobs, routers_of, watched, with_own_choice
from tests.models.text_families import tiny_config
from tests.modules.policy_runs import Run, assert_same, sgd
from tests.modules.test_episode_runs import Letters

REPLAY = Update(replay_routing=True)
TWICE = Update(replay_routing=True, num_minibatches=2)
NO_KL = Reference(kl_coef=0.0)


def experts(tokenizer: PreTrainedTokenizerBase, family: str = "mixtral") -> PreTrainedModel:
    """Of the vocabulary of the tests, without windows."""
    config = tiny_config(family)
    config.vocab_size, config.max_position_embeddings = len(tokenizer), 256
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    config.sliding_window = None
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def policy(tokenizer: PreTrainedTokenizerBase) -> Callable[..., PreTrainedModel]:
    return lambda family="mixtral": experts(tokenizer, family)


def before(run: Run, model: PreTrainedModel) -> PreTrainedModel:
    """The policy as it began, which no replay was allowed."""
    own = {name.removeprefix("policy."): value for name, value in run.before.items()}
    model.load_state_dict({name: own[name] for name in model.state_dict()})
    return model


def recorded(rollout: Rollout) -> Tensor:
    assert rollout.routed_experts is not None
    return rollout.routed_experts


def assert_recorded(model: PreTrainedModel, rollout: Rollout) -> None:
    """Compare with what a pass over each whole row chooses in front of its last sampled token."""
    expected = recorded(with_own_choice(model, rollout)).clone()
    for row, mask in enumerate(rollout.response_mask):
        expected[row, int(mask.nonzero().max()) :] = -1
    assert torch.equal(recorded(rollout).sort().values, expected.sort().values)
    assert recorded(rollout).dtype == torch.int16


# the last has layers with a state, which a pass before the first clears
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "qwen3_5_moe_text"])
@pytest.mark.parametrize("size", [None, 4])
def test_the_engine_records_what_a_forward_pass_chooses(
    build, train, policy, family: str, size: int | None
) -> None:
    engine = TransformersEngine(max_batch_size=size)
    run = train(build(policy(family), engine=engine, update=REPLAY, reference=NO_KL))
    assert_recorded(before(run, policy(family)), run.experience)
    assert run.logged["mismatch/max"] <= 1e-5


@pytest.mark.parametrize("checkpointing", [False, True])
def test_experts_stay_as_the_weights_move(build, train, policy, checkpointing: bool) -> None:
    """In both passes over a rollout, of which the first moves the routers far."""
    model = policy()
    model.set_attn_implementation("eager")  # pads the rows, the longest first
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    chosen: list[Tensor] = []

    def see(_: int, __: Any, out: Any) -> None:
        if model.training and torch.is_grad_enabled():
            chosen.append(out[2])

    update = Update(replay_routing=True, num_iterations=2, max_grad_norm=1e9, loss="reinforce")
    with watched(routers_of(model), see):
        run = train(build(model, update=update, reference=NO_KL, optimizer=sgd(0.5)))
    experience = run.experience
    order = experience.lengths.argsort(descending=True, stable=True)
    expected = recorded(experience)[order]
    assert len(chosen) == (8 if checkpointing else 4)  # two layers, two passes
    known = expected[..., 0, 0] >= 0
    for at, seen in enumerate(chosen):
        layer = at % 2 if not checkpointing or at % 4 < 2 else 1 - at % 2
        assert torch.equal(seen.view(*known.shape, 2)[known].short(), expected[known][:, layer])
    assert (recorded(with_own_choice(model, experience))[order][known] != expected[known]).any()


def test_a_moved_policy_replays_and_its_reference_chooses_freely(
    build, train, policy, tmp_path: Path
) -> None:
    log = RolloutLog(dirpath=tmp_path / "log", save_tensors=True, print_every=None)
    sampled = train(build(policy(), update=REPLAY), callbacks=[log])
    data = ReplayDataModule(folder=tmp_path / "log" / "rollouts", shuffle=False)
    moved = policy("mixtral")
    with torch.no_grad():
        for router in routers_of(moved):
            router.weight.neg_()
    again = train(build(moved, update=REPLAY), data=data)
    experience = again.experience
    assert torch.equal(recorded(experience), recorded(sampled.experience))
    start = before(again, policy())
    with torch.no_grad():
        own, free = looped_logprobs(start, experience).float(), sequence_logprobs(start, experience)
    assert (own - free).abs().max() > 0.1
    assert_close(experience.policy_logprobs, own, rtol=1e-4, atol=1e-5)
    assert_close(experience.ref_logprobs, free, rtol=1e-4, atol=1e-5)
    # a head reads that backbone, also as long as the policy is frozen
    frozen = Update(replay_routing=True, freeze_steps=1, num_iterations=1, num_minibatches=1)
    module = build(moved, kind=PPO, update=frozen, optimizer=sgd(1e-9))
    for weight in module.values.head.parameters():
        torch.nn.init.normal_(weight)
    frozen_run = train(module, data=data)
    old = frozen_run.experience.values[frozen_run.experience.value_mask]
    assert frozen_run.logged["value/mean"] == pytest.approx(float(old.mean()), rel=1e-4)
    # without the option nothing of it is left
    plain = train(build(moved, reference=NO_KL), data=data)
    assert plain.experience.routed_experts is None


def test_a_stored_rollout_without_experts_is_refused(build, train, policy, tmp_path: Path) -> None:
    log = RolloutLog(dirpath=tmp_path / "log", save_tensors=True, print_every=None)
    assert train(build(policy()), callbacks=[log]).experience.routed_experts is None
    data = ReplayDataModule(folder=tmp_path / "log" / "rollouts", shuffle=False)
    with pytest.raises(ValueError, match="the responses came without their experts"):
        train(build(policy(), update=REPLAY), data=data)


@pytest.mark.parametrize("kind", [RLOO, PPO])
def test_neither_packing_nor_micro_batches_matter(
    build, train, policy, kind: type[RLOO | PPO]
) -> None:
    runs = []
    for attention, budget in (("sdpa", None), ("sdpa", 40), ("eager", None), ("eager", 40)):
        model = policy()
        model.set_attn_implementation(attention)
        update = Update(replay_routing=True, micro_batch_tokens=budget, minibatch_size=8)
        runs.append(train(build(model, kind=kind, update=update, optimizer=sgd(1e-2)), steps=2))
    first, *others = runs
    assert first.logged["perf/shared_fraction"] > 0
    for other in others:
        assert_same(first.after, other.after, rtol=1e-4, atol=2e-6)


def test_adapters_learn_through_the_recorded_experts(build, train, policy) -> None:
    base = policy()
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    run = train(build(model, update=TWICE, optimizer=sgd(0.5)))
    assert_recorded(policy(), run.experience)
    assert run.logged["kl/sequence"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("exact", [True, False])
def test_turns_record_what_they_read_too(
    policy, tokenizer, train, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    """Whether a turn continues the cache of the last one, or computes all of it again."""
    if not exact:
        monkeypatch.setattr(TransformersEngine, "_continued_gap", lambda _: 1.0)
    rows = [{"prompt": f"write {n} ", "letter": letter} for n, letter in enumerate("aZm5")]
    module = RLOO(
        policy(),
        Rewards(["environment_reward"]),
        tokenizer=tokenizer,
        num_generations=2,
        sampling=Sampling(max_new_tokens=40),
        episodes=Episodes(environment=Letters, max_turn_tokens=5),
        reference=NO_KL,
        update=REPLAY,
        optimizer=sgd(0.05),
    )
    run = train(module, data=PromptDataModule(rows, batch_size=4))
    assert int(run.experience.response_mask.int().diff(dim=1).eq(1).sum(dim=1).max()) == 3  # turns
    assert_recorded(before(run, policy()), run.experience)
    assert run.logged["mismatch/max"] <= 1e-5


def test_a_second_try_follows_the_first(policy, tokenizer) -> None:
    engine, model = TransformersEngine(), policy()
    engine.attach(model, tokenizer)
    prompts = token_prompts([[5, 6, 7], [8, 9]])
    sampling = Sampling(max_new_tokens=4, keep_experts=True)
    first = engine.generate(prompts, sampling, num_generations=2, seeds=range(4))
    given = torch.tensor([11, 12])
    cut = [
        each.cut(4 - row).with_tokens(given)
        for row, each in enumerate(responses_of(first, prompts))
    ]
    turn = continued_prompts(prompts, cut)
    second = engine.generate(turn, sampling, num_generations=1, seeds=range(4, 8))
    tries = [one.followed_by(two) for one, two in zip(cut, responses_of(second, turn), strict=True)]
    rollout = assemble_rollout(prompts, tries, num_generations=2, pad_id=0)
    assert_recorded(policy(), rollout)
    # in front of the first sample's end its own experts stay, behind it come those of the second
    other = [
        replace(one, experts=(one.experts + 1) % 4).followed_by(two)
        for one, two in zip(cut, responses_of(second, turn), strict=True)
    ]
    changed = assemble_rollout(prompts, other, num_generations=2, pad_id=0)
    for row, one in enumerate(cut):
        same = (recorded(changed)[row] == recorded(rollout)[row]).flatten(1).all(dim=1)
        assert same.tolist() == [column >= len(one.experts) for column in range(len(same))]
    lost = [replace(tries[0], experts=None), *tries[1:]]
    with pytest.raises(ValueError, match="set for all responses or for none"):
        assemble_rollout(prompts, lost, num_generations=2, pad_id=0)
    forked = [
        replace(one, segments=(*one.segments[:-1], replace(one.segments[-1], fork=1)))
        for one in tries
    ]
    with pytest.raises(ValueError, match="follows rows without forks"):
        assemble_rollout(prompts, forked, num_generations=2, pad_id=0)
    short = [replace(tries[0], experts=tries[0].experts[1:]), *tries[1:]]
    with pytest.raises(ValueError, match="in front of the last one that was sampled"):
        assemble_rollout(prompts, short, num_generations=2, pad_id=0)


def test_responses_of_other_lengths_are_merged_with_their_experts(build, train, policy) -> None:
    run = train(
        build(
            policy(),
            sampling=Sampling(max_new_tokens=12),
            update=REPLAY,
            dynamic_sampling=DynamicSampling(prompts=3),
            reward=lambda completions: [float(text[:1] == "q") for text in completions],
            reference=NO_KL,
        )
    )
    assert run.logged["rollout/rounds"] > 1
    rollout = run.experience
    start = with_own_choice(before(run, policy()), rollout)
    known = recorded(start)[..., 0, 0] >= 0
    assert torch.equal(recorded(rollout)[known].sort().values, recorded(start)[known].sort().values)


def test_a_dump_holds_the_experts(build, train, policy, tmp_path: Path) -> None:
    experience = train(build(policy(), update=REPLAY)).experience
    bundle = StepBundle(stage="policy", batches={"part": experience}, seeds=[(1,)], context={})
    write_bundle(tmp_path, 0, bundle)
    part = read_bundle(tmp_path, 0).batches["part"]
    assert torch.equal(recorded(part), recorded(experience))


def test_evaluations_record_nothing(build, train, policy) -> None:
    seen: list[bool] = []

    class Watches(EngineWrapper):
        def generate(self, prompts: Any, sampling: Sampling, **options: Any) -> Rollout:
            seen.append(sampling.keep_experts)
            return super().generate(prompts, sampling, **options)

    module = build(policy(), engine=Watches(TransformersEngine()), update=REPLAY)
    train(module, limit_val_batches=1, num_sanity_val_steps=0, val_check_interval=1)
    assert seen == [True, False]


class Forgets(EngineWrapper):
    def generate(self, *args: Any, **options: Any) -> Rollout:
        return replace(super().generate(*args, **options), routed_experts=None)


def test_what_cannot_record_or_replay_is_refused(build, train, policy) -> None:
    with pytest.raises(ValueError, match="VLLMEngine does not return the experts"):
        build(policy(), engine=VLLMEngine(), update=REPLAY)
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts"):
        build(update=REPLAY)
    with pytest.raises(ValueError, match="came without their experts"):
        train(build(policy(), engine=Forgets(TransformersEngine()), update=REPLAY))
