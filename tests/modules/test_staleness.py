"""Several iterations generated ahead by an engine that takes new weights meanwhile."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lrlhf.callbacks import EMA, RolloutLog, VLLMWeightSync
from lrlhf.datamodules import ReplayDataModule
from lrlhf.modules import RLOO, OptimizerConfig, Reference, Update
from lrlhf.rollout import Sampling, TransformersEngine
from tests.modules.policy_runs import Run, SkewedEngine, assert_same
from tests.modules.test_rollout_queue import SaveAfter, asked
from tests.rollout.copy_engine import CopyEngine
from tests.rollout.flight_engine import FlightEngine

STEPS = 7


@pytest.fixture
def stale(build: Any) -> Callable[..., RLOO]:
    """Builds a module of a staleness, with an engine that takes updates in flight."""

    def stale(staleness: int, engine: Any = None, **options: Any) -> RLOO:
        defaults: dict[str, Any] = {
            "num_generations": 2,
            "sampling": Sampling(max_new_tokens=6),
            "optimizer": OptimizerConfig(lr=1e-2),
            "reference": Reference(kl_coef=0.0),
            "seed": 5,
        }
        engine = engine or FlightEngine(patience=0.5)
        module: RLOO = build(engine=engine, max_staleness=staleness, **(defaults | options))
        return module

    return stale


@pytest.fixture
def run(train: Any) -> Callable[..., Run]:
    def run(module: RLOO, *callbacks: Any, **options: Any) -> Run:
        if isinstance(module.engine, CopyEngine):
            callbacks = (VLLMWeightSync(probe_every=0), *callbacks)
        result: Run = train(module, callbacks=callbacks, **({"steps": STEPS} | options))
        return result

    return run


def ages(run: Run, first: int = 0) -> list[list[int]]:
    """Of each iteration, the ages of the tokens that it has trained on."""
    found = []
    for step, experience in enumerate(run.watcher.experiences, start=first):
        assert experience.token_versions is not None
        versions = experience.token_versions[experience.response_mask]
        found.append((step - versions).tolist())
    return found


@pytest.mark.parametrize("staleness", range(5))
def test_no_token_is_older_than_it_may_be(stale, run, staleness: int) -> None:
    patience = 0.5 if staleness > 1 else 0.0
    engine = FlightEngine(delay=0.005, seed=staleness, patience=patience)
    result = run(stale(staleness, engine))
    everything = ages(result)
    assert len(everything) == STEPS
    for step, tokens in enumerate(everything):
        assert min(tokens) >= 0
        # the first iterations have no older weights than those of the start
        assert max(tokens) <= min(staleness, step)
    assert any(age > 0 for tokens in everything for age in tokens) == (staleness > 0)
    # only then do weights change under a response
    assert (engine.pushes_in_flight > 0) == (staleness > 1)
    last = everything[-1]
    assert result.logged["sync/age"] == pytest.approx(sum(last) / len(last))
    assert result.logged["sync/age_max"] == max(last)
    # every batch once, in the order of a run that generates nothing ahead
    assert len(engine.generated) == STEPS
    assert asked(result) == asked(run(stale(0, FlightEngine())))


def test_records_say_which_weights_sampled_how_many_tokens(stale, run) -> None:
    result = run(stale(2, FlightEngine(patience=0.5)))
    mixed = 0
    for experience, records in zip(result.watcher.experiences, result.watcher.records, strict=True):
        for row, record in enumerate(records):
            own = experience.token_versions[row, experience.response_mask[row]].tolist()
            spans = torch.stack(
                torch.tensor(own).unique_consecutive(return_counts=True), dim=1
            ).tolist()
            assert record["weight_version"] == min(own) == int(experience.weight_version[row])
            assert record.get("weight_versions", [[own[0], len(own)]]) == spans
            mixed += len(spans) > 1
    assert mixed


def test_each_token_is_weighed_against_the_weights_that_sampled_it(stale, run) -> None:
    engine = FlightEngine(patience=0.5)
    result = run(stale(2, engine, update=Update(loss="dapo", num_minibatches=2)))
    for step, experience in enumerate(result.watcher.experiences[1:], start=1):
        # the update is clipped around the policy before it, whatever the age of a token
        ratio = (experience.old_logprobs - experience.sampling_logprobs).exp().clamp(max=2.0)
        expected = torch.where(experience.response_mask, ratio, 1.0)
        torch.testing.assert_close(experience.importance_weights, expected)
        fresh = experience.response_mask & (experience.token_versions == step)
        stale_ones = experience.response_mask & (experience.token_versions < step)
        assert stale_ones.any()
        assert (ratio[stale_ones] - 1).abs().max() > 1e-2
        assert fresh.sum() + stale_ones.sum() == experience.response_mask.sum()


def test_an_evaluation_waits_for_what_is_in_the_making(stale, run) -> None:
    average = EMA(decay=0.5)

    class Refuses(FlightEngine):
        averages = 0

        def _send(self, tensors: Any) -> Any:
            assert not (average.stands_in and self.busy), "averaged weights sample for training"
            self.averages += average.stands_in
            return super()._send(tensors)

    engine = Refuses(patience=0.5)
    result = run(stale(3, engine), average, limit_val_batches=1, val_check_interval=2)
    assert engine.averages == STEPS // 2 + 1  # the last is after the last step
    assert all(min(tokens) >= 0 and max(tokens) <= 3 for tokens in ages(result))


# ---- failures


def test_all_that_a_failed_engine_was_making_is_generated_again(stale, run, caplog) -> None:
    engine = FlightEngine(delay=0.01, seed=4, fail={"respond": [5]})
    with caplog.at_level(logging.WARNING):
        result = run(stale(3, engine))
    assert "respond number 5 failed" in caplog.text or "engine is gone" in caplog.text
    assert engine.restarts == 1
    assert all(min(tokens) >= 0 and max(tokens) <= 3 for tokens in ages(result))
    assert asked(result) == asked(run(stale(0, FlightEngine())))


# ---- resume


def test_a_resumed_run_generates_again_what_was_not_finished(stale, run, tmp_path) -> None:
    checkpoint = tmp_path / "middle.ckpt"
    whole = run(stale(3, FlightEngine(patience=3.0)), SaveAfter(3, checkpoint))
    state = torch.load(checkpoint, weights_only=False)["lrlhf"]["sampler"]["queue"]
    assert len(state["pending"]) < 3, "nothing was in the making"
    engine = FlightEngine(delay=0.01, seed=7)
    rest = run(stale(3, engine), ckpt_path=str(checkpoint))
    assert asked(rest) == asked(whole)[3:]
    found = ages(rest, first=3)
    assert all(min(tokens) >= 0 and max(tokens) <= 3 for tokens in found)
    assert len(engine.generated) == STEPS - 3 - len(state["pending"])


def test_a_resumed_run_that_may_be_less_stale_generates_all_again(
    stale, run, tmp_path, caplog
) -> None:
    checkpoint = tmp_path / "middle.ckpt"
    run(stale(4, FlightEngine()), SaveAfter(3, checkpoint), steps=5)
    with caplog.at_level(logging.WARNING):
        rest = run(stale(1, FlightEngine()), ckpt_path=str(checkpoint), steps=5)
    assert [set(tokens) for tokens in ages(rest, first=3)] == [{0}, {1}]
    assert "max_staleness was 4 in the checkpoint and is 1 now" in caplog.text


# ---- replay


@pytest.mark.parametrize("update", [Update(), Update(loss="dapo", num_minibatches=2)])
def test_a_recorded_run_is_repeated_bit_by_bit(stale, run, tmp_path, update: Update) -> None:
    log = RolloutLog(dirpath=tmp_path / "log", save_tensors=True, print_every=None)
    options: dict[str, Any] = {"update": update, "reference": Reference(kl_coef=0.05)}
    recorded = run(stale(2, **options), log)
    assert any(len(set(tokens)) > 1 for tokens in ages(recorded))

    def again(**how: Any) -> tuple[Run, FlightEngine]:
        engine = FlightEngine()
        data = ReplayDataModule(tmp_path / "log" / "rollouts", shuffle=False, **how)
        return run(stale(2, engine, **options), data=data), engine

    repeated, engine = again(as_recorded=True)
    assert_same(recorded.after, repeated.after)
    for name in ("policy/grad_norm", "importance/weight_mean", "sync/age", "mismatch/mean"):
        assert repeated.logged[name] == recorded.logged[name], name
    assert not engine.generated
    assert not engine.calls
    # as responses of any earlier run they are trained on otherwise
    other, _ = again()
    assert any(not torch.equal(other.after[name], one) for name, one in repeated.after.items())


@pytest.mark.parametrize(
    ("engine", "how", "culprit"),
    [
        (FlightEngine, {"max_rollouts": 1}, "iteration 1 was given the responses of iteration 2"),
        (TransformersEngine, {}, r"needs the model\.engine of the recorded run"),
    ],
)
def test_what_cannot_be_repeated_is_refused(
    stale, run, tmp_path, engine: Any, how: dict[str, Any], culprit: str
) -> None:
    log = RolloutLog(dirpath=tmp_path / "log", save_tensors=True, print_every=None)
    run(stale(0), log, steps=2)
    data = ReplayDataModule(tmp_path / "log" / "rollouts", shuffle=False, as_recorded=True, **how)
    with pytest.raises(ValueError, match=culprit):
        run(stale(0, engine()), steps=1, data=data)


def test_responses_of_the_policy_itself_are_not_repeated(stale, run, tmp_path) -> None:
    log = RolloutLog(dirpath=tmp_path / "log", save_tensors=True, print_every=None)
    run(stale(0, TransformersEngine()), log, steps=1)
    data = ReplayDataModule(tmp_path / "log" / "rollouts", shuffle=False, as_recorded=True)
    with pytest.raises(ValueError, match="an engine that has a copy of the weights"):
        run(stale(0), steps=1, data=data)


# ---- refused


@pytest.mark.parametrize(
    ("staleness", "engine", "culprit"),
    [
        (-1, FlightEngine(), "max_staleness is -1; it must be 0 or more"),
        (2, CopyEngine(concurrent=True), "CopyEngine takes no new weights while it generates"),
        (2, SkewedEngine(), "SkewedEngine, which computes in the training process"),
    ],
)
def test_an_engine_that_cannot_do_it_is_refused(
    stale, staleness: int, engine: Any, culprit: str
) -> None:
    with pytest.raises(ValueError, match=culprit):
        stale(staleness, engine)
