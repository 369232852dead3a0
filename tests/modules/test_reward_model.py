"""RewardModel on a two-layer model; the step's arithmetic with SGD, where it can be read off."""

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader, Dataset

from lrlhf import Trainer
from lrlhf.datamodules import PreferenceDataModule
from lrlhf.loggers import ResumingCSVLogger
from lrlhf.models import ScoreModel
from lrlhf.modules import Guard, checks
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.modules.reward_model import RewardModel
from lrlhf.run.supervision import watch
from lrlhf.types import PreferenceBatch
from tests.modules.reward_runs import (
    INF,
    ONE_HEAD,
    ROWS,
    SGD,
    fit_pairs,
    flat_weights,
    loader,
    loss_of,
    trainer,
)


@pytest.fixture
def build(reward_model):
    return reward_model


def run_pairs(module: RewardModel, batches: Any, folder: Path, **options: Any) -> dict[str, float]:
    """What a fit logged."""
    metrics = fit_pairs(module, batches, folder, **options).callback_metrics
    return {name: float(value) for name, value in metrics.items()}


def assert_close(first: RewardModel, second: RewardModel) -> None:
    torch.testing.assert_close(flat_weights(first), flat_weights(second), atol=2e-5, rtol=1e-4)


# ---- the process


def test_freed_memory_is_kept_for_as_long_as_a_fit_lasts(
    build, collate, tmp_path, monkeypatch
) -> None:
    def breaks(*_: Any) -> None:
        calls.append("break")
        raise ValueError("broken")

    calls: list[str] = []
    monkeypatch.setattr(checks, "keep_host_memory", lambda: calls.append("keep"))
    monkeypatch.setattr(watch, "return_host_memory", lambda: calls.append("return"))
    module, batches = build(), [collate(ONE_HEAD)]
    trainer(tmp_path).validate(module, loader(batches), verbose=False)
    assert calls == []
    with pytest.raises(ValueError, match="broken"):
        fit_pairs(module, batches, tmp_path, callbacks=[LambdaCallback(on_train_batch_end=breaks)])
    assert calls == ["keep", "break", "return"]


def test_a_copy_on_a_device_keeps_hold_of_the_batch_in_main_memory(collate) -> None:
    batch = collate(ROWS)
    copy = batch.to("meta")
    assert copy.labels.is_meta
    assert copy.host.labels is batch.labels
    assert copy.host.candidate0 is batch.candidate0
    assert copy.to("meta").host is copy.host
    assert batch.to("cpu").host is None


# ---- scores and loss


def test_scores_do_not_depend_on_padding_or_on_the_other_candidate(build, collate) -> None:
    module = build(("a", "b"))
    plain = module.score_pairs(collate(ROWS))
    padded = module.score_pairs(collate(ROWS, padding=(9, 3)))
    torch.testing.assert_close(plain, padded, atol=1e-5, rtol=1e-5)
    alone = module.score_pairs(collate([ROWS[3]]))
    for together, single in zip(plain, alone, strict=True):
        torch.testing.assert_close(together[3], single[0], atol=1e-5, rtol=1e-5)


def test_the_loss_is_the_mean_over_pairs_of_the_weighted_sum_over_labels(
    build, collate, tmp_path
) -> None:
    module = build(("a", "b"), head_weights={"b": 3.0}, tie_weight=0.5)
    batch = collate(ROWS[:4])
    a, b = (module.score_pairs(batch)[0] - module.score_pairs(batch)[1]).T.tolist()

    def wins(gap: float) -> float:
        return math.log1p(math.exp(-gap))

    head_a = wins(a[0]) + wins(-a[1]) + 0.5 * abs(a[2]) + wins(a[3])
    head_b = 0.5 * abs(b[1]) + wins(-b[2]) + wins(b[3])
    expected = (head_a + 3 * head_b) / 4
    assert run_pairs(module, [batch], tmp_path)["train/loss"] == pytest.approx(expected, rel=1e-5)


