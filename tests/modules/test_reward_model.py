"""RewardModel on a two-layer model; the step's arithmetic with SGD, where it can be read off."""

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from lrlhf.guard.guard_settings import Guard, TrainingDivergedError
from lrlhf.models import RewardNetwork, ScoreModel
from lrlhf.modules import checks
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.modules.reward_model import RewardModel
from lrlhf.run.supervision import watch
from lrlhf.types import PreferenceBatch, SequenceBatch

NAN = float("nan")
SGD = OptimizerConfig(lr=0.5, optimizer_class="torch.optim.SGD", warmup_steps=0)
Texts = Sequence[str]


@pytest.fixture
def build(model_folder: str) -> Callable[..., RewardModel]:
    def build(heads: Sequence[str] = ("reward",), **options: Any) -> RewardModel:
        L.seed_everything(3, verbose=False)
        options.setdefault("optimizer", SGD)
        return RewardModel(ScoreModel(source=model_folder, heads=list(heads)), **options)

    return build


@pytest.fixture
def collate(tokenizer: PreTrainedTokenizerBase) -> Callable[..., PreferenceBatch]:
    def sequences(texts: Texts, length: int) -> SequenceBatch:
        encoded = tokenizer(
            list(texts), padding="max_length", max_length=length, return_tensors="pt"
        )
        mask = encoded["attention_mask"].bool()
        return SequenceBatch(
            input_ids=encoded["input_ids"], attention_mask=mask, response_mask=mask
        )

    def collate(
        rows: Sequence[tuple[str, str, Sequence[float]]],
        margin: Sequence[float] | None = None,
        padding: tuple[int, int] = (0, 0),
    ) -> PreferenceBatch:
        texts0, texts1, labels = zip(*rows, strict=True)
        return PreferenceBatch(
            candidate0=sequences(texts0, max(map(len, texts0)) + padding[0]),
            candidate1=sequences(texts1, max(map(len, texts1)) + padding[1]),
            labels=torch.tensor(labels),
            margin=None if margin is None else torch.tensor(margin),
            info=tuple({"row": index} for index in range(len(rows))),
        )

    return collate


ROWS = [
    ("abc", "d", [1.0, NAN]),
    ("ef", "ghij", [-1.0, 0.0]),
    ("k", "lm", [0.0, -1.0]),
    ("nopq", "rs", [1.0, 1.0]),
    ("t", "uvw", [NAN, -1.0]),
    ("xy", "z", [-1.0, NAN]),
    ("ab", "cdef", [1.0, 0.0]),
    ("ghi", "j", [1.0, 1.0]),
    ("kl", "m", [-1.0, -1.0]),
    ("n", "opqr", [0.0, 1.0]),
]
ONE_HEAD = [(a, b, labels[:1]) for a, b, labels in ROWS]


def trainer(folder: Path, **options: Any) -> L.Trainer:
    settings = {
        "accelerator": "cpu",
        "logger": False,
        "max_epochs": 1,
        "log_every_n_steps": 1,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
    }
    return L.Trainer(**{**settings, **options})


def loader(batches: Sequence[PreferenceBatch]) -> DataLoader[PreferenceBatch]:
    return DataLoader(list(batches), batch_size=None, num_workers=0)  # type: ignore[arg-type]


def weights(module: RewardModel) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.network.parameters()])


def fit(
    module: RewardModel, batches: Sequence[PreferenceBatch], folder: Path, **options: Any
) -> L.Trainer:
    run = trainer(folder, **options)
    run.fit(module, loader(batches))
    return run


def loss_of(module: RewardModel, batch: PreferenceBatch) -> Tensor:
    scores = module.score_pairs(batch)
    losses = module.objective(*scores, batch.labels, batch.margin)
    return (losses * module.head_weights).sum() / len(batch)


# ---- the process


