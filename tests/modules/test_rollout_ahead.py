"""The next responses, drawn while the present ones are trained on."""

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lrlhf.callbacks import EMA, VLLMWeightSync
from lrlhf.datamodules import PromptDataModule
from lrlhf.modules import RLOO, DynamicSampling, OptimizerConfig, Reference
from lrlhf.rewards import Rewards
from lrlhf.rollout import (
    EngineFailure,
    Response,
    RolloutEngine,
    Sampling,
    TransformersEngine,
)
from lrlhf.rollout.engines.synced_engine import Request
from lrlhf.run import sample_seeds
from lrlhf.types import PromptBatch
from tests.conftest import build_language_model
from tests.modules.policy_runs import Watcher, fit, letters, weights
from tests.rollout.copy_engine import CopyEngine

SAMPLING = Sampling(max_new_tokens=4)
SEED = 5


def build(
    tokenizer: PreTrainedTokenizerBase, engine: RolloutEngine, *, ahead: int = 1, **options: Any
) -> RLOO:
    defaults: dict[str, Any] = {
        "num_generations": 2,
        "sampling": SAMPLING,
        "optimizer": OptimizerConfig(lr=1e-2),
        "reference": Reference(kl_coef=0.0),
        "seed": SEED,
    }
    return RLOO(
        build_language_model(tokenizer),
        Rewards([letters]),
        tokenizer=tokenizer,
        engine=engine,
        rollout_ahead=ahead,
        **(defaults | options),
    )


def elsewhere(**options: Any) -> CopyEngine:
    return CopyEngine(concurrent=True, **options)


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


class SaveAfter(L.Callback):
    def __init__(self, step: int, path: Path) -> None:
        self._step, self._path = step, path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self._step:
            trainer.save_checkpoint(self._path)


def run(
    module: RLOO, prompts: Path, folder: Path, *callbacks: L.Callback, **options: Any
) -> tuple[L.Trainer, Watcher]:
    watcher = Watcher()
    defaults: dict[str, Any] = {"limit_val_batches": 0, "steps": 4}
    sync = VLLMWeightSync(probe_every=0)
    trainer = fit(
        module, prompts, folder, callbacks=[sync, watcher, *callbacks], **(defaults | options)
    )
    return trainer, watcher


def versions(watcher: Watcher) -> list[list[int]]:
    found = []
    for experience in watcher.experiences:
        assert experience.weight_version is not None
        found.append(experience.weight_version.unique().tolist())
    return found


def asked(watcher: Watcher) -> list[list[str]]:
    return [[record["prompt"] for record in records] for records in watcher.records]


# ------------------------------------------------------------------ what is drawn, and when


def test_the_first_responses_are_fresh_and_the_later_ones_one_update_old(
    tokenizer, prompts, tmp_path
) -> None:
    engine = elsewhere()
    trainer, watcher = run(build(tokenizer, engine), prompts, tmp_path)
    assert versions(watcher) == [[0], [0], [1], [2]]
    assert trainer.logged_metrics["sync/age"] == 1
    # nothing after the last step, nothing twice
    assert [draw.version for draw in engine.draws] == [0, 0, 1, 2]


def test_without_looking_ahead_every_response_is_fresh(tokenizer, prompts, tmp_path) -> None:
    engine = elsewhere()
    trainer, watcher = run(build(tokenizer, engine, ahead=0), prompts, tmp_path)
    assert versions(watcher) == [[0], [1], [2], [3]]
    assert trainer.logged_metrics["sync/age"] == 0


def test_the_prompts_and_their_order_stay_the_same(tokenizer, prompts, tmp_path) -> None:
    # 16 prompts in batches of 4: the fifth and sixth iteration are of the next epoch
    order = []
    for ahead in (0, 1):
        snapshots = Snapshots()
        module = build(tokenizer, elsewhere(), ahead=ahead)
        _, watcher = run(module, prompts, tmp_path, snapshots, steps=6)
        batches = [[f"say {c['answer']}" for c in b.columns] for b in snapshots.prompts]
        # every response is filed under its own prompt
        assert asked(watcher) == [[p for p in batch for _ in range(2)] for batch in batches]
        order.append(batches)
    assert order[0] == order[1]
    assert sorted(prompt for batch in order[0][:4] for prompt in batch) == [
        f"say {letter}" for letter in "abcdefghijklmnop"
    ]


def test_responses_are_those_that_the_older_weights_give(tokenizer, prompts, tmp_path) -> None:
    snapshots = Snapshots()
    _, watcher = run(build(tokenizer, elsewhere()), prompts, tmp_path, snapshots)
    model = build_language_model(tokenizer)
    synchronous = TransformersEngine()
    synchronous.attach(model, tokenizer)
    for step, experience in enumerate(watcher.experiences):
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
    older, newer = snapshots.weights[0], snapshots.weights[1]
    assert all(not torch.equal(older[name], value) for name, value in newer.items())