def test_the_speed_of_a_step_counts_both_candidates_without_padding(
    build, collate, tmp_path
) -> None:
    logged = run_pairs(build(), [collate(ONE_HEAD[:2], padding=(9, 3))], tmp_path)
    # abc and d, ef and ghij
    tokens = logged["perf/update_tokens_per_s"] * logged["perf/update_s"]
    assert tokens == pytest.approx(3 + 1 + 2 + 4, rel=1e-4)
    assert "perf/mfu" not in logged  # the peak of a CPU is not known


def test_options_reach_the_loss(build, collate) -> None:
    batch = collate(ONE_HEAD)
    plain = loss_of(build(), batch)
    numbers = {"margin": 0.7, "tie_weight": 0.9, "center_coef": 0.3, "label_smoothing": 0.2}
    others = {"head_weights": {"reward": 2.0}, "loss": {"bradley_terry": 1.0, "hps": 1.0}}
    for name, value in (numbers | others).items():
        assert abs(loss_of(build(**{name: value}), batch) - plain) > 1e-3, name
    own = loss_of(build(margin=0.7), collate(ONE_HEAD, margin=[0.0] * 10))
    torch.testing.assert_close(own, plain)


def test_what_cannot_be_is_refused(build, model_folder) -> None:
    with pytest.raises(ValueError, match="names the head 'helpfull'; the heads are a, b"):
        build(("a", "b"), head_weights={"helpfull": 1.0})
    with pytest.raises(ValueError, match="max_grad_norm is 0"):
        build(max_grad_norm=0.0)
    with pytest.raises(ValueError, match="pass its tokenizer"):
        RewardModel(ScoreModel(source=model_folder).load())
    with pytest.raises(ValueError, match=r"guard.max_kl is about a policy's responses"):
        build(guard=Guard(max_kl=1.0))


# ---- one step, however it is split


def test_accumulated_micro_batches_equal_the_full_batch(build, collate, tmp_path) -> None:
    whole, parts = (build(("a", "b"), tie_weight=0.5, center_coef=0.1) for _ in range(2))
    start = flat_weights(parts)
    alone = run_pairs(whole, [collate(ROWS)], tmp_path)
    batches = [collate(ROWS[rows]) for rows in (slice(2), slice(2, 4), slice(4, 10))]
    logged = run_pairs(parts, batches, tmp_path, accumulate_grad_batches=3)
    assert_close(parts, whole)
    assert (flat_weights(whole) - start).abs().max() > 1e-2
    for key in ("train/loss", "train/grad_norm", "reward_model/accuracy/a"):
        assert logged[key] == pytest.approx(alone[key], rel=1e-4)


def test_too_few_micro_batches_at_the_end_of_an_epoch_are_a_mean_too(
    build, collate, tmp_path
) -> None:
    """Lightning divides by 2 here too, although the last step has one micro-batch."""
    # not clipped, which would hide a wrong scale
    gentle = replace(SGD, lr=0.05)
    whole, parts = (build(max_grad_norm=math.inf, optimizer=gentle) for _ in range(2))
    fit_pairs(whole, [collate(ONE_HEAD[:8]), collate(ONE_HEAD[8:])], tmp_path)
    batches = [collate(ONE_HEAD[rows]) for rows in (slice(4), slice(4, 8), slice(8, 10))]
    run = fit_pairs(parts, batches, tmp_path, accumulate_grad_batches=2)
    assert run.global_step == 2
    assert_close(parts, whole)


