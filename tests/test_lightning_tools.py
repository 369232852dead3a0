"""Lightning's callbacks and tools on a reward model and a policy: each works or says why not."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.profilers import AdvancedProfiler, SimpleProfiler
from lightning.pytorch.tuner.tuning import Tuner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lrlhf import Trainer
from lrlhf.datamodules import (
    PreferenceDataModule,
    PromptDataModule,
    StepwiseDataModule,
    SupervisedDataModule,
)
from lrlhf.modules import DPO, RLOO, SFT, ProcessRewardModel, RewardModel
from tests.matrices import few_of

Fit = Callable[..., "Run"]
STEPS = {"max_steps": 2, "max_epochs": None}
EVERY_STEP = {"val_check_interval": 1, "check_val_every_n_epoch": None}
RATE = 1e-2


def build(kind: str, model_folder: str) -> tuple[Any, L.LightningDataModule]:
    """Four batches of two rows."""
    numbers = range(8)
    if kind == "reward":
        pairs = [{"prompt": f"{n}", "chosen": f"{n + 1}", "rejected": f"{n}"} for n in numbers]
        return (
            RewardModel(model_folder, optimizer={"lr": RATE}),
            PreferenceDataModule(pairs, val=pairs[:2], batch_size=2),
        )
    prompts = [{"prompt": f"{n} + 1 =", "answer": f"{n + 1}"} for n in numbers]
    module = RLOO(
        model_folder,
        {"functions": ["repetition_penalty"]},
        num_generations=2,
        sampling={"max_new_tokens": 4},
        optimizer={"lr": RATE},
    )
    return module, PromptDataModule(prompts, val=prompts[:2], batch_size=2)


class Watch(L.Callback):
    """Keeps weights, batches and modes of torch."""

    def __init__(self) -> None:
        self.epochs: list[Tensor] = []
        self.steps: list[Tensor] = []
        self.batches: list[str] = []
        self.anomaly = self.inference = False

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.epochs.append(weights(pl_module))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, *_: Any
    ) -> None:
        self.anomaly = torch.is_anomaly_enabled()
        ids = batch.candidate0.input_ids if hasattr(batch, "candidate0") else batch.input_ids
        self.batches.append(str(ids.tolist()))

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        self.steps.append(weights(pl_module))

    def on_validation_batch_start(self, *_: Any) -> None:
        self.inference = torch.is_inference_mode_enabled()


class Run:
    """A trainer that has trained."""

    def __init__(self, trainer: L.Trainer, module: Any, watch: Watch) -> None:
        self.trainer, self.module, self.watch = trainer, module, watch

    @property
    def rows(self) -> list[dict[str, str]]:
        path = Path(str(self.trainer.default_root_dir)) / "metrics.csv"
        with path.open() as handle:
            return list(csv.DictReader(handle))


def weights(module: Any) -> Tensor:
    (model,) = module.trainable_models().values()
    return torch.cat([weight.detach().flatten().clone() for weight in model.parameters()])


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=few_of(["reward", "rloo"], ["rloo"]))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fit(kind: str, model_folder: str) -> Fit:
    def fit(*callbacks: L.Callback, trainer: type[L.Trainer] = Trainer, **options: Any) -> Run:
        watch = Watch()
        settings: dict[str, Any] = {
            "accelerator": "cpu",
            "default_root_dir": "run",
            "enable_progress_bar": False,
            "num_sanity_val_steps": 0,
            "callbacks": [watch, *callbacks],
            **STEPS,
        }
        if trainer is Trainer:
            settings["default_callbacks"] = False
        run = trainer(**(settings | options))
        module, data = build(kind, model_folder)
        run.fit(module, datamodule=data)
        return Run(run, module, watch)

    return fit


@pytest.fixture
def metric(kind: str) -> str:
    return {"reward": "eval/accuracy", "rloo": "eval/score"}[kind]


def test_model_checkpoint_ranks_by_a_metric(fit: Fit, metric: str) -> None:
    saver = ModelCheckpoint("best", monitor=metric, mode="max", save_top_k=2)
    fit(saver, **EVERY_STEP)
    assert len(list(Path("best").iterdir())) == 2
    assert saver.best_model_score == max(saver.best_k_models.values())


def test_early_stopping_stops(fit: Fit, metric: str) -> None:
    # no evaluation is a hundred better than the one before
    stop = EarlyStopping(monitor=metric, mode="max", patience=1, min_delta=100.0)
    assert fit(stop, max_steps=4, **EVERY_STEP).trainer.global_step == 2


def test_learning_rates_are_logged(fit: Fit) -> None:
    rows = fit(LearningRateMonitor(), logger=True).rows
    names = [name for name in rows[0] if name.startswith("lr-AdamW")]
    assert names
    assert any(row[names[0]] for row in rows)


@pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch")
def test_swa_leaves_the_mean_of_the_epochs(fit: Fit) -> None:
    average = StochasticWeightAveraging(swa_lrs=RATE, swa_epoch_start=1)
    run = fit(average, max_steps=-1, max_epochs=2)
    mean = torch.stack(run.watch.epochs).mean(0)
    torch.testing.assert_close(weights(run.module), mean)
    assert not torch.equal(weights(run.module), run.watch.steps[-1])


def test_swa_needs_a_number_of_epochs_or_a_whole_number(fit: Fit) -> None:
    with pytest.raises(Exception, match="provide `swa_epoch_start` as an integer"):
        fit(StochasticWeightAveraging(swa_lrs=RATE), max_epochs=-1)


def test_weight_averaging_leaves_the_mean_of_the_steps(fit: Fit) -> None:
    run = fit(WeightAveraging())
    mean = torch.stack(run.watch.steps).mean(0)
    torch.testing.assert_close(weights(run.module), mean)
    assert not torch.equal(weights(run.module), run.watch.steps[-1])


def test_ema_weight_averaging_leaves_the_moving_average(fit: Fit) -> None:
    run = fit(EMAWeightAveraging(decay=0.75))
    first, second = run.watch.steps
    torch.testing.assert_close(weights(run.module), 0.75 * first + 0.25 * second)


@pytest.mark.parametrize("bound", ["callback", "option"])
def test_time_ends_a_run(fit: Fit, bound: str) -> None:
    over = "00:00:00:00"
    run = fit(Timer(over)) if bound == "callback" else fit(max_time=over)
    assert run.trainer.global_step == 0


def test_statistics_of_the_device_are_logged(fit: Fit) -> None:
    rows = fit(DeviceStatsMonitor(cpu_stats=True), logger=True).rows
    assert any("cpu_percent" in name for name in rows[0])


@pytest.mark.parametrize("bar", [RichProgressBar, TQDMProgressBar])
def test_a_progress_bar_takes_the_place_of_ours(
    fit: Fit, bar: type[L.Callback], capsys: pytest.CaptureFixture[str]
) -> None:
    run = fit(bar(), default_callbacks=True, enable_progress_bar=True, enable_checkpointing=False)
    assert type(run.trainer.progress_bar_callback) is bar
    assert "Epoch 0" in "".join(capsys.readouterr())


@pytest.mark.parametrize("profiler", [SimpleProfiler, AdvancedProfiler])
def test_a_profiler_has_the_training_step(fit: Fit, profiler: type[Any]) -> None:
    fit(profiler=profiler(dirpath="profile", filename="fit"))
    (report,) = Path("profile").iterdir()
    assert "training_step" in report.read_text()


def test_a_fast_run_takes_one_step(fit: Fit) -> None:
    assert fit(fast_dev_run=True, max_steps=9).trainer.global_step == 1


def test_overfitting_repeats_its_batches(fit: Fit) -> None:
    batches = fit(overfit_batches=1, max_steps=3).watch.batches
    assert len(batches) == 3
    assert len(set(batches)) == 1


def test_an_epoch_can_be_limited(fit: Fit) -> None:
    run = fit(limit_train_batches=3, max_steps=-1, max_epochs=1)
    assert run.trainer.global_step == 3


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("on", [True, False])
def test_anomaly_detection_is_on_in_the_step(fit: Fit, on: bool) -> None:
    assert fit(detect_anomaly=on).watch.anomaly is on


@pytest.mark.parametrize("on", [True, False])
def test_inference_mode_can_be_left_out(fit: Fit, on: bool) -> None:
    run = fit(inference_mode=on)
    assert not run.watch.inference  # fit has no validation here
    run.trainer.validate(run.module, datamodule=run.trainer.datamodule, verbose=False)
    assert run.watch.inference is on


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
def test_barebones_is_for_lightnings_trainer(fit: Fit) -> None:
    with pytest.raises(ValueError, match=r"^barebones allows no logger .* take lightning\.Trainer"):
        fit(barebones=True)
    bare: dict[str, Any] = {"enable_progress_bar": None, "num_sanity_val_steps": None}
    assert fit(trainer=L.Trainer, barebones=True, **bare).trainer.global_step == 2


def tuner(**options: Any) -> Tuner:
    settings = {"accelerator": "cpu", "default_root_dir": "run", "enable_progress_bar": False}
    return Tuner(Trainer(**settings, default_callbacks=False, max_epochs=20, **options))


LEARNERS = ["reward", "dpo", "sft", "process"]


def learner(kind: str, model_folder: str, lr: float = RATE) -> tuple[Any, Any]:
    """Eight rows in batches of two, for a module that trains one model on given rows."""
    numbers, rate = range(8), {"lr": lr}
    if kind == "dpo":
        _, data = build("reward", model_folder)
        return DPO(model_folder, optimizer=rate), data
    if kind == "reward":
        return RewardModel(model_folder, optimizer=rate), build(kind, model_folder)[1]
    if kind == "sft":
        rows: Any = [{"prompt": f"{n}", "completion": f"{n + 1}"} for n in numbers]
        return SFT(model_folder, optimizer=rate), SupervisedDataModule(rows, batch_size=2)
    steps = [{"prompt": f"{n}", "completions": ["a", "b"], "labels": [1, n % 2]} for n in numbers]
    return ProcessRewardModel(model_folder, optimizer=rate), StepwiseDataModule(steps, batch_size=2)


def rates_of(module: Any, data: Any, *callbacks: L.Callback) -> list[float]:
    """The learning rate of each of 16 steps."""
    kept = Rates()
    settings: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "logger": False}
    settings["enable_checkpointing"] = False
    trainer = Trainer(
        **settings, default_callbacks=False, max_epochs=4, callbacks=[kept, *callbacks]
    )
    trainer.fit(module, datamodule=data)
    return kept.rates


class Rates(L.Callback):
    """Keeps the learning rate of each step."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize("learns", LEARNERS)
