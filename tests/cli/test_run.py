"""How a run ends: status, last line, files."""

import os
import signal
from pathlib import Path

import pytest
import torch

from lrlhf.cli import run, saved_config
from tests.cli import toys
from tests.cli.conftest import CONFIG


def test_a_run_that_works_ends_with_0_keeps_its_config_and_says_little(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fit", "--config", config.name]) == 0

    assert "class_path: tests.cli.toys.ToyModule" in Path("runs/toy/config.yaml").read_text()
    assert Path("checkpoints/last.ckpt").exists()
    error = capsys.readouterr().err
    assert "Tip" not in error
    assert "Seed set" not in error


def test_short_names_flags_and_overlays_merge(config: Path) -> None:
    Path("overlay.yaml").write_text("trainer: {max_steps: 2}\nmodel: {init_args: {clip: 0.5}}\n")
    flags = ["--model.lr=0.5", "--data.train=ToySource", "--data.train.size=3"]

    assert run(["fit", "-c", config.name, "--config=overlay.yaml", *flags]) == 0

    saved = Path("runs/toy/config.yaml").read_text()
    assert "lr: 0.5" in saved
    assert "clip: 0.5" in saved
    assert "size: 3" in saved
    assert torch.load("checkpoints/last.ckpt", weights_only=True)["global_step"] == 2


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_flags_win_over_what_a_checkpoint_remembers(config: Path) -> None:
    flags = ["--ckpt_path=checkpoints/last.ckpt", "--model.clip=0.7", "--trainer.max_steps=3"]
    assert run(["fit", "--config", config.name]) == 0
    assert run(["fit", "--config", config.name, *flags]) == 0

    kept = torch.load("checkpoints/last.ckpt", weights_only=True)
    assert kept["global_step"] == 3
    assert kept["hyper_parameters"]["clip"] == 0.7


ENDS = {
    "RewardError": (1, "could not score 9 of 32 responses"),
    "FileNotFoundError": (1, "images/7.png: no such file, named in row 7 of train.jsonl"),
    "RuntimeError": (1, "unexpected RuntimeError: shapes differ"),
    "ValueError": (1, "unexpected ValueError: not explained by us"),
    "TypeError in constructor": (1, "unexpected TypeError: a bug in the constructor"),
    "KeyboardInterrupt": (130, "interrupted"),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_run_that_fails_ends_in_one_line_and_a_bug_keeps_its_traceback(
    config: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    status, last_line = ENDS[name]
    handler = signal.getsignal(signal.SIGINT)
    config.write_text(CONFIG.replace("lr: 0.1", f"fail: {name}"))
    try:
        assert run(["fit", "--config", config.name]) == status
    finally:
        signal.signal(signal.SIGINT, handler)  # after an interrupt Lightning ignores the signal

    error = capsys.readouterr().err
    assert error.endswith(f"error: {last_line}\n")
    assert ("Traceback" in error and "toys.py" in error) == last_line.startswith("unexpected")


def test_sigterm_ends_with_143(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = toys.ToyModule.training_step

    def terminated(module: toys.ToyModule, batch: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGTERM)
        return step(module, batch)

    monkeypatch.setattr(toys.ToyModule, "training_step", terminated)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert run(["fit", "--config", config.name, "--trainer.max_steps=5"]) == 143
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_folder_that_cannot_be_written_ends_in_one_line(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "runs/config.yaml")

    monkeypatch.setattr(saved_config, "atomic_write", full)
    assert run(["fit", "--config", config.name]) == 1

    error = capsys.readouterr().err
    assert error.endswith("error: [Errno 28] No space left on device: 'runs/config.yaml'\n")
    assert "Traceback" not in error


LIMITS = [f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict")]
LIMITS.append("overfit_batches")


@pytest.mark.parametrize("given", ["1", "1.0"])
@pytest.mark.parametrize("where", ["file", "flag"])
def test_a_whole_number_of_batches_is_no_share(
    config: Path, monkeypatch: pytest.MonkeyPatch, where: str, given: str
) -> None:
    seen: dict[str, int | float] = {}

    def note(module: toys.ToyModule) -> None:
        seen.update({name: getattr(module.trainer, name) for name in LIMITS})

    monkeypatch.setattr(toys.ToyModule, "on_fit_start", note)
    names = LIMITS[:-1] if given == "1.0" else LIMITS  # all of the batches cannot be overfitted
    lines = [f"  {name}: {given}\n" for name in names] if where == "file" else []
    flags = [] if lines else [f"--trainer.{name}={given}" for name in names]
    config.write_text(CONFIG + "".join(lines))

    assert run(["fit", "--config", config.name, *flags]) == 0

    # Lightning takes 1 for one batch, and 1.0 for all
    assert {repr(seen[name]) for name in names} == {given}


def test_a_timer_needs_no_more_than_its_duration(config: Path) -> None:
    callback = "    - {class_path: Timer, init_args: {duration: {hours: 1}}}\n"
    config.write_text(CONFIG.replace("  callbacks:\n", "  callbacks:\n" + callback))
    assert run(["fit", "--config", "toy.yaml"]) == 0
