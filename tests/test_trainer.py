"""What a run keeps without being told: metrics, checkpoints, responses, the model, the report."""

from __future__ import annotations

import csv
import itertools
import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.plugins.environments import LightningEnvironment

from lrlhf import Trainer
from lrlhf.callbacks import EvalJSONL, RLCheckpoint, RolloutLog
from lrlhf.cli import run
from lrlhf.cli.application import _run_folder
from lrlhf.datamodules import PromptDataModule
from lrlhf.loggers import ResumingCSVLogger, ResumingWandbLogger
from lrlhf.modules import RLOO, Reference, Teacher, Update
from lrlhf.rewards import ExactMatch, Rewards
from lrlhf.rollout import Sampling
from lrlhf.run.quiet_output import quiet
from lrlhf.run.supervision.signals import Interrupted
from lrlhf.strategies import FSDP2
from lrlhf.trainer import default_precision

FILES = {
    "metrics.csv",
    "hparams.yaml",
    "timings.csv",
    "rollouts.jsonl",
    "eval_scores_0.jsonl",
    "eval_scores_2.jsonl",
    "reward_curve.png",
    "checkpoints",
    "export",
}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    # it is ignored where the tests were started in the background
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def rows(tmp_path: Path) -> str:
    rows = [{"prompt": f"{number} + 1 =", "answer": str(number + 1)} for number in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return "rows.jsonl"


def config(model_folder: str, rows: str, **trainer: Any) -> dict[str, Any]:
    rewards = {"class_path": "Rewards", "init_args": {"functions": ["exact_match"]}}
    return {
        "seed_everything": 1,
        "model": {
            "class_path": "RLOO",
            "init_args": {
                "policy": model_folder,
                "rewards": rewards,
                "num_generations": 2,
                "sampling": {"max_new_tokens": 3},
            },
        },
        "data": {
            "class_path": "PromptDataModule",
            "init_args": {"train": rows, "val_size": 4, "batch_size": 2},
        },
        "trainer": {
            "accelerator": "cpu",
            "max_steps": 2,
            "val_check_interval": 2,
            "check_val_every_n_epoch": None,
            **trainer,
        },
    }


def fit(name: str, settings: dict[str, Any], *flags: str) -> int:
    Path(name).write_text(yaml.safe_dump(settings))
    return run(["fit", "--config", name, *flags])


def files(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir() if not path.name.startswith(".")}


def test_a_config_without_callbacks_and_logger_keeps_everything_in_one_folder(
    model_folder: str, rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit("sums.yaml", config(model_folder, rows)) == 0
    assert files("runs/sums") == {*FILES, "config.yaml"}
    assert files("runs") == {"sums"}
    assert files(".") == {"runs", "rows.jsonl", "sums.yaml"}
    with Path("runs/sums/metrics.csv").open() as handle:
        scores = [row["rollout/score"] for row in csv.DictReader(handle)]
    assert len([score for score in scores if score]) == 2
    assert (Path("runs/sums/export/final/model.safetensors")).is_file()
    assert "runs/sums/checkpoints/last.ckpt" in capsys.readouterr().out

    # last is found, and evaluations leave the config of the training alone
    before = Path("runs/sums/config.yaml").read_bytes()
    assert fit("sums.yaml", config(model_folder, rows, max_steps=3), "--ckpt_path", "last") == 0
    assert torch.load("runs/sums/checkpoints/last.ckpt", weights_only=True)["global_step"] == 3
    trained = Path("runs/sums/config.yaml").read_bytes()
    assert trained != before
    for word in ("last", "best"):
        assert run(["validate", "--config", "sums.yaml", "--ckpt_path", word]) == 0
    assert Path("runs/sums/config.yaml").read_bytes() == trained
    assert Path("runs/sums/validate_config.yaml").is_file()


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        (["--config", "configs/a.yaml", "--config=b.yaml"], "runs/a"),
        (["--config", '{"model": {"token": "hidden"}}', "--config=b.yaml"], "runs/b"),
        (["--config", "s3://bucket/a.yaml"], "runs/unnamed"),
        (["--trainer.max_steps", "1"], "runs/unnamed"),
    ],
)
def test_the_folder_has_the_name_of_the_first_file(given: list[str], folder: str) -> None:
    assert _run_folder(["fit", *given]) == folder