def test_a_learning_rate_is_found_and_acts(learns: str, model_folder: str) -> None:
    module, data = learner(learns, model_folder)
    before = weights(module)
    search = tuner().lr_find(module, datamodule=data, min_lr=1e-6, max_lr=1e-2, num_training=20)
    assert search is not None
    rates, losses = search.results["lr"], search.results["loss"]
    assert rates[0] == pytest.approx(1e-6)
    assert len(losses) == 20
    assert all(map(math.isfinite, losses))
    found = search.suggestion()
    assert 1e-6 < found <= rates[-1] <= 1e-2
    assert module.lr == module.optimizer.lr == found
    torch.testing.assert_close(weights(module), before, rtol=0, atol=0)
    assert max(rates_of(module, data)) == pytest.approx(found)
    kept = module.hparams["optimizer"]["init_args"]["lr"]
    assert kept == found  # a checkpoint is built again with it


@pytest.mark.parametrize("learns", few_of(LEARNERS, ["reward", "sft"]))
def test_a_rate_that_a_callback_finds_follows_the_schedule(learns: str, model_folder: str) -> None:
    module, data = learner(learns, model_folder)
    finder = LearningRateFinder(min_lr=1e-6, max_lr=1e-2, num_training_steps=20)
    rates = rates_of(module, data, finder)[-16:]
    straight = rates_of(*learner(learns, model_folder, lr=module.lr))
    assert module.lr != RATE
    assert rates == pytest.approx(straight)
    assert len(set(rates)) > 1  # there is a warm-up