def test_the_mean_gradient_is_clipped_unless_the_trainer_does_it(build, collate, tmp_path) -> None:
    # ragged, so that the sum of what Lightning has divided is no mean
    batches = [collate(ONE_HEAD[:7]), collate(ONE_HEAD[7:])]
    for options, trained_with, bound in (
        ({}, {}, 1.0),
        ({"max_grad_norm": 2.0}, {}, 2.0),
        ({}, {"gradient_clip_val": 3.0}, 3.0),
    ):
        module = build(head_weights={"reward": 1e4}, **options)
        parameters = list(module.network.parameters())
        gradients = torch.autograd.grad(
            loss_of(module, collate(ONE_HEAD)), parameters, allow_unused=True
        )
        norm = torch.cat([one.flatten() for one in gradients if one is not None]).norm()
        before = flat_weights(module)
        logged = run_pairs(module, batches, tmp_path, accumulate_grad_batches=2, **trained_with)
        assert logged["train/grad_norm"] == pytest.approx(float(norm), rel=1e-3)
        # SGD goes lr times the gradient's norm
        distance = float((flat_weights(module) - before).norm())
        assert distance == pytest.approx(0.5 * bound, rel=1e-3)


def test_a_run_begins_with_a_warmup_unless_told_otherwise(build) -> None:
    def rates(steps: float, **options: float) -> list[float]:
        built = build(optimizer=OptimizerConfig(**options)).built_optimizer(steps)
        factor, peak = built.scheduler.lr_lambdas[0], built.scheduler.base_lrs[0]
        return [factor(step) * peak for step in range(4)]

    # 3 % of 100 steps; of a run without an end there is no share
    assert rates(100, lr=1e-4) == pytest.approx([0.25e-4, 0.5e-4, 0.75e-4, 1e-4])
    assert rates(100, warmup_steps=0) == rates(math.inf) == pytest.approx([1e-5] * 4)


# ---- evaluation


class Collect(L.Callback):
    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def on_validation_batch_end(self, _t, _m, outputs, _b, _i, dataloader_idx=0) -> None:
        self.records.extend(outputs["records"])


def test_validation_logs_under_eval_and_returns_one_record_per_pair(
    build, collate, tmp_path
) -> None:
    module, batch, collects = build(("a", "b")), collate(ROWS), Collect()
    scores0, scores1 = module.score_pairs(batch)
    run = trainer(tmp_path, callbacks=[collects])
    batches = [collate(ROWS[:6]), collate(ROWS[6:])]
    run.validate(module, loader(batches), verbose=False)
    seen = collects.records
    assert [record["info"]["row"] for record in seen] == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert list(seen[0]) == [
        *("prompt", "candidate0", "candidate1"),
        *("labels", "scores0", "scores1", "margins", "head_weights", "margin", "prompt_id", "info"),
    ]
    assert list(seen[0]["scores0"]) == ["a", "b"]
    assert seen[9]["scores0"]["b"] == pytest.approx(scores0[9, 1].item(), abs=1e-5)
    labels = batch.labels[:, 0]
    right = ((scores0 - scores1)[:, 0] * labels > 0)[labels.abs() == 1].float().mean()
    metrics = run.callback_metrics
    assert float(metrics["eval/accuracy/a"]) == pytest.approx(float(right))
    assert metrics["eval/accuracy_low"] < metrics["eval/accuracy"] < metrics["eval/accuracy_high"]
    assert float(metrics["eval/loss"]) == pytest.approx(loss_of(module, batch).item(), rel=1e-4)
    for key in ("margin", "calibration_error", "length_correlation", "three_way_accuracy"):
        assert f"eval/{key}/b" in metrics
    predicted = trainer(tmp_path).predict(module, loader(batches))
    assert [row for rows in predicted for row in rows] == seen