class Breaks(L.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        raise ValueError("broken")


def test_freed_memory_is_kept_for_as_long_as_a_fit_lasts(
    build, collate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(checks, "keep_host_memory", lambda: calls.append("keep"))
    monkeypatch.setattr(watch, "return_host_memory", lambda: calls.append("return"))
    module, batches = build(), [collate(ONE_HEAD)]

    trainer(tmp_path).validate(module, loader(batches), verbose=False)
    assert calls == []
    fit(module, batches, tmp_path)
    assert calls == ["keep", "return"]
    with pytest.raises(ValueError, match="broken"):
        fit(module, batches, tmp_path, callbacks=[Breaks()])
    assert calls == ["keep", "return", "keep", "return"]


# ---- scores and loss


def test_scores_do_not_depend_on_padding_or_on_the_other_candidate(build, collate) -> None:
    module = build(("a", "b"))
    plain = module.score_pairs(collate(ROWS))
    padded = module.score_pairs(collate(ROWS, padding=(9, 3)))
    torch.testing.assert_close(plain, padded, atol=1e-5, rtol=1e-5)
    alone = module.score_pairs(collate([ROWS[3]]))
    torch.testing.assert_close(plain.candidate0[3], alone.candidate0[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(plain.candidate1[3], alone.candidate1[0], atol=1e-5, rtol=1e-5)


def test_the_order_of_the_candidates_does_not_matter(build, collate) -> None:
    module = build(("a", "b"), tie_weight=0.5, center_coef=0.1)
    flipped = [(b, a, [-label for label in labels]) for a, b, labels in ROWS]
    torch.testing.assert_close(
        loss_of(module, collate(ROWS)), loss_of(module, collate(flipped)), atol=1e-6, rtol=1e-5
    )


def test_the_loss_is_the_mean_over_pairs_of_the_weighted_sum_over_labels(
    build, collate, tmp_path
) -> None:
    module = build(("a", "b"), head_weights={"b": 3.0}, tie_weight=0.5)
    batch = collate(ROWS[:4])
    scores0, scores1 = (scores.tolist() for scores in module.score_pairs(batch))

    def preference(row: int, head: int, sign: int) -> float:
        return math.log1p(math.exp(-sign * (scores0[row][head] - scores1[row][head])))

    def tie(row: int, head: int) -> float:
        return 0.5 * abs(scores0[row][head] - scores1[row][head])

    head_a = preference(0, 0, 1) + preference(1, 0, -1) + tie(2, 0) + preference(3, 0, 1)
    head_b = tie(1, 1) + preference(2, 1, -1) + preference(3, 1, 1)
    run = fit(module, [batch], tmp_path)
    logged = run.callback_metrics["train/loss"]
    assert float(logged) == pytest.approx((head_a + 3 * head_b) / 4, rel=1e-5)


def test_a_head_without_labels_adds_no_gradient(build, collate) -> None:
    module = build(("a", "b"))
    loss_of(module, collate([("abc", "d", [1.0, NAN]), ("e", "fg", [-1.0, NAN])])).backward()
    gradients = {
        name: parameter.grad.abs().sum()
        for name, parameter in module.network.named_parameters()
        if ".heads." in name
    }
    assert {name.split(".heads.")[1][0]: bool(value > 0) for name, value in gradients.items()} == {
        "a": True,
        "b": False,
    }


def test_a_batch_without_any_label_changes_nothing(build, collate, tmp_path) -> None:
    module = build()
    before = weights(module)
    fit(module, [collate([("ab", "c", [NAN]), ("d", "e", [NAN])])], tmp_path)
    assert torch.equal(weights(module), before)
    assert module.skipped_steps == 0


def test_options_reach_the_loss(build, collate) -> None:
    batch = collate(ONE_HEAD)
    plain = loss_of(build(), batch).item()
    for options in (
        {"margin": 0.7},
        {"tie_weight": 0.9},
        {"center_coef": 0.3},
        {"label_smoothing": 0.2},
        {"head_weights": {"reward": 2.0}},
        {"loss": {"bradley_terry": 1.0, "hps": 1.0}},
    ):
        assert abs(loss_of(build(**options), batch).item() - plain) > 1e-3, options


def test_a_margin_of_the_batch_reaches_the_loss(build, collate) -> None:
    module = build(margin=0.7)
    torch.testing.assert_close(
        loss_of(module, collate(ONE_HEAD, margin=[0.0] * 10)),
        loss_of(build(), collate(ONE_HEAD)),
    )


def test_head_weights_must_name_heads(build) -> None:
    with pytest.raises(ValueError, match="names the head 'helpfull'; the heads are a, b"):
        build(("a", "b"), head_weights={"helpfull": 1.0})


def test_a_network_needs_its_tokenizer(model_folder) -> None:
    with pytest.raises(ValueError, match="pass its tokenizer"):
        RewardModel(ScoreModel(source=model_folder).load())


# ---- one step, however it is split


@pytest.mark.parametrize(
    "sizes", [[5, 5], [4, 4, 2], [2, 2, 6], [1] * 10], ids=["even", "ragged", "growing", "single"]
)
def test_accumulated_micro_batches_equal_the_full_batch(build, collate, tmp_path, sizes) -> None:
    whole = build(("a", "b"), tie_weight=0.5, center_coef=0.1)
    fit(whole, [collate(ROWS)], tmp_path)
    parts = build(("a", "b"), tie_weight=0.5, center_coef=0.1)
    start = weights(parts)
    rows = iter(ROWS)
    batches = [collate([next(rows) for _ in range(size)]) for size in sizes]
    fit(parts, batches, tmp_path, accumulate_grad_batches=len(sizes))
    torch.testing.assert_close(weights(parts), weights(whole), atol=2e-5, rtol=1e-4)
    assert (weights(whole) - start).abs().max() > 1e-2


def test_a_short_last_window_is_a_mean_too(build, collate, tmp_path) -> None:
    """Lightning divides by 2 here too, although the epoch's last window has one micro-batch."""
    whole, parts = build(), build()
    fit(whole, [collate(ONE_HEAD[:8]), collate(ONE_HEAD[8:])], tmp_path)
    batches = [collate(ONE_HEAD[:4]), collate(ONE_HEAD[4:8]), collate(ONE_HEAD[8:])]
    run = fit(parts, batches, tmp_path, accumulate_grad_batches=2)
    assert run.global_step == 2
    torch.testing.assert_close(weights(parts), weights(whole), atol=2e-5, rtol=1e-4)


def test_the_gradient_is_clipped_after_it_became_the_mean(build, collate, tmp_path) -> None:
    module = build(
        optimizer=OptimizerConfig(lr=1.0, optimizer_class="torch.optim.SGD", warmup_steps=0)
    )
    before = weights(module)
    batches = [collate(ONE_HEAD[:4]), collate(ONE_HEAD[4:5])]
    run = fit(module, batches, tmp_path, accumulate_grad_batches=2, gradient_clip_val=0.01)
    assert (weights(module) - before).norm() == pytest.approx(0.01, rel=1e-2)
    assert run.callback_metrics["train/grad_norm"] > 0.01


def test_the_logged_norm_is_that_of_the_mean_gradient(build, collate, tmp_path) -> None:
    module = build()
    loss_of(module, collate(ONE_HEAD)).backward()
    expected = math.sqrt(
        sum(float(p.grad.square().sum()) for p in module.network.parameters() if p.grad is not None)
    )
    module.zero_grad()
    batches = [collate(ONE_HEAD[:7]), collate(ONE_HEAD[7:])]
    run = fit(module, batches, tmp_path, accumulate_grad_batches=2)
    assert float(run.callback_metrics["train/grad_norm"]) == pytest.approx(expected, rel=1e-4)


# ---- steps that are not finite


def nan_gradient(chosen: Tensor, rejected: Tensor) -> Tensor:
    """A finite loss, 0, whose gradient is infinity times zero."""
    return ((chosen - rejected) * 0).abs().sqrt()


def test_a_loss_that_is_not_finite_skips_the_step(build, collate, tmp_path) -> None:
    module = build(optimizer=OptimizerConfig(lr=0.1, weight_decay=0.5))
    before = weights(module)
    batch = collate(ONE_HEAD[:2], margin=[float("inf"), 0.0])
    run = fit(module, [batch], tmp_path)
    assert torch.equal(weights(module), before)
    assert module.skipped_steps == 1
    assert run.callback_metrics["train/skipped_steps"] == 1


def test_one_bad_micro_batch_skips_the_whole_step_and_training_goes_on(
    build, collate, tmp_path
) -> None:
    module, clean = build(), build()
    good = collate(ONE_HEAD[4:8])
    bad = collate(ONE_HEAD[:2], margin=[float("inf"), 0.0])
    fit(module, [bad, good, good, good], tmp_path, accumulate_grad_batches=2)
    fit(clean, [good, good], tmp_path, accumulate_grad_batches=2)
    assert module.skipped_steps == 1
    torch.testing.assert_close(weights(module), weights(clean))


def test_a_gradient_that_is_not_finite_skips_the_step(build, collate, tmp_path) -> None:
    module = build(loss=f"{__name__}.nan_gradient")
    before = weights(module)
    fit(module, [collate(ONE_HEAD[:1])], tmp_path)
    assert torch.equal(weights(module), before)
    assert module.skipped_steps == 1


def test_too_many_skipped_steps_stop_the_run(build, collate, tmp_path) -> None:
    module = build(loss=f"{__name__}.nan_gradient", max_skipped_steps=2)
    with pytest.raises(TrainingDivergedError, match=r"3 optimizer steps.*max_skipped_steps is 2"):
        fit(module, [collate(ONE_HEAD[:1])] * 5, tmp_path)


@pytest.mark.parametrize(("window", "stops"), [(2, False), (None, True)])
def test_steps_that_were_left_out_long_ago_do_not_count(
    build, collate, tmp_path, window: int | None, stops: bool
) -> None:
    module = build(guard=Guard(max_skipped=1, window=window, dump=0))
    good = collate(ONE_HEAD[4:8])
    bad = collate(ONE_HEAD[:2], margin=[float("inf"), 0.0])
    ends = pytest.raises(TrainingDivergedError) if stops else contextlib.nullcontext()
    with ends:
        fit(module, [bad, good, bad, good, bad], tmp_path)
    assert module.skipped_steps == (2 if stops else 3)


def test_a_resumed_run_knows_which_steps_were_left_out_of_late(build, collate, tmp_path) -> None:
    bad = collate(ONE_HEAD[:2], margin=[float("inf"), 0.0])
    run = fit(build(guard=Guard(max_skipped=1, window=2)), [bad], tmp_path)
    run.save_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(TrainingDivergedError, match=r"2 optimizer steps .* within 2 steps"):
        trainer(tmp_path, max_epochs=2).fit(
            build(guard=Guard(max_skipped=1, window=2)),
            loader([bad]),
            ckpt_path=tmp_path / "one.ckpt",
        )


# ---- defaults


def test_a_large_gradient_is_clipped_unless_the_trainer_does_it(build, collate, tmp_path) -> None:
    batch = collate(ONE_HEAD)
    distances = []
    for options, trained_with in (
        ({}, {}),
        ({"max_grad_norm": 2.0}, {}),
        ({}, {"gradient_clip_val": 3.0}),
    ):
        module = build(head_weights={"reward": 1e4}, **options)
        before = weights(module)
        fit(module, [batch], tmp_path, **trained_with)
        distances.append(float((weights(module) - before).norm()))
    # SGD goes lr times the gradient's norm
    assert distances == pytest.approx([0.5 * 1.0, 0.5 * 2.0, 0.5 * 3.0], rel=1e-3)


def test_a_bound_of_the_gradient_is_above_zero(build) -> None:
    with pytest.raises(ValueError, match="max_grad_norm is 0"):
        build(max_grad_norm=0.0)


def test_a_run_begins_with_a_warmup_unless_told_otherwise(build) -> None:
    def rates(steps: float, **options: float) -> list[float]:
        built = build(optimizer=OptimizerConfig(**options))._optimizer(steps)
        factor, peak = built.scheduler.lr_lambdas[0], built.scheduler.base_lrs[0]
        return [factor(step) * peak for step in range(5)]

    # 3 % of 100 steps
    warm = [0.25e-4, 0.5e-4, 0.75e-4, 1e-4, 1e-4]
    assert rates(100, lr=1e-4) == pytest.approx(warm)
    assert rates(100, warmup_steps=0) == pytest.approx([1e-5] * 5)
    # of a run without an end there is no share
    assert rates(math.inf) == pytest.approx([1e-5] * 5)


# ---- evaluation


def test_validation_logs_under_eval_and_returns_one_record_per_pair(
    build, collate, tmp_path
) -> None:
    module = build(("a", "b"))
    batch = collate(ROWS)
    scores0, scores1 = module.score_pairs(batch)
    run = trainer(tmp_path)
    seen: list[dict[str, Any]] = []

    class Collect(L.Callback):
        def on_validation_batch_end(self, _t, _m, outputs, _b, _i, dataloader_idx=0) -> None:
            seen.extend(outputs["records"])

    run.callbacks.append(Collect())
    run.validate(module, loader([collate(ROWS[:6]), collate(ROWS[6:])]), verbose=False)
    assert [record["info"]["row"] for record in seen] == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert list(seen[0]) == ["info", "scores0", "scores1"]
    assert list(seen[0]["scores0"]) == ["a", "b"]
    assert seen[9]["scores0"]["b"] == pytest.approx(scores0[9, 1].item(), abs=1e-5)
    right = [
        float((x - y) * label > 0)
        for x, y, row in zip(scores0[:, 0], scores1[:, 0], ROWS, strict=True)
        if (label := row[2][0]) in (1.0, -1.0)
    ]
    metrics = run.callback_metrics
    assert float(metrics["eval/accuracy/a"]) == pytest.approx(sum(right) / len(right))
    assert metrics["eval/accuracy_low"] < metrics["eval/accuracy"] < metrics["eval/accuracy_high"]
    assert float(metrics["eval/loss"]) == pytest.approx(loss_of(module, batch).item(), rel=1e-4)
    for key in ("margin", "calibration_error", "length_correlation", "three_way_accuracy"):
        assert f"eval/{key}/b" in metrics


def test_one_head_logs_without_its_name(build, collate, tmp_path) -> None:
    run = trainer(tmp_path)
    run.validate(build(), loader([collate(ONE_HEAD)]), verbose=False)
    assert {"eval/accuracy", "eval/margin", "eval/tie_threshold"} <= run.callback_metrics.keys()
    assert not any(key.endswith("/reward") for key in run.callback_metrics)


def test_training_metrics_cover_every_pair_since_the_last_log(build, collate, tmp_path) -> None:
    module = build(optimizer=OptimizerConfig(lr=1e-9))
    batches = [collate(ONE_HEAD[:3]), collate(ONE_HEAD[3:])]
    run = fit(module, batches, tmp_path, log_every_n_steps=2)
    metrics = run.callback_metrics
    assert float(metrics["train/loss"]) == pytest.approx(
        loss_of(module, collate(ONE_HEAD)).item(), rel=1e-4
    )
    assert "reward_model/accuracy" in metrics
    assert "reward_model/accuracy_low" not in metrics


def test_pairs_after_the_last_log_are_logged_at_the_end_of_the_epoch(
    build, collate, tmp_path
) -> None:
    run = fit(build(), [collate(ONE_HEAD)], tmp_path, log_every_n_steps=50)
    assert "train/loss" in run.callback_metrics


def test_test_uses_the_tie_threshold_of_the_validation(build, collate, tmp_path) -> None:
    module = build()
    run = trainer(tmp_path)
    run.test(module, loader([collate(ONE_HEAD)]), verbose=False)
    assert "test/three_way_accuracy" not in run.callback_metrics
    run.validate(module, loader([collate(ONE_HEAD)]), verbose=False)
    fitted = module.tie_thresholds.clone()
    run.test(module, loader([collate(ONE_HEAD[:2])]), verbose=False)
    assert "test/three_way_accuracy" in run.callback_metrics
    assert torch.equal(module.tie_thresholds, fitted)


def test_predict_returns_scores(build, collate, tmp_path) -> None:
    module = build()
    batch = collate(ONE_HEAD)
    (output,) = trainer(tmp_path).predict(module, loader([batch]))
    expected = module.score_pairs(batch).candidate1[:, 0].tolist()
    found = [record["scores1"]["reward"] for record in output["records"]]
    assert found == pytest.approx(expected, abs=1e-5)


# ---- checkpoints and export


def test_a_resumed_run_equals_an_uninterrupted_one(build, collate, tmp_path) -> None:
    config = OptimizerConfig(lr=1e-2, schedule="cosine", warmup_steps=1)
    batches = [collate(ONE_HEAD[:5]), collate(ONE_HEAD[5:])]
    whole = build(optimizer=config)

    class SaveHalfWay(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.current_epoch == 1:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    fit(whole, batches, tmp_path, max_epochs=4, callbacks=[SaveHalfWay()])
    again = build(optimizer=config)
    with torch.no_grad():
        for parameter in again.network.parameters():
            parameter.zero_()
    run = trainer(tmp_path, max_epochs=4)
    run.fit(again, loader(batches), ckpt_path=tmp_path / "half.ckpt")
    assert run.global_step == 8
    assert torch.equal(weights(again), weights(whole))


def test_skipped_steps_and_tie_thresholds_survive_a_resume(build, collate, tmp_path) -> None:
    module = build()
    run = fit(module, [collate(ONE_HEAD)], tmp_path)
    module.skipped_steps = 7
    module.tie_thresholds.fill_(0.75)
    run.save_checkpoint(tmp_path / "a.ckpt")
    again = build()
    run = trainer(tmp_path, max_epochs=2)
    run.fit(again, loader([collate(ONE_HEAD)]), ckpt_path=tmp_path / "a.ckpt")
    assert again.skipped_steps == 7
    assert again.tie_thresholds.tolist() == [0.75]


def test_a_checkpoint_builds_the_module_again(build, collate, tmp_path) -> None:
    module = build(("a", "b"), margin=0.25, head_weights={"b": 2.0})
    run = fit(module, [collate(ROWS)], tmp_path)
    run.save_checkpoint(tmp_path / "a.ckpt")
    again = RewardModel.load_from_checkpoint(tmp_path / "a.ckpt")
    assert again.head_names == ("a", "b")
    assert again.optimizer_config == SGD
    assert again.head_weights.tolist() == [1.0, 2.0]
    assert again.objective.margin == 0.25
    assert torch.equal(weights(again), weights(module))


def test_a_checkpoint_of_a_built_network_wants_the_network(
    model_folder, tokenizer, collate, tmp_path
) -> None:
    network = ScoreModel(source=model_folder).load()
    module = RewardModel(network, tokenizer=tokenizer, margin=0.25)
    run = fit(module, [collate(ONE_HEAD)], tmp_path)
    run.save_checkpoint(tmp_path / "a.ckpt")
    again = RewardModel.load_from_checkpoint(
        tmp_path / "a.ckpt",
        model=ScoreModel(source=model_folder, heads=["reward"]).load(),
        tokenizer=tokenizer,
    )
    assert again.objective.margin == 0.25
    assert torch.equal(weights(again), weights(module))


def test_the_export_loads_with_the_same_scores(build, collate, tmp_path) -> None:
    module = build()
    module.export_pretrained(tmp_path / "export")
    batch = collate(ONE_HEAD)
    loaded = RewardNetwork.from_pretrained(tmp_path / "export")
    torch.testing.assert_close(
        loaded(batch.candidate0), module.score_pairs(batch).candidate0, atol=1e-5, rtol=1e-5
    )


def test_what_callbacks_ask_for_is_there(build, tokenizer) -> None:
    module = build(("a", "b"))
    assert module.trainable_models() == {"reward": module.network}
    assert module.head_names == ("a", "b")
    assert module.tokenizer.get_vocab() == tokenizer.get_vocab()


# ---- learning


def test_it_learns_to_prefer_a_token(build, collate, tmp_path) -> None:
    generator = torch.Generator().manual_seed(5)

    def pair() -> tuple[str, str, list[float]]:
        letters = [chr(97 + int(i)) for i in torch.randint(0, 26, (10,), generator=generator)]
        good, bad = [*letters[:5], "!"], [*letters[5:], "?"]
        order = torch.randperm(6, generator=generator).tolist()
        texts = ["".join(text[i] for i in order) for text in (good, bad)]
        first = bool(torch.rand((), generator=generator) < 0.5)
        return (texts[0], texts[1], [1.0]) if first else (texts[1], texts[0], [-1.0])

    module = build(optimizer=OptimizerConfig(lr=3e-3))
    batches = [collate([pair() for _ in range(32)]) for _ in range(60)]
    fit(module, batches, tmp_path)
    run = trainer(tmp_path)
    run.validate(module, loader([collate([pair() for _ in range(200)])]), verbose=False)
    assert run.callback_metrics["eval/accuracy_low"] > 0.9


# ---- two processes


class PerRank(Dataset[PreferenceBatch]):
    """Gives each rank its own batches."""

    def __init__(self, *batches: Sequence[PreferenceBatch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches[0])

    def __getitem__(self, index: int) -> PreferenceBatch:
        return self.batches[torch.distributed.get_rank()][index]


def on_two_ranks(folder: Path, **options: Any) -> L.Trainer:
    return trainer(folder, strategy="ddp_fork", devices=2, use_distributed_sampler=False, **options)


def per_rank(*batches: Sequence[PreferenceBatch]) -> DataLoader[PreferenceBatch]:
    return DataLoader(PerRank(*batches), batch_size=None, num_workers=0)


@pytest.mark.slow
def test_two_ranks_of_different_size_equal_one_process(build, collate, tmp_path) -> None:
    whole, parts = build(("a", "b"), tie_weight=0.5), build(("a", "b"), tie_weight=0.5)
    alone = fit(whole, [collate(ROWS)], tmp_path)
    ranks = per_rank(
        [collate(ROWS[:4]), collate(ROWS[4:6])], [collate(ROWS[6:7]), collate(ROWS[7:])]
    )
    run = on_two_ranks(tmp_path, accumulate_grad_batches=2)
    run.fit(parts, ranks)
    torch.testing.assert_close(weights(parts), weights(whole), atol=2e-5, rtol=1e-4)
    for key in (
        "train/loss",
        "train/grad_norm",
        "reward_model/accuracy",
        "reward_model/score_std/a",
    ):
        expected = float(alone.callback_metrics[key])
        assert float(run.callback_metrics[key]) == pytest.approx(expected, rel=1e-4), key


@pytest.mark.slow
def test_a_bad_loss_on_one_rank_skips_the_step_on_both(build, collate, tmp_path) -> None:
    module = build()
    before = weights(module)
    bad = collate(ONE_HEAD[:1], margin=[float("inf")])
    run = on_two_ranks(tmp_path)
    run.fit(module, per_rank([collate(ONE_HEAD[:1], margin=[0.0])], [bad]))
    assert torch.equal(weights(module), before)
    assert run.callback_metrics["train/skipped_steps"] == 1


@pytest.mark.slow
def test_validation_counts_the_pairs_of_both_ranks(build, collate, tmp_path) -> None:
    module = build()
    alone, both = trainer(tmp_path), on_two_ranks(tmp_path)
    alone.validate(module, loader([collate(ONE_HEAD)]), verbose=False)
    ranks = per_rank([collate(ONE_HEAD[:7])], [collate(ONE_HEAD[7:])])
    both.validate(module, ranks, verbose=False)
    for key, value in alone.callback_metrics.items():
        assert float(both.callback_metrics[key]) == pytest.approx(float(value), rel=1e-4), key