def test_drawing_happens_while_the_iteration_before_trains(tokenizer, prompts, tmp_path) -> None:
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
            super().on_rollout(*arguments)
            scored.set()

    watcher = TellsScores()
    run(build(tokenizer, WaitsForScores(concurrent=True)), prompts, tmp_path, watcher, steps=2)
    assert versions(watcher) == [[0], [0]]


def test_no_weights_are_pushed_while_responses_are_drawn(tokenizer, prompts, tmp_path) -> None:
    class Slow(CopyEngine):
        drawing = False

        def _respond(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
            assert not self.drawing
            self.drawing = True
            threading.Event().wait(0.2)
            try:
                return super()._respond(requests, sampling)
            finally:
                self.drawing = False

        def _send(self, tensors: Any) -> list[dict[str, str]]:
            assert not self.drawing
            return super()._send(tensors)

    engine = Slow(concurrent=True)
    module = build(tokenizer, engine)
    options: dict[str, Any] = {"limit_val_batches": 2, "val_check_interval": 1}
    _, watcher = run(module, prompts, tmp_path, EMA(decay=0.5), steps=3, **options)
    assert versions(watcher) == [[0], [0], [1]]


@pytest.mark.parametrize("averaged", [False, True])
def test_validation_in_between_does_not_change_the_run(
    tokenizer, prompts, tmp_path, averaged: bool
) -> None:
    results = []
    for options in (
        {"limit_val_batches": 0},
        {"limit_val_batches": 2, "val_check_interval": 1},
    ):
        module = build(tokenizer, elsewhere())
        ema = [EMA(decay=0.5)] if averaged else []
        _, watcher = run(module, prompts, tmp_path, *ema, **options)
        assert versions(watcher) == [[0], [0], [1], [2]]
        results.append(weights(module.policy))
    for name, value in results[0].items():
        assert torch.equal(results[1][name], value), name


def test_pushes_that_are_rarer_add_to_the_age(tokenizer, prompts, tmp_path) -> None:
    watcher = Watcher()
    callbacks = [VLLMWeightSync(every_n_steps=2, probe_every=0), watcher]
    module = build(tokenizer, elsewhere())
    fit(module, prompts, tmp_path, steps=5, callbacks=callbacks, limit_val_batches=0)
    # pushed at 0, 2 and 4; drawn one iteration before
    assert versions(watcher) == [[0], [0], [0], [2], [2]]


# ------------------------------------------------------------------ resume


@pytest.mark.parametrize("stop", [1, 3, 4, 5])
def test_a_resumed_run_ends_with_the_same_weights(tokenizer, prompts, tmp_path, stop: int) -> None:
    checkpoint = tmp_path / "middle.ckpt"
    straight = build(tokenizer, elsewhere())
    _, whole = run(straight, prompts, tmp_path, SaveAfter(stop, checkpoint), steps=6)
    engine = elsewhere()
    resumed = build(tokenizer, engine)
    _, rest = run(resumed, prompts, tmp_path, steps=6, ckpt_path=str(checkpoint))
    assert versions(rest) == versions(whole)[stop:]
    for first, second in zip(whole.experiences[stop:], rest.experiences, strict=True):
        assert torch.equal(first.input_ids, second.input_ids)
        assert torch.equal(first.sampling_logprobs, second.sampling_logprobs)
    expected = weights(straight.policy)
    for name, value in weights(resumed.policy).items():
        assert torch.equal(value, expected[name]), name
    # the responses of the iteration after the checkpoint lie in it
    assert len(engine.draws) == 6 - stop - 1


def test_a_checkpoint_of_a_run_that_did_not_look_ahead_can_be_resumed(
    tokenizer, prompts, tmp_path
) -> None:
    checkpoint = tmp_path / "middle.ckpt"
    first = build(tokenizer, elsewhere(), ahead=0)
    run(first, prompts, tmp_path, SaveAfter(2, checkpoint), steps=2)
    module = build(tokenizer, elsewhere())
    _, watcher = run(module, prompts, tmp_path, steps=4, ckpt_path=str(checkpoint))
    assert versions(watcher) == [[2], [2]]


def test_a_checkpoint_of_a_run_that_looked_ahead_can_be_resumed_without(
    tokenizer, prompts, tmp_path
) -> None:
    checkpoint = tmp_path / "middle.ckpt"
    run(build(tokenizer, elsewhere()), prompts, tmp_path, SaveAfter(2, checkpoint), steps=4)
    module = build(tokenizer, elsewhere(), ahead=0)
    _, watcher = run(module, prompts, tmp_path, steps=4, ckpt_path=str(checkpoint))
    assert versions(watcher) == [[2], [3]]


def test_responses_of_a_checkpoint_that_answer_other_prompts_are_drawn_again(
    tokenizer, prompts, tmp_path, caplog
) -> None:
    checkpoint = tmp_path / "middle.ckpt"
    run(build(tokenizer, elsewhere()), prompts, tmp_path, SaveAfter(2, checkpoint), steps=4)
    other = PromptDataModule(train=str(prompts), batch_size=2)
    module = build(tokenizer, elsewhere())
    with caplog.at_level(logging.WARNING):
        _, watcher = run(module, prompts, tmp_path, steps=4, ckpt_path=str(checkpoint), data=other)
    assert "answer other prompts; generating them again" in caplog.text
    assert versions(watcher) == [[2], [2]]
    assert [len(prompts) for prompts in asked(watcher)] == [4, 4]


# ------------------------------------------------------------------ failures


@pytest.mark.parametrize("call", [2, 3])
def test_responses_that_could_not_be_drawn_ahead_are_drawn_fresh(
    tokenizer, prompts, tmp_path, caplog, call: int
) -> None:
    engine, snapshots = elsewhere(fail={"respond": [call]}), Snapshots()
    module = build(tokenizer, engine)
    with caplog.at_level(logging.WARNING):
        _, watcher = run(module, prompts, tmp_path, snapshots)
    failed = call - 1  # call 1 is of iteration 0, and each later one is one iteration ahead
    expected = [[0], [0], [1], [2]]
    expected[failed] = [failed]
    assert versions(watcher) == expected
    assert f"respond number {call} failed; generating the responses again" in caplog.text
    assert engine.restarts == 1
    texts = asked(watcher)[failed]
    columns = snapshots.prompts[failed].columns
    assert texts == [f"say {column['answer']}" for column in columns for _ in range(2)]
    drawn = next(draw for draw in engine.draws[failed:] if draw.version == failed)
    for name, value in snapshots.weights[failed].items():
        assert torch.equal(drawn.weights[name], value), name


def test_a_checkpoint_after_a_failure_holds_no_responses(tokenizer, prompts, tmp_path) -> None:
    checkpoint = tmp_path / "middle.ckpt"
    engine = elsewhere(fail={"respond": [3]})
    run(build(tokenizer, engine), prompts, tmp_path, SaveAfter(2, checkpoint), steps=4)
    state = torch.load(checkpoint, weights_only=False)
    assert state["lrlhf"]["sampler"]["ahead"] is None
    module = build(tokenizer, elsewhere())
    _, watcher = run(module, prompts, tmp_path, steps=4, ckpt_path=str(checkpoint))
    assert versions(watcher) == [[2], [2]]


def test_an_engine_that_never_recovers_ends_the_run(tokenizer, prompts, tmp_path) -> None:
    engine = elsewhere(fail={"respond": range(2, 99)}, max_restarts=1)
    with pytest.raises(EngineFailure, match="after 1 restarts"):
        run(build(tokenizer, engine), prompts, tmp_path)


def test_an_error_that_is_no_failure_of_the_engine_ends_the_run(
    tokenizer, prompts, tmp_path
) -> None:
    # the next batch has a prompt that is too long: "say b" and 4 tokens have 9
    long = prompts.with_name("long.jsonl")
    long.write_text("".join(f'{{"prompt": "say {w}"}}\n' for w in ["b", "bbbbbbbbb"] * 2))
    data = PromptDataModule(train=str(long), batch_size=1)
    module = build(tokenizer, elsewhere(max_model_len=12))
    with pytest.raises(ValueError, match=r"engine\.max_model_len"):
        run(module, prompts, tmp_path, data=data)


# ------------------------------------------------------------------ refused


def test_an_engine_in_the_training_process_is_refused(tokenizer) -> None:
    for engine in (TransformersEngine(), CopyEngine()):
        with pytest.raises(
            ValueError,
            match=rf"model\.engine is {type(engine).__name__}, which computes in the training",
        ):
            build(tokenizer, engine)


def test_dynamic_sampling_is_refused(tokenizer) -> None:
    with pytest.raises(ValueError, match="dynamic_sampling decides by scores"):
        build(tokenizer, elsewhere(), dynamic_sampling=DynamicSampling(prompts=2))


class PlainLoader(PromptDataModule):
    """A loader that gives what another one does, and cannot look ahead."""

    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()

        class Plain:
            def __len__(self) -> int:
                return len(loader)

            def __iter__(self) -> Any:
                return iter(loader)

        return Plain()


def test_a_loader_that_cannot_look_ahead_is_refused(tokenizer, prompts, tmp_path) -> None:
    data = PlainLoader(train=str(prompts), batch_size=4)
    with pytest.raises(ValueError, match="a Plain does not tell it"):
        run(build(tokenizer, elsewhere()), prompts, tmp_path, data=data)
    # without looking ahead it will do
    run(build(tokenizer, elsewhere(), ahead=0), prompts, tmp_path, data=data, steps=1)