def test_the_evaluation_before_training_is_logged_and_its_file_holds_what_the_loss_needs(
    build, tokenizer, tmp_path
) -> None:
    rows = [
        {"prompt": f"p{n // 2}", "candidate0": f"a{n}", "candidate1": f"bb{n}", "label": label}
        | {"margin": 0.25 * n}
        for n, label in enumerate(["A", "B", "Equal", "A", "B", "A"])
    ]
    data = PreferenceDataModule(train=rows, val=rows, batch_size=3, tokenizer=tokenizer)
    module = build(("score",), tie_weight=0.5, loss="log_exp")
    other = Rows()
    run = Trainer(
        default_root_dir=tmp_path, max_steps=1, num_sanity_val_steps=-1, accelerator="cpu",
        logger=[ResumingCSVLogger(tmp_path), other], enable_progress_bar=False,
    )  # fmt: skip
    run.fit(module, data)
    with (tmp_path / "metrics.csv").open() as file:
        logged = list(csv.DictReader(file))
    assert [(row["step"], bool(row["eval/loss"])) for row in logged[:2]] == [
        ("0", True),
        ("1", False),
    ]
    assert next(step for step, metrics in other.rows if "eval/loss" in metrics) == 0

    lines = (tmp_path / "eval_scores_0.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    losses = []
    for record in records:
        label = record["labels"]["score"]
        gap = record["scores0"]["score"] - record["scores1"]["score"]
        preferred = math.log1p(math.exp(-(label * gap - record["margin"])))
        loss = preferred if label else 0.5 * abs(gap)
        losses.append(record["head_weights"]["score"] * loss)
    assert [record["margin"] for record in records] == [0.25 * n for n in range(6)]
    assert float(logged[0]["eval/loss"]) == pytest.approx(sum(losses) / 6, rel=1e-5)
    ids = [record["prompt_id"] for record in records]
    assert ids[::2] == ids[1::2]
    assert len({*ids}) == 3


class Rows(Logger):
    """A logger that keeps what it is given."""

    name = version = "rows"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, metrics))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


@pytest.mark.parametrize("every", [2, 50])  # 50: at the end of the epoch
def test_training_metrics_cover_every_pair_since_the_last_log(
    build, collate, tmp_path, every: int
) -> None:
    batches = [collate(ONE_HEAD[:3]), collate(ONE_HEAD[3:])]
    module = build(optimizer=OptimizerConfig(lr=1e-9))
    logged = run_pairs(module, batches, tmp_path, log_every_n_steps=every)
    expected = loss_of(module, collate(ONE_HEAD)).item()
    assert logged["train/loss"] == pytest.approx(expected, rel=1e-4)
    assert "reward_model/accuracy" in logged
    assert "reward_model/accuracy_low" not in logged


def test_test_uses_the_tie_threshold_of_the_validation(build, collate, tmp_path) -> None:
    module = build()
    run = trainer(tmp_path)
    run.test(module, loader([collate(ONE_HEAD)]), verbose=False)
    assert "test/three_way_accuracy" not in run.callback_metrics
    run.validate(module, loader([collate(ONE_HEAD)]), verbose=False)
    # one head logs without its name
    assert {"eval/accuracy", "eval/margin", "eval/tie_threshold"} <= run.callback_metrics.keys()
    assert not any(key.endswith("/reward") for key in run.callback_metrics)
    fitted = module.tie_thresholds.clone()
    run.test(module, loader([collate(ONE_HEAD[:2])]), verbose=False)
    assert "test/three_way_accuracy" in run.callback_metrics
    assert torch.equal(module.tie_thresholds, fitted)


# ---- checkpoints and export


def test_a_resumed_run_equals_an_uninterrupted_one(build, collate, tmp_path) -> None:
    config = OptimizerConfig(lr=1e-2, schedule="cosine", warmup_steps=1)
    batches = [collate(ONE_HEAD[:5]), collate(ONE_HEAD[5:])]
    half = tmp_path / "half.ckpt"

    def save_half_way(trainer: L.Trainer, module: RewardModel) -> None:
        if trainer.current_epoch == 1:
            module.step_guard.skipped = 7
            trainer.save_checkpoint(half)

    pending: list[int] = []

    def count(_: L.Trainer, module: RewardModel) -> None:
        pending.append(len(module.train_metrics.seen()["pairs"]))

    options: dict[str, Any] = {"max_epochs": 4, "log_every_n_steps": 3}
    whole, again = build(optimizer=config), build(optimizer=config)
    saves = LambdaCallback(on_train_epoch_end=save_half_way)
    counts = LambdaCallback(on_train_start=count)
    fit_pairs(whole, batches, tmp_path, callbacks=[saves], **options)
    torch.nn.utils.vector_to_parameters(
        torch.zeros_like(flat_weights(again)), again.network.parameters()
    )
    run = fit_pairs(again, batches, tmp_path, ckpt=half, callbacks=[counts], **options)
    assert run.global_step == 8
    assert pending == [5]  # of the fourth step, which had not been logged
    assert again.step_guard.skipped == 7
    assert torch.equal(flat_weights(again), flat_weights(whole))


