"""A policy and an engine with a copy of it, through whole runs on a model of 27,000 parameters."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.callbacks import EMA, VLLMWeightSync
from lrlhf.modules import RLOO, OptimizerConfig, Reference
from lrlhf.rewards import Rewards
from lrlhf.rollout import (
    EngineWrapper,
    ProbeGap,
    RolloutEngine,
    Sampling,
    TransformersEngine,
    WeightSyncError,
)
from tests.modules.policy_runs import Watcher, fit, letters
from tests.modules.test_policy_objective import random_experience
from tests.rollout.copy_engine import CopyEngine, Draw

NORM = "model.norm.weight"
PROBE_TOKENS = 80


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(f'{{"prompt": "say {word}"}}' for word in "abcdefgh"))
    return path


def build(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    engine: RolloutEngine | None,
    **options: Any,
) -> RLOO:
    return RLOO(
        model,
        Rewards([letters]),
        tokenizer=tokenizer,
        engine=engine,
        num_generations=2,
        sampling=Sampling(max_new_tokens=4),
        optimizer=OptimizerConfig(lr=1e-2),
        reference=Reference(kl_coef=0.0),
        **options,
    )


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


class Snapshots(L.Callback):
    """The policy's weights before the first step and after each."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.weights.append(trained(pl_module.policy))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        self.weights.append(trained(pl_module.policy))


def is_probe(draw: Draw) -> bool:
    return len(draw.prompts[0]) == PROBE_TOKENS


def responses(engine: CopyEngine) -> list[Draw]:
    return [draw for draw in engine.draws if not is_probe(draw)]


def assert_drawn_with(draw: Draw, weights: dict[str, Tensor], *, atol: float = 0.0) -> None:
    for name, value in weights.items():
        torch.testing.assert_close(draw.weights[name], value, rtol=0, atol=atol, msg=name)


