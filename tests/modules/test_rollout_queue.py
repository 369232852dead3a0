"""The next responses, generated while the present ones are trained on."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lrlhf.callbacks import EMA, VLLMWeightSync
from lrlhf.datamodules import PromptDataModule
from lrlhf.modules import RLOO, DynamicSampling, OptimizerConfig, Reference
from lrlhf.rollout import EngineFailure, Response, Sampling, TransformersEngine
from lrlhf.rollout.engines.synced_engine import Request
from lrlhf.run import sample_seeds
from lrlhf.types import PromptBatch
from tests.conftest import build_language_model
from tests.modules.policy_runs import Run, Watcher, assert_same, weights
from tests.rollout.copy_engine import CopyEngine

SAMPLING = Sampling(max_new_tokens=4)
SEED = 5
VALIDATED = {"limit_val_batches": 2, "val_check_interval": 1}


@pytest.fixture
def ahead(build: Any) -> Callable[..., RLOO]:
    """Builds a module that generates ahead, with an engine elsewhere."""

    def ahead(engine: Any = None, *, ahead: int = 1, **options: Any) -> RLOO:
        defaults: dict[str, Any] = {
            "num_generations": 2,
            "sampling": SAMPLING,
            "optimizer": OptimizerConfig(lr=1e-2),
            "reference": Reference(kl_coef=0.0),
            "seed": SEED,
        }
        engine = engine or CopyEngine(concurrent=True)
        module: RLOO = build(engine=engine, max_staleness=ahead, **(defaults | options))
        return module

    return ahead


@pytest.fixture
def run(train: Any) -> Callable[..., Run]:
    """Four iterations."""

    def run(module: RLOO, *callbacks: L.Callback, **options: Any) -> Run:
        sync = VLLMWeightSync(probe_every=0)
        result: Run = train(module, callbacks=[sync, *callbacks], **({"steps": 4} | options))
        return result

    return run


class Snapshots(L.Callback):
    """The policy's weights and the prompts at the start of every iteration."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.prompts: list[PromptBatch] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.weights.append(weights(pl_module.policy))
        self.prompts.append(batch)

    def asked(self) -> list[list[str]]:
        """The prompt of each of two responses."""
        return [[f"say {c['answer']}" for c in b.columns for _ in "12"] for b in self.prompts]


class SaveAfter(L.Callback):
    def __init__(self, step: int, path: Path) -> None:
        self._step, self._path = step, path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:
            trainer.save_checkpoint(self._path)


def versions(run: Run) -> list[list[int]]:
    return [one.weight_version.unique().tolist() for one in run.watcher.experiences]


def asked(run: Run) -> list[list[str]]:
    return [[record["prompt"] for record in records] for records in run.watcher.records]


# ---- what is generated, and when


