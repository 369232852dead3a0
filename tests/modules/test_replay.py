"""Rollouts that an earlier run stored are trained on as when they were sampled."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from lrlhf.callbacks import RolloutLog
from lrlhf.datamodules import ReplayDataModule
from lrlhf.modules import DynamicSampling, ImportanceSampling, OptimizerConfig, Reference, Update
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling
from tests.modules.policy_runs import Run, SkewedEngine, assert_same

HOT = Sampling(max_new_tokens=6, first_temperature=3.0, first_top_k=8)


class NoEngine(SkewedEngine):
    def generate(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a replayed rollout needs no engine")


@pytest.fixture
def stored(train: Any, tmp_path: Any) -> Callable[..., tuple[Run, ReplayDataModule]]:
    """Trains a module, and returns what it stored for another one."""

    def stored(module: Any, **options: Any) -> tuple[Run, ReplayDataModule]:
        log = RolloutLog(dirpath=tmp_path / "log", save_tensors=True, print_every=None)
        run = train(module, callbacks=[log], **options)
        return run, ReplayDataModule(folder=tmp_path / "log" / "rollouts", shuffle=False)

    return stored


def test_stored_rollouts_are_trained_on_without_an_engine(ppo, train, stored) -> None:
    run, data = stored(ppo(), steps=2)
    again = train(ppo(engine=NoEngine(exact=True)), steps=2, data=data)
    pairs = list(zip(run.watcher.experiences, again.watcher.experiences, strict=True))
    for sampled, replayed in pairs:
        assert torch.equal(sampled.input_ids, replayed.input_ids)
        assert torch.equal(sampled.scores, replayed.scores)
        # the ratio starts from the policy that sampled the responses
        assert torch.equal(replayed.old_logprobs, sampled.sampling_logprobs)
    assert "rewards/letters/mean" in again.logged
    assert again.watcher.records[1][0]["step"] == 2
    # the first iteration is on-policy here as it was there, so it trains alike
    first, same = pairs[0]
    torch.testing.assert_close(same.advantages, first.advantages, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("sampled", "options", "culprit"),
    [
        ({}, {"num_generations": 4}, "groups of 2 responses"),
        ({}, {"sampling": Sampling(max_new_tokens=6, temperature=0.3)}, "was sampled at 1.0"),
        (
            {"sampling": Sampling(max_new_tokens=6, top_k=9), "allow_truncated_sampling": True},
            {},
            "top_p, top_k, min_p or min_new_tokens.* allow_truncated_sampling",
        ),
        ({}, {"dynamic_sampling": DynamicSampling(prompts=1)}, "the data holds stored ones"),
        (
            {},
            {"importance_sampling": ImportanceSampling(mode="decoupled_k3_rs")},
            "importance_sampling rejects .* drop reject and presets",
        ),
        (
            {},
            {"importance_sampling": ImportanceSampling(mode="none", reject={"token_k1": (0.5, 2)})},
            "importance_sampling rejects",
        ),
        # weights for hot first tokens are none for tokens that were cut off
        (
            {"sampling": Sampling(max_new_tokens=6, top_k=9), "allow_truncated_sampling": True},
            {"sampling": HOT, "allow_truncated_sampling": True},
            "leave first_temperature out",
        ),
        # nor do hot tokens go without their weights
        (
            {"sampling": HOT},
            {"allow_truncated_sampling": True},
            r"first_temperature 3\.0 and first_top_k 8, here they are None and 0",
        ),
        (
            {"sampling": HOT},
            {"sampling": replace(HOT, first_top_k=7)},
            r"first_temperature 3\.0 and first_top_k 8, here they are 3\.0 and 7",
        ),
    ],
)
def test_a_stored_rollout_that_was_sampled_otherwise_is_refused(
    ppo, train, stored, sampled: dict[str, Any], options: dict[str, Any], culprit: str
) -> None:
    _, data = stored(ppo(**sampled))
    with pytest.raises(ValueError, match=culprit):
        train(ppo(**options), data=data)


def test_a_rollout_that_was_stored_without_its_hot_temperature_is_not_called_truncated(
    ppo, train, stored, monkeypatch
) -> None:
    def as_before(sampling: Sampling) -> dict[str, Any]:
        return {"temperature": sampling.temperature}

    monkeypatch.setattr("lrlhf.rollout.records.sampling_options", as_before)
    _, data = stored(ppo(sampling=HOT))
    culprit = "does not tell how its first tokens were drawn: if hot, .*: sample and store it anew"
    with pytest.raises(ValueError, match=culprit):
        train(ppo(sampling=HOT), data=data)


def test_the_distance_in_a_replay_is_that_of_the_policy_which_learns(ppo, train, stored) -> None:
    _, data = stored(ppo())
    run = train(ppo(optimizer=OptimizerConfig(lr=5e-3)), steps=4, data=data)
    assert run.logged["kl/sequence"] > 0.01


def test_fillers_are_left_out_of_a_replay_too(ppo, train, stored) -> None:
    same = Rewards({"same": lambda completions: [0.7] * len(completions)})
    _, data = stored(ppo(rewards=same, dynamic_sampling=DynamicSampling(prompts=2)))
    assert not train(ppo(), data=data).experience.counted.any()


def test_stored_rollouts_are_not_weighed_and_show_no_mismatch(build, train, stored) -> None:
    options: dict[str, Any] = {
        "engine": SkewedEngine(version=0),
        "update": Update(loss="dapo"),
        "reference": Reference(kl_coef=0.0),
        "sampling": Sampling(max_new_tokens=6, top_k=50),
        "allow_truncated_sampling": True,
    }
    run, data = stored(build(**options))
    assert "importance/weight_mean" in run.logged
    ends = []
    for mode in (None, "token_truncate", "none"):
        chosen = None if mode is None else ImportanceSampling(mode=mode)
        again = train(build(importance_sampling=chosen, **options), steps=2, data=data)
        assert not any(name.startswith(("importance/", "mismatch/")) for name in again.logged)
        ends.append(again.after)
    assert_same(ends[0], ends[1])
    assert_same(ends[0], ends[2])


def test_hot_starts_are_made_up_for_in_a_replay_too(ppo, train, stored) -> None:
    hot = {"sampling": HOT}
    run, data = stored(ppo(**hot))
    again = train(ppo(engine=NoEngine(exact=True), **hot), data=data)
    sampled, replayed = run.experience, again.experience
    # the ratio starts from the policy, not from what the first token was drawn from
    torch.testing.assert_close(replayed.old_logprobs, sampled.engine_logprobs)
    assert not torch.allclose(sampled.engine_logprobs, sampled.sampling_logprobs, atol=0.1)
    torch.testing.assert_close(replayed.advantages, sampled.advantages, rtol=1e-3, atol=1e-4)
    assert_same(run.after, again.after, rtol=1e-3, atol=1e-5)
    with pytest.raises(ValueError, match="set both in sampling"):
        train(ppo(), data=data)