def assert_different(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert all(not torch.equal(first[name], value) for name, value in second.items())


@pytest.mark.parametrize(("every_n_steps", "versions"), [(1, [0, 1, 2]), (2, [0, 0, 2])])
def test_responses_come_from_the_weights_of_the_last_push(
    language_model, tokenizer, prompts, tmp_path, every_n_steps: int, versions: list[int]
) -> None:
    engine, snapshots, watcher = CopyEngine(), Snapshots(), Watcher()
    module = build(language_model, tokenizer, engine)
    callbacks = [VLLMWeightSync(every_n_steps), snapshots, watcher]
    run = fit(module, prompts, tmp_path, steps=3, callbacks=callbacks, limit_val_batches=0)
    drawn = responses(engine)
    assert [draw.version for draw in drawn] == versions
    for draw, version in zip(drawn, versions, strict=True):
        assert_drawn_with(draw, snapshots.weights[version])
    assert_different(snapshots.weights[0], snapshots.weights[1])
    assert run.logged_metrics["sync/age"] == 0  # of the last iteration
    assert [phase for phase in watcher.phases if phase][:2] == ["sync", "generate"]
    assert [records[0]["weight_version"] for records in watcher.records] == versions
    for version, experience in zip(versions, watcher.experiences, strict=True):
        assert experience.weight_version is not None
        assert experience.weight_version.unique().tolist() == [version]


def test_validation_draws_with_averaged_weights_and_training_with_the_trained_ones(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    engine, snapshots = CopyEngine(), Snapshots()
    module = build(language_model, tokenizer, engine)
    fit(
        module,
        prompts,
        tmp_path,
        steps=3,
        callbacks=[EMA(decay=0.5, warmup=False), VLLMWeightSync(9), snapshots],
        val_check_interval=1,
        num_sanity_val_steps=0,
        limit_val_batches=2,
    )
    # the average by hand: half of the old one and half of the weights, from the first weights on
    averages = [snapshots.weights[0]]
    for weights in snapshots.weights[1:]:
        averages.append({n: 0.5 * averages[-1][n] + 0.5 * value for n, value in weights.items()})
    drawn = responses(engine)
    assert [draw.greedy for draw in drawn] == [False, True, True] * 3
    for step in range(3):
        training, first, second = drawn[3 * step : 3 * step + 3]
        assert_drawn_with(training, snapshots.weights[step])
        assert_drawn_with(first, averages[step + 1], atol=1e-6)
        assert_drawn_with(second, averages[step + 1], atol=1e-6)
        assert_different(averages[step + 1], snapshots.weights[step + 1])
    # one push for each change between the two kinds, none between two batches of a validation
    assert len(engine.pushed) == 6


class PowerCut(L.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        raise RuntimeError("the power went out")


def test_what_a_run_that_broke_off_left_in_the_engine_is_not_drawn_with(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    # the weights moved on after the push, and both runs begin with step 0
    engine, snapshots = CopyEngine(), Snapshots()
    module = build(language_model, tokenizer, engine)
    callback = VLLMWeightSync()
    with pytest.raises(RuntimeError, match="the power went out"):
        fit(module, prompts, tmp_path, callbacks=[callback, PowerCut()], limit_val_batches=0)
    engine.draws.clear()
    options: dict[str, Any] = {"callbacks": [callback, snapshots], "limit_val_batches": 0}
    fit(module, prompts, tmp_path, steps=1, **options)
    (draw,) = responses(engine)
    assert_drawn_with(draw, snapshots.weights[0])


def test_an_engine_that_is_restarted_between_pushes_has_the_present_weights_and_says_so(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    # the second draw, of iteration 1, fails while the engine has the weights of iteration 0
    engine, snapshots, watcher = CopyEngine(fail={"respond": [2]}), Snapshots(), Watcher()
    module = build(language_model, tokenizer, engine)
    callbacks = [VLLMWeightSync(every_n_steps=2, probe_every=0), snapshots, watcher]
    fit(module, prompts, tmp_path, steps=4, callbacks=callbacks, limit_val_batches=0)
    # and the next push comes two iterations after the restart
    assert [draw.version for draw in engine.draws] == [0, 1, 1, 3]
    for draw in engine.draws:
        assert draw.version is not None
        assert_drawn_with(draw, snapshots.weights[draw.version])
    assert [records[0]["weight_version"] for records in watcher.records] == [0, 1, 1, 3]


def test_the_first_two_pushes_and_every_nth_are_probed(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    engine = CopyEngine()
    module = build(language_model, tokenizer, engine)
    callbacks = [VLLMWeightSync(probe_every=2)]
    fit(module, prompts, tmp_path, steps=5, callbacks=callbacks, limit_val_batches=0)
    assert [draw.version for draw in engine.draws if is_probe(draw)] == [0, 1, 3]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"stale": NORM}, f"other values of the weight {NORM}"),
        ({"keep_caches": True}, r"every weight arrived .* differ .*tolerance is 0\.0001"),
    ],
)
def test_older_weights_or_their_states_stop_the_run(
    language_model, tokenizer, prompts, tmp_path, fault: dict[str, Any], told: str
) -> None:
    watcher = Watcher()
    module = build(language_model, tokenizer, CopyEngine(**fault))
    with pytest.raises(WeightSyncError, match=told):
        fit(module, prompts, tmp_path, callbacks=[VLLMWeightSync(), watcher], limit_val_batches=0)
    # the first push found nothing older
    assert len(watcher.experiences) == 1


def test_the_tolerance_is_that_of_the_engines_precision(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    # bfloat16 rounds log-probabilities by more than 1e-4 and by less than 0.2
    options: dict[str, Any] = {"steps": 1, "limit_val_batches": 0}
    module = build(language_model, tokenizer, CopyEngine(dtype=torch.bfloat16))
    fit(module, prompts, tmp_path, callbacks=[VLLMWeightSync()], **options)
    module = build(language_model, tokenizer, CopyEngine(dtype=torch.bfloat16))
    with pytest.raises(WeightSyncError, match=r"tolerance is 0\.0001"):
        fit(module, prompts, tmp_path, callbacks=[VLLMWeightSync(tolerance=1e-4)], **options)


def test_log_probabilities_that_are_no_number_stop_the_run(
    language_model, tokenizer, prompts, tmp_path, monkeypatch
) -> None:
    engine, nan = CopyEngine(), float("nan")
    monkeypatch.setattr(engine, "probe", lambda: ProbeGap(nan, nan, nan, low_precision=False))
    module = build(language_model, tokenizer, engine)
    with pytest.raises(WeightSyncError, match="differ from the policy's by nan"):
        fit(module, prompts, tmp_path, callbacks=[VLLMWeightSync()])


class Mislabelled(CopyEngine):
    """Says that its weights are older, or newer, than they are."""

    def __init__(self, by: int) -> None:
        super().__init__()
        self._by = by

    def push(self, version: int) -> None:
        super().push(version)
        self._version = version + self._by


@pytest.mark.parametrize(
    ("by", "every_n_steps", "passes"),
    [(-1, 1, False), (-1, 2, True), (1, 3, False)],
)
def test_responses_that_are_too_old_or_from_the_future_stop_the_run(
    language_model, tokenizer, prompts, tmp_path, by: int, every_n_steps: int, passes: bool
) -> None:
    module = build(language_model, tokenizer, Mislabelled(by))
    options: dict[str, Any] = {"steps": 1, "limit_val_batches": 0}
    options["callbacks"] = [VLLMWeightSync(every_n_steps, probe_every=0)]
    if passes:
        fit(module, prompts, tmp_path, **options)
        return
    with pytest.raises(
        WeightSyncError, match=rf"weights {-by} iterations old, and at most {every_n_steps - 1} are"
    ):
        fit(module, prompts, tmp_path, **options)


@pytest.mark.parametrize(
    ("versions", "told"),
    [([3, 3, 4], None), ([3, 2, 4], "weights 2 iterations old"), ([3, 5, 4], "weights -1 iter")],
)
def test_every_token_of_a_response_is_checked(
    language_model, tokenizer, versions: list[int], told: str | None
) -> None:
    module = build(language_model, tokenizer, CopyEngine(concurrent=True), max_staleness=1)
    tokens = torch.tensor([[0, *versions, 0]])
    mask = torch.tensor([[False, True, True, True, False]])
    experience = replace(
        random_experience(rows=1),
        input_ids=tokens,
        response_mask=mask,
        weight_version=torch.tensor([3]),
        token_versions=tokens,
    )
    trainer: Any = SimpleNamespace(global_step=4)
    with nullcontext() if told is None else pytest.raises(WeightSyncError, match=told):
        VLLMWeightSync().on_rollout(trainer, module, experience, [{}])


def test_what_a_push_sent_is_logged_where_an_engine_counts_it(
    language_model, tokenizer, prompts, tmp_path, monkeypatch
) -> None:
    options: dict[str, Any] = {"steps": 1, "limit_val_batches": 0}
    run = fit(
        build(language_model, tokenizer, CopyEngine()),
        prompts,
        tmp_path,
        callbacks=[VLLMWeightSync()],
        **options,
    )
    assert not {"sync/bytes", "sync/full_bytes"} & run.logged_metrics.keys()
    monkeypatch.setattr(CopyEngine, "pushed_bytes", (5, 100))
    engine = EngineWrapper(CopyEngine())
    module = build(language_model, tokenizer, engine)
    run = fit(module, prompts, tmp_path, callbacks=[VLLMWeightSync()], **options)
    assert (run.logged_metrics["sync/bytes"], run.logged_metrics["sync/full_bytes"]) == (5, 100)


def test_an_engine_without_weights_and_options_out_of_range_are_refused(
    language_model, tokenizer, prompts, tmp_path
) -> None:
    module = build(language_model, tokenizer, TransformersEngine())
    with pytest.raises(
        ValueError, match=r"model\.engine is TransformersEngine, which generates with the policy"
    ):
        fit(module, prompts, tmp_path, callbacks=[VLLMWeightSync()])
    for options in ({"every_n_steps": 0}, {"probe_every": -1}, {"tolerance": 0.0}):
        with pytest.raises(ValueError, match=f"VLLMWeightSync {next(iter(options))} is"):
            VLLMWeightSync(**options)


def test_training_draws_nothing_from_what_a_validation_left_in_the_caches(
    language_model, tokenizer, prompts, tmp_path, monkeypatch
) -> None:
    engine = CopyEngine()
    entries: list[str] = []

    def noted(call: str, original: Any, *args: Any) -> Any:
        greedy = call == "_respond" and args[1].temperature == 0
        entries.append("_validate" if greedy else call)
        return original(*args)

    for call in ("_send", "_reset_caches", "_respond"):
        monkeypatch.setattr(engine, call, partial(noted, call, getattr(engine, call)))
    fit(
        build(language_model, tokenizer, engine),
        prompts,
        tmp_path,
        steps=4,
        callbacks=[VLLMWeightSync(every_n_steps=4, probe_every=0)],
        num_sanity_val_steps=0,
        val_check_interval=2,
        limit_val_batches=1,
        check_val_every_n_epoch=None,
    )
    # a validation pushes; after it the same weights go on, without its states, and only once
    push = ["_send", "_reset_caches"]
    assert entries == [
        *[*push, "_respond", "_respond"],
        *[*push, "_validate", "_reset_caches", "_respond", "_respond"],
        *[*push, "_validate"],
    ]