@pytest.mark.filterwarnings("ignore:Total length of `list`")  # there is no validation data
@pytest.mark.parametrize("learns", few_of(LEARNERS, ["reward", "sft"]))
@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_a_batch_size_is_found_and_acts(learns: str, mode: str, model_folder: str) -> None:
    module, data = learner(learns, model_folder)
    before = weights(module)
    size = tuner().scale_batch_size(
        module, datamodule=data, mode=mode, init_val=1, steps_per_trial=1, max_trials=3, margin=0.0
    )
    assert size == data.batch_size == 4
    torch.testing.assert_close(weights(module), before, rtol=0, atol=0)
    assert len(rates_of(module, data)) == 4 * 2


def test_a_run_keeps_its_batch_size(fit: Fit) -> None:
    class Changes(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.datamodule.batch_size = 1

    with pytest.raises(ValueError, match=r"^a run keeps its batch_size"):
        fit(Changes())


def test_a_policy_refuses_both_searches(model_folder: str) -> None:
    module, data = build("rloo", model_folder)
    with pytest.raises(ValueError, match=r"^RLOO takes its optimizer steps itself"):
        tuner().lr_find(module, datamodule=data)
    with pytest.raises(ValueError, match=r"^a step of RLOO generates and scores"):
        tuner().scale_batch_size(module, datamodule=data)


def test_several_loggers_get_every_step(fit: Fit) -> None:
    fit(logger=[CSVLogger("rows"), TensorBoardLogger("events")])
    (table,) = Path("rows").rglob("metrics.csv")
    with table.open() as handle:
        steps = [int(row["step"]) for row in csv.DictReader(handle)]
    assert sorted(set(steps)) == [1, 2]
    assert len(list(Path("events").rglob("events.out.tfevents.*"))) == 1


class _WandbRun:
    """Keeps what is logged to W&B, by step."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def define_metric(self, *_: Any, **__: Any) -> None: ...

    def log(self, row: dict[str, float]) -> None:
        self.rows.setdefault(int(row["trainer/global_step"]), {}).update(row)

    def __getattr__(self, name: str) -> Any:
        return MagicMock(name=name)


def test_the_evaluation_before_training_is_step_0_in_every_logger(fit: Fit, kind: str) -> None:
    wandb_run = _WandbRun()
    events, rows = TensorBoardLogger("events"), CSVLogger("rows")
    loggers = [rows, events, WandbLogger(experiment=wandb_run)]
    # as `lrlhf fit` and the quickstart have it
    fit(logger=loggers, num_sanity_val_steps=-1, val_check_interval=1, check_val_every_n_epoch=None)
    name = "eval/accuracy" if kind == "reward" else "eval/score"
    read = EventAccumulator(str(events.log_dir)).Reload()
    seen = {scalar.step: scalar.value for scalar in read.Scalars(name)}
    assert set(seen) == {0, 1, 2}
    with (Path(rows.log_dir) / "metrics.csv").open() as handle:
        table = {int(row["step"]): row[name] for row in csv.DictReader(handle) if row[name]}
    for step, value in seen.items():
        assert float(table[step]) == pytest.approx(value)
        assert wandb_run.rows[step][name] == pytest.approx(value)


@pytest.mark.parametrize("kind", ["reward", "rloo"], indirect=True)
def test_accumulation_and_clipping_are_lightnings_for_pairs_and_ours_for_policies(
    fit: Fit, kind: str
) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    if kind == "reward":
        run = fit(max_steps=-1, max_epochs=1, **options)
        assert run.trainer.global_step == 2  # four batches
        return
    for name, value in options.items():
        with pytest.raises(ValueError, match=r"^RLOO takes .* set model\.update\.m"):
            fit(**{name: value})