def test_a_checkpoint_builds_the_module_again(
    build, model_folder, tokenizer, collate, tmp_path
) -> None:
    module = build(("a", "b"), margin=0.25, head_weights={"b": 2.0}, seed=5)
    module.tie_thresholds.fill_(0.75)
    fit_pairs(module, [collate(ROWS)], tmp_path).save_checkpoint(tmp_path / "a.ckpt")
    assert {"guard", "pairs"} == torch.load(tmp_path / "a.ckpt")["lrlhf"].keys()
    again = RewardModel.load_from_checkpoint(tmp_path / "a.ckpt")
    assert again.head_names == ("a", "b")
    assert again.optimizer_config == SGD
    assert again.head_weights.tolist() == [1.0, 2.0]
    assert (again.objective.margin, again.seed) == (0.25, 5)
    assert again.tie_thresholds.tolist() == [0.75, 0.75]
    assert torch.equal(flat_weights(again), flat_weights(module))
    # one that was built already is not in the checkpoint's options
    read = {"tokenizer": tokenizer}
    network = ScoreModel(source=model_folder).load()
    built = RewardModel(network, margin=0.25, optimizer=SGD, **read)
    fit_pairs(built, [collate(ONE_HEAD)], tmp_path).save_checkpoint(tmp_path / "b.ckpt")
    network = ScoreModel(source=model_folder, heads=["reward"]).load()
    again = RewardModel.load_from_checkpoint(tmp_path / "b.ckpt", model=network, **read)
    assert again.objective.margin == 0.25
    assert torch.equal(flat_weights(again), flat_weights(built))


# ---- two processes


class PerRank(Dataset[PreferenceBatch]):
    """Gives each rank its own batches."""

    def __init__(self, *batches: Sequence[PreferenceBatch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches[0])

    def __getitem__(self, index: int) -> PreferenceBatch:
        return self.batches[torch.distributed.get_rank()][index]


def per_rank(*batches: Sequence[PreferenceBatch]) -> DataLoader[PreferenceBatch]:
    return DataLoader(PerRank(*batches), batch_size=None, num_workers=0)


@pytest.mark.slow
def test_two_ranks_of_different_size_equal_one_process(build, collate, tmp_path) -> None:
    whole, parts = build(("a", "b"), tie_weight=0.5), build(("a", "b"), tie_weight=0.5)
    alone = fit_pairs(whole, [collate(ROWS)], tmp_path)
    alone.validate(whole, loader([collate(ROWS)]), verbose=False)
    good = [collate(ROWS[:4]), collate(ROWS[4:6])], [collate(ROWS[6:7]), collate(ROWS[7:])]
    # then a step with a bad loss on one rank, which both leave out
    bad = [collate(ROWS[:1], margin=[margin]) for margin in (0.0, INF)]
    ranks = {"strategy": "ddp_fork", "devices": 2, "use_distributed_sampler": False}
    run = trainer(tmp_path, accumulate_grad_batches=2, **ranks)
    batches = [[*both, one, one] for both, one in zip(good, bad, strict=True)]
    run.fit(parts, per_rank(*batches), per_rank(*good))
    assert_close(parts, whole)
    for key, expected in alone.callback_metrics.items():
        if key.startswith("eval/"):
            found = float(run.callback_metrics[key])
            assert found == pytest.approx(float(expected), rel=1e-3, abs=1e-4), key
    assert run.callback_metrics["train/skipped_steps"] == 1