@pytest.mark.parametrize(
    ("looks", "expected", "age", "generated"),
    # nothing after the last step, nothing twice
    [(1, [[0], [0], [1], [2]], 1, [0, 0, 1, 2]), (0, [[0], [1], [2], [3]], 0, [0, 1, 2, 3])],
)
def test_the_first_responses_are_fresh_and_the_later_ones_one_update_old(
    ahead, run, looks: int, expected: list[list[int]], age: int, generated: list[int]
) -> None:
    engine = CopyEngine(concurrent=True)
    result = run(ahead(engine, ahead=looks))
    assert versions(result) == expected
    assert result.logged["sync/age"] == age
    assert [draw.version for draw in engine.draws] == generated


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        (0, ["push 0", "draw 0 0", "push 1", "draw 1 1", "push 2", "draw 2 2"]),
        # what iteration 2 trains on is begun after the push of 1, and done before that of 2
        (1, ["push 0", "draw 0 0", "draw 1 0", "push 1", "draw 2 1", "push 2"]),
    ],
)
def test_weights_and_responses_come_in_turn(ahead, run, looks: int, expected: list[str]) -> None:
    told: list[str] = []

    class Tells(CopyEngine):
        def push(self, version: int) -> None:
            super().push(version)
            told.append(f"push {version}")

        def _respond(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
            seeds = [one.seed for one in requests]
            step = next(
                step for step in range(3) if sample_seeds(SEED, step, 0, count=1)[0] in seeds
            )
            told.append(f"draw {step} {self.version}")
            return super()._respond(requests, sampling)

    run(ahead(Tells(concurrent=True), ahead=looks), steps=3)
    assert told == expected


def test_the_prompts_and_their_order_stay_the_same(ahead, run) -> None:
    # 16 prompts in batches of 4: the fifth and sixth iteration are of the next epoch
    order = []
    for looks in (0, 1):
        snapshots = Snapshots()
        result = run(ahead(ahead=looks), snapshots, steps=6)
        # every response is filed under its own prompt
        assert asked(result) == snapshots.asked()
        order.append(asked(result))
    assert order[0] == order[1]
    assert {prompt for batch in order[0][:4] for prompt in batch} == {
        f"say {letter}" for letter in "abcdefghijklmnop"
    }


def test_responses_are_those_that_the_older_weights_give(ahead, run, tokenizer) -> None:
    snapshots = Snapshots()
    result = run(ahead(), snapshots)
    model, synchronous = build_language_model(tokenizer), TransformersEngine()
    synchronous.attach(model, tokenizer)
    for step, experience in enumerate(result.watcher.experiences):
        model.load_state_dict(snapshots.weights[max(step - 1, 0)])
        seeds = [seed for row in range(4) for seed in sample_seeds(SEED, step, row, count=2)]
        expected = synchronous.generate(
            snapshots.prompts[step], SAMPLING, num_generations=2, seeds=seeds
        )
        assert torch.equal(experience.input_ids, expected.input_ids)
        assert torch.equal(experience.response_mask, expected.response_mask)
        torch.testing.assert_close(
            experience.sampling_logprobs, expected.sampling_logprobs, rtol=1e-4, atol=1e-5
        )
    older, newer = snapshots.weights[:2]
    assert all(not torch.equal(older[name], value) for name, value in newer.items())


def test_responses_are_generated_while_the_iteration_before_trains(ahead, run) -> None:
    scored = threading.Event()

    class WaitsForScores(CopyEngine):
        def _respond(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
            # the first call is not ahead of anything
            if self.calls["respond"] == 1:
                assert threading.current_thread() is not threading.main_thread()
                assert scored.wait(20), "the iteration before waited for these responses"
            return super()._respond(requests, sampling)

    class TellsScores(Watcher):
        def on_rollout(self, *arguments: Any) -> None:
            scored.set()

    result = run(ahead(WaitsForScores(concurrent=True)), TellsScores(), steps=2)
    assert versions(result) == [[0], [0]]


def test_no_weights_are_pushed_while_responses_are_generated(ahead, run) -> None:
    class Slow(CopyEngine):
        generating = False

        def _respond(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
            assert not self.generating
            self.generating = True
            threading.Event().wait(0.2)
            try:
                return super()._respond(requests, sampling)
            finally:
                self.generating = False

        def _send(self, tensors: Any) -> list[dict[str, str]]:
            assert not self.generating
            return super()._send(tensors)

    result = run(ahead(Slow(concurrent=True)), EMA(decay=0.5), steps=3, **VALIDATED)
    assert versions(result) == [[0], [0], [1]]


def test_validation_in_between_does_not_change_the_run(ahead, run) -> None:
    without, between = (run(ahead(), EMA(decay=0.5), **options) for options in ({}, VALIDATED))
    assert versions(between) == versions(without) == [[0], [0], [1], [2]]
    assert_same(without.after, between.after)


# ---- resume


@pytest.mark.parametrize("stop", [1, 4, 5])
def test_a_resumed_run_ends_with_the_same_weights(ahead, run, tmp_path, stop: int) -> None:
    checkpoint = tmp_path / "middle.ckpt"
    whole = run(ahead(), SaveAfter(stop, checkpoint), steps=6)
    engine = CopyEngine(concurrent=True)
    rest = run(ahead(engine), steps=6, ckpt_path=str(checkpoint))
    assert versions(rest) == versions(whole)[stop:]
    after = whole.watcher.experiences[stop:]
    for first, second in zip(after, rest.watcher.experiences, strict=True):
        assert torch.equal(first.input_ids, second.input_ids)
        assert torch.equal(first.sampling_logprobs, second.sampling_logprobs)
    assert_same(whole.after, rest.after)
    # the responses of the iteration after the checkpoint lie in it
    assert len(engine.draws) == 6 - stop - 1


@pytest.mark.parametrize(("before", "after", "expected"), [(0, 1, [[2], [2]]), (1, 0, [[2], [3]])])
def test_a_resumed_run_may_begin_or_cease_to_look_ahead(
    ahead, run, tmp_path, before: int, after: int, expected: list[list[int]]
) -> None:
    checkpoint = tmp_path / "middle.ckpt"
    run(ahead(ahead=before), SaveAfter(2, checkpoint))
    assert versions(run(ahead(ahead=after), ckpt_path=str(checkpoint))) == expected


# ---- failures


@pytest.mark.parametrize("call", [2, 3])
def test_responses_that_could_not_be_generated_ahead_are_generated_fresh(
    ahead, run, tmp_path, caplog, call: int
) -> None:
    engine, snapshots = CopyEngine(concurrent=True, fail={"respond": [call]}), Snapshots()
    checkpoint, failed = tmp_path / "middle.ckpt", call - 1  # call 1 is of iteration 0
    with caplog.at_level(logging.WARNING):
        result = run(ahead(engine), snapshots, SaveAfter(failed, checkpoint))
    expected = [[0], [0], [1], [2]]
    expected[failed] = [failed]
    assert versions(result) == expected
    assert f"respond number {call} failed; generating the responses again" in caplog.text
    assert engine.restarts == 1
    assert asked(result) == snapshots.asked()
    drawn = next(draw for draw in engine.draws[failed:] if draw.version == failed)
    assert_same(snapshots.weights[failed], drawn.weights)
    # a checkpoint after the failure holds no responses
    state = torch.load(checkpoint, weights_only=False)
    assert state["lrlhf"]["sampler"]["queue"]["pending"] == {}
    assert versions(run(ahead(), ckpt_path=str(checkpoint)))[:2] == [[failed], [failed]]


def test_an_engine_that_never_recovers_ends_the_run(ahead, run) -> None:
    engine = CopyEngine(concurrent=True, fail={"respond": range(2, 99)}, max_restarts=1)
    with pytest.raises(EngineFailure, match="after 1 restarts"):
        run(ahead(engine))


def test_an_error_that_is_no_failure_of_the_engine_ends_the_run(ahead, run, prompts) -> None:
    # the next batch has a prompt that is too long: "say b" and 4 tokens have 9
    long = prompts.with_name("long.jsonl")
    long.write_text("".join(f'{{"prompt": "say {w}"}}\n' for w in ["b", "bbbbbbbbb"] * 2))
    data = PromptDataModule(train=str(long), batch_size=1)
    with pytest.raises(ValueError, match=r"engine\.max_model_len"):
        run(ahead(CopyEngine(concurrent=True, max_model_len=12)), data=data)


def test_a_new_run_takes_nothing_that_one_before_it_has_begun(ahead, run) -> None:
    class Breaks(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                raise RuntimeError("enough")

    engine = CopyEngine(concurrent=True)
    module = ahead(engine)
    with pytest.raises(RuntimeError, match="enough"):
        run(module, Breaks())
    assert [draw.version for draw in engine.draws] == [0, 0, 1]  # the last one for iteration 2
    engine.draws.clear()
    run(module)
    assert [draw.version for draw in engine.draws] == [0, 0, 1, 2]


# ---- refused


@pytest.mark.parametrize(
    ("engine", "options", "culprit"),
    [
        (TransformersEngine(), {}, "TransformersEngine, which computes in the training process"),
        (CopyEngine(), {}, "model.engine is CopyEngine, which computes in the training process"),
        (
            CopyEngine(concurrent=True),
            {"dynamic_sampling": DynamicSampling(prompts=2)},
            "dynamic_sampling decides by scores",
        ),
    ],
)
def test_what_cannot_look_ahead_is_refused(ahead, engine: Any, options: Any, culprit: str) -> None:
    with pytest.raises(ValueError, match=culprit):
        ahead(engine, **options)