def test_one_option_moves_all_of_it(model_folder: str, rows: str) -> None:
    settings = config(model_folder, rows, default_root_dir="runs/here")
    settings["trainer"]["logger"] = {"class_path": "ResumingCSVLogger"}
    settings["trainer"]["callbacks"] = [{"class_path": "RLCheckpoint"}, {"class_path": "HFExport"}]
    assert fit("sums.yaml", settings, "--trainer.default_root_dir", "elsewhere") == 0
    assert files("elsewhere") == {*FILES, "config.yaml"}
    assert not Path("runs").exists()


def test_what_is_given_takes_the_place_of_a_default() -> None:
    mine = RLCheckpoint(every_n_train_steps=3)
    trainer = Trainer(callbacks=mine, logger=False, accelerator="cpu")
    assert trainer.checkpoint_callbacks == [mine]
    assert trainer.loggers == []
    bare = Trainer(default_callbacks=False, enable_checkpointing=False, accelerator="cpu")
    assert not any(isinstance(one, RLCheckpoint | RolloutLog) for one in bare.callbacks)
    none = Trainer(enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu")
    assert not any(isinstance(one, ModelCheckpoint) for one in none.callbacks)
    assert none.progress_bar_callback is None


def test_a_checkpoint_for_errors_alone_leaves_the_default_ones() -> None:
    mine = OnExceptionCheckpoint("broken")
    trainer = Trainer(callbacks=[mine], logger=False, accelerator="cpu")
    assert trainer.callbacks[-2] is mine
    assert isinstance(trainer.callbacks[-1], RLCheckpoint)


@pytest.mark.parametrize("folder", ["file:///data/run", "s3://bucket/run", "memory://run"])
def test_a_remote_run_folder_is_refused(
    folder: str, model_folder: str, rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = f"{folder} is no folder of this machine; give a local trainer.default_root_dir"
    with pytest.raises(ValueError, match=f"^{message}"):
        Trainer(default_root_dir=folder)
    assert fit("sums.yaml", config(model_folder, rows, default_root_dir=folder)) == 2
    assert f"trainer.default_root_dir: {message}" in capsys.readouterr().err
    assert files(".") == {"rows.jsonl", "sums.yaml"}


def test_loggers_without_a_folder_use_the_run_folder() -> None:
    own = ResumingCSVLogger("own")
    other = TensorBoardLogger("events")
    loggers = [ResumingCSVLogger(), own, ResumingWandbLogger(offline=True), other]
    trainer = Trainer(default_root_dir="runs/x", logger=loggers, accelerator="cpu")
    assert [log.save_dir for log in trainer.loggers] == ["runs/x", "own", "runs/x", "events"]
    # also where the first logger has a folder of its own
    assert trainer.run_folder == Path("runs/x")


def module(model_folder: str) -> RLOO:
    rewards = Rewards([ExactMatch()])
    return RLOO(model_folder, rewards, num_generations=2, sampling=Sampling(max_new_tokens=3))


def data(rows: str) -> PromptDataModule:
    return PromptDataModule(train=rows, val_size=4, batch_size=2)


def test_the_same_from_python(model_folder: str, rows: str) -> None:
    trainer = Trainer(default_root_dir="runs/py", max_steps=2, accelerator="cpu")
    policy, prompts = module(model_folder), data(rows)
    trainer.fit(policy, prompts)
    assert files("runs/py") >= {"metrics.csv", "rollouts.jsonl", "checkpoints", "export"}
    callbacks = len(trainer.callbacks)
    trainer.validate(policy, prompts, ckpt_path="last")
    assert len(trainer.callbacks) == callbacks
    assert "eval_scores_2.jsonl" in files("runs/py")
    # checkpoints know of what the others hold
    assert isinstance([c for c in trainer.callbacks if not _private(c)][-1], RLCheckpoint)


def _private(callback: L.Callback) -> bool:
    return type(callback).__module__.startswith("lrlhf.run")


class Silent(RLOO):
    """A policy whose validation returns nothing."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        super().validation_step(batch, batch_idx)


def test_records_are_asked_of_the_users_own_step_only_where_they_are_asked_for(
    model_folder: str, rows: str
) -> None:
    def validate(**options: Any) -> None:
        rewards, sampling = Rewards([ExactMatch()]), Sampling(max_new_tokens=3)
        policy = Silent(model_folder, rewards, num_generations=2, sampling=sampling)
        trainer = Trainer(default_root_dir="runs/t", accelerator="cpu", logger=False, **options)
        trainer.validate(policy, datamodule=data(rows), verbose=False)

    validate()
    assert not list(Path("runs").glob("t/eval_scores*"))
    with pytest.raises(ValueError, match="EvalJSONL needs validation_step of Silent"):
        validate(callbacks=[EvalJSONL()])


def test_building_and_training_say_no_more_than_the_command_line(
    model_folder: str, rows: str, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(default_root_dir="runs/py", max_steps=1, accelerator="cpu")
    policy = module(model_folder)
    trainer.fit(policy, data(rows))
    with quiet():  # what importing it says, once for each process
        logging.getLogger("DeepSpeed").warning("Setting accelerator to CPU. If you have a GPU")
        # as Lightning says it on the second of several processes
        logging.getLogger("lightning.fabric").warning("[rank: 1] Seed set to 1")
    shown = "".join(capfd.readouterr())
    assert "step 1/1" in shown
    for noise in ("Loading weights", "Setting accelerator", "GPU available", "Tip", "Seed set"):
        assert noise not in shown


def test_lightnings_trainer_gets_none_of_it(model_folder: str, rows: str) -> None:
    trainer = L.Trainer(max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.fit(module(model_folder), data(rows))
    assert files(".") == {"rows.jsonl"}
    assert not any(isinstance(one, EvalJSONL) for one in trainer.callbacks)


def test_words_for_checkpoints_that_are_not_there(
    model_folder: str, rows: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(
        default_root_dir="runs/new", max_steps=1, limit_val_batches=0, accelerator="cpu"
    )
    policy, prompts = module(model_folder), data(rows)
    for word in ("last", "best"):
        with pytest.raises(ValueError, match=f"ckpt_path is {word}, and runs/new/checkpoints has"):
            trainer.validate(policy, prompts, ckpt_path=word)
    with caplog.at_level("INFO", logger="lrlhf"):
        trainer.fit(policy, prompts, ckpt_path="last")
    assert "runs/new/checkpoints has no checkpoint yet: the run starts" in caplog.text
    # none was ranked, as no validation came
    later = Trainer(default_root_dir="runs/new", accelerator="cpu")
    with pytest.raises(ValueError, match="no checkpoint of runs/new/checkpoints was ranked"):
        later.validate(policy, prompts, ckpt_path="best")


def test_an_evaluation_looks_for_its_checkpoint_before_the_processes_are_connected(
    model_folder: str, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(default_root_dir="runs/new", accelerator="cpu", devices=2, strategy="ddp")
    connect = lambda: pytest.fail("the other processes are not there yet")  # noqa: E731
    monkeypatch.setattr(trainer.strategy, "setup_environment", connect)
    for evaluate in (trainer.validate, trainer.test, trainer.predict):
        with pytest.raises(ValueError, match="ckpt_path is last, and runs/new/checkpoints has no"):
            evaluate(module(model_folder), datamodule=data(rows), ckpt_path="last")


class Falling(RLOO):
    """A policy whose validations get worse and worse."""

    def on_validation_epoch_end(self) -> None:
        self.log("eval/score", 1.0 - self.trainer.global_step / 10)


def test_best_is_the_best_of_all_processes_also_when_the_folder_has_moved(
    model_folder: str, rows: str
) -> None:
    rewards = Rewards([ExactMatch()])
    policy = Falling(model_folder, rewards, num_generations=2, sampling=Sampling(max_new_tokens=3))
    options: dict[str, Any] = {"accelerator": "cpu", "num_sanity_val_steps": 0}
    options |= {"val_check_interval": 1, "limit_val_batches": 1}
    Trainer(default_root_dir="runs/a", max_steps=3, **options).fit(policy, data(rows))
    assert files("runs/a/checkpoints") == {"last.ckpt", "step=000001.ckpt"}
    Path("runs/a").rename("runs/b")
    trainer = Trainer(default_root_dir="runs/b", **options)
    trainer.validate(policy, data(rows), ckpt_path="best")
    assert trainer.ckpt_path == "runs/b/checkpoints/step=000001.ckpt"


class Distilled(RLOO):
    """A policy that comes closest to its teacher in its second step."""

    def on_validation_epoch_end(self) -> None:
        self.log("eval/score", 0.0)
        self.log("eval/teacher_reverse_kl", {1: 0.5, 2: 0.2, 3: 0.9}[self.global_step])


def test_with_a_teacher_alone_the_nearest_is_the_best_and_the_distance_is_reported(
    model_folder: str, rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = Distilled(
        model_folder,
        num_generations=2,
        sampling=Sampling(max_new_tokens=3),
        teacher=Teacher(model=model_folder),
    )
    options: dict[str, Any] = {"accelerator": "cpu", "num_sanity_val_steps": 0, "max_steps": 3}
    options |= {"val_check_interval": 1, "limit_val_batches": 1}
    Trainer(default_root_dir="runs/a", **options).fit(policy, data(rows))
    assert files("runs/a/checkpoints") == {"last.ckpt", "step=000002.ckpt"}
    said = capsys.readouterr().out
    assert "teacher/reverse_kl: 0 at step 1 " in said  # the policy is its own teacher
    assert "eval/teacher_reverse_kl: 0.5 at step 1 → 0.9 at step 3 (+0.4)" in said
    assert "checkpoint with best eval/teacher_reverse_kl" in said
    # beside rewards the score is what counts
    both = RLOO(model_folder, Rewards([ExactMatch()]), teacher=Teacher(model=model_folder),
                reference=Reference(kl_coef=0.0), update=Update(loss="reinforce"))  # fmt: skip
    assert (both.eval_metric, both.eval_mode) == ("eval/score", "max")


class Interrupting(RLOO):
    """Presses Ctrl-C in its second step, or in the first of two batches of the validation."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 1 and self.phase == "training":
            os.kill(os.getpid(), self.signal)
        super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        assert batch_idx == 0 or self.global_step < 2 or self.phase == "training"
        if self.global_step == 2 and self.phase == "validation":
            os.kill(os.getpid(), self.signal)
        return super().validation_step(batch, batch_idx)

    signal: signal.Signals = signal.SIGINT
    phase = "training"


@pytest.mark.parametrize("phase", ["training", "validation"])
@pytest.mark.parametrize(
    ("number", "status", "word"), [(2, 130, "interrupted"), (15, 143, "terminated")]
)
def test_a_signal_finishes_the_step_saves_and_names_the_file(
    model_folder: str,
    rows: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    status: int,
    word: str,
    phase: str,
) -> None:
    monkeypatch.setattr(Interrupting, "signal", signal.Signals(number))
    monkeypatch.setattr(Interrupting, "phase", phase)
    settings = config(model_folder, rows, max_steps=9)
    settings["model"]["class_path"] = f"{__name__}.Interrupting"
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    try:
        assert fit("sums.yaml", settings) == status
        assert signal.getsignal(signal.SIGINT) is handlers[0]
    finally:
        signal.signal(signal.SIGTERM, handlers[1])
    saved = torch.load("runs/sums/checkpoints/last.ckpt", weights_only=True)
    assert saved["global_step"] == 2
    last_line = capfd.readouterr().err.splitlines()[-1]
    where = "runs/sums/checkpoints/last.ckpt"
    assert last_line == f"error: {word}; --ckpt_path last continues from {where}"


def test_ctrl_c_stays_ignored_where_it_was(model_folder: str, rows: str) -> None:
    sampling = Sampling(max_new_tokens=3)
    policy = Interrupting(
        model_folder, Rewards([ExactMatch()]), num_generations=2, sampling=sampling
    )
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    trainer = Trainer(default_root_dir="runs/t", max_steps=2, accelerator="cpu")
    try:
        trainer.fit(policy, data(rows))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, handler)
    assert trainer.global_step == 2


def test_a_second_ctrl_c_ends_the_run_at_once(model_folder: str, rows: str) -> None:
    class Twice(Interrupting):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            if self.global_step == 1:
                os.kill(os.getpid(), signal.SIGINT)
                pytest.fail("the second Ctrl-C did nothing")

    rewards = Rewards([ExactMatch()])
    policy = Twice(model_folder, rewards, num_generations=2, sampling=Sampling(max_new_tokens=3))
    handler = signal.getsignal(signal.SIGINT)
    trainer = Trainer(default_root_dir="runs/t", max_steps=5, accelerator="cpu")
    try:
        with pytest.raises(Interrupted):
            trainer.fit(policy, data(rows))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert trainer.global_step == 1


def test_without_validation_and_intervals_the_newest_is_saved_after_ten_minutes(
    model_folder: str, rows: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []

    class Clocked(RLCheckpoint):
        def _save(self, trainer: L.Trainer, path: str) -> None:
            saved.append(trainer.global_step)
            super()._save(trainer, path)

    now = iter(range(0, 10**9, 150))
    clock = SimpleNamespace(monotonic=lambda: next(now))
    monkeypatch.setattr("lrlhf.callbacks.rl_checkpoint.time", clock)
    trainer = Trainer(
        default_root_dir="runs/t",
        callbacks=[Clocked()],
        max_steps=12,
        accelerator="cpu",
        limit_val_batches=0,
    )
    trainer.fit(module(model_folder), PromptDataModule(train=rows, batch_size=1))
    assert saved[-1] == 12
    assert 2 <= len(saved) <= 5
    assert all(later - earlier >= 2 for earlier, later in itertools.pairwise(saved))


def test_without_validation_the_two_newest_are_kept_and_none_is_recommended(
    model_folder: str, rows: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(model_folder, rows, max_steps=-1, max_epochs=3)
    del settings["trainer"]["val_check_interval"], settings["trainer"]["check_val_every_n_epoch"]
    settings["data"]["init_args"] = {"train": rows, "batch_size": 6}
    assert fit("sums.yaml", settings) == 0
    assert files("runs/sums/checkpoints") == {"last.ckpt", "step=000004.ckpt", "step=000006.ckpt"}
    printed = capsys.readouterr()
    assert "--trainer.max_epochs 6" in printed.out
    assert "lrlhf validate" not in printed.out
    assert "val_dataloader" not in printed.err
    # the next process knows which files are its own, and says nothing else
    again = ["--trainer.max_epochs", "5", "--ckpt_path", "last"]
    assert fit("sums.yaml", settings, *again) == 0
    assert files("runs/sums/checkpoints") == {"last.ckpt", "step=000008.ckpt", "step=000010.ckpt"}
    assert "callbacks used to create the checkpoint" not in capsys.readouterr().err


def test_functions_alone_are_rewards_and_other_batches_are_refused(
    model_folder: str, rows: str
) -> None:
    def length(completions: list[str]) -> list[float]:
        return [float(len(each)) for each in completions]

    for given in (length, [length], {"length": length}):
        policy = RLOO(model_folder, given, num_generations=2, sampling=Sampling(max_new_tokens=3))  # type: ignore[arg-type]
        assert policy.rewards.names == ("length",)
    options: dict[str, Any] = {"max_steps": 1, "accelerator": "cpu", "logger": False}
    Trainer(default_root_dir="runs/f", **options).fit(policy, data(rows))
    loader = torch.utils.data.DataLoader([{"prompt": "1 + 1"}])
    with pytest.raises(ValueError, match="RLOO got a dict for a batch, and needs those of Prompt"):
        Trainer(default_root_dir="runs/g", **options).fit(policy, loader)


@pytest.mark.parametrize(
    ("accelerator", "gpu", "bfloat16", "expected"),
    [
        ("auto", True, True, "bf16-mixed"),
        ("gpu", True, True, "bf16-mixed"),
        ("cuda", True, True, "bf16-mixed"),
        ("auto", True, False, None),
        ("auto", False, False, None),
        ("cpu", True, True, None),
    ],
)
def test_precision_where_none_is_given(accelerator, gpu, bfloat16, expected, monkeypatch) -> None:
    available = "lightning.pytorch.accelerators.CUDAAccelerator.is_available"
    monkeypatch.setattr(available, staticmethod(lambda: gpu))

    def supported(including_emulation: bool = True) -> bool:  # as of a GPU of 2018
        return bfloat16 or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert default_precision(accelerator) == expected


def test_a_precision_that_is_given_stays(monkeypatch) -> None:
    monkeypatch.setattr("lrlhf.trainer.default_precision", lambda _: "bf16-mixed")
    made = [Trainer(accelerator="cpu", precision=given) for given in (None, "32-true")]
    assert [one.precision for one in made] == ["bf16-mixed", "32-true"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "bf16-mixed"),
        ({"plugins": [LightningEnvironment()]}, "bf16-mixed"),
        ({"plugins": [DoublePrecision()]}, "64-true"),
        ({"strategy": "ddp_notebook"}, "32-true"),  # a GPU that was asked cannot be forked with
        ({"strategy": FSDP2(start_method="fork")}, "32-true"),
    ],
)
def test_what_else_decides_the_precision(options, expected, monkeypatch) -> None:
    monkeypatch.setattr("lrlhf.trainer.default_precision", lambda _: "bf16-mixed")
    assert Trainer(accelerator="cpu", devices=1, **options).precision == expected
