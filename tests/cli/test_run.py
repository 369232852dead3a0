"""How a run ends: status, last line, files."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch

from lrlhf.cli import run
from lrlhf.cli.messages.errors import ConfigError
from tests.cli import toys
from tests.cli.conftest import CONFIG


def _fail_with(config: Path, name: str) -> int:
    config.write_text(CONFIG.replace("lr: 0.1", f"fail: {name}"))
    return run(["fit", "--config", config.name])


def test_a_run_that_works_ends_with_0_and_keeps_its_config(config: Path) -> None:
    assert run(["fit", "--config", config.name]) == 0

    assert "class_path: tests.cli.toys.ToyModule" in Path("config.yaml").read_text()
    assert Path("checkpoints/last.ckpt").exists()


def test_short_names_flags_and_overlays_merge(config: Path) -> None:
    Path("overlay.yaml").write_text("trainer: {max_steps: 2}\nmodel: {init_args: {clip: 0.5}}\n")
    flags = ["--model.lr=0.5", "--data.train=ToySource", "--data.train.size=3"]

    assert run(["fit", "-c", config.name, "--config=overlay.yaml", *flags]) == 0

    saved = Path("config.yaml").read_text()
    assert "lr: 0.5" in saved
    assert "clip: 0.5" in saved
    assert "size: 3" in saved
    assert torch.load("checkpoints/last.ckpt", weights_only=True)["global_step"] == 2


resumes = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")


@resumes
def test_ckpt_path_last_continues(config: Path) -> None:
    assert run(["fit", "--config", config.name]) == 0
    assert run(["fit", "--config", config.name, "--ckpt_path=last", "--trainer.max_steps=3"]) == 0

    assert torch.load("checkpoints/last.ckpt", weights_only=True)["global_step"] == 3


@resumes
def test_flags_win_over_what_a_checkpoint_remembers(config: Path) -> None:
    flags = ["--ckpt_path", "checkpoints/last.ckpt", "--model.clip=0.7", "--trainer.max_steps=2"]
    assert run(["fit", "--config", config.name]) == 0
    assert run(["fit", "--config", config.name, *flags]) == 0

    kept = torch.load("checkpoints/last.ckpt", weights_only=True)["hyper_parameters"]
    assert kept["clip"] == 0.7


def test_a_missing_file_during_the_run_ends_in_one_line(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _fail_with(config, "FileNotFoundError") == 1

    error = capsys.readouterr().err
    message = "error: images/7.png: no such file, named in row 7 of train.jsonl\n"
    assert error.endswith(message)
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("name", "last_line"),
    [
        ("RuntimeError", "error: unexpected RuntimeError: shapes differ\n"),
        ("ValueError", "error: unexpected ValueError: not explained by us\n"),
        ("TypeError in constructor", "error: unexpected TypeError: a bug in the constructor\n"),
    ],
)
def test_a_bug_keeps_its_traceback_and_ends_in_one_line(
    config: Path, capsys: pytest.CaptureFixture[str], name: str, last_line: str
) -> None:
    assert _fail_with(config, name) == 1

    error = capsys.readouterr().err
    assert "Traceback (most recent call last)" in error
    assert "toys.py" in error
    assert error.endswith(last_line)


def test_an_error_that_this_library_explains_ends_in_one_line(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("reward 'length' could not score 9 of 32 responses")

    monkeypatch.setattr(toys.ToyModule, "training_step", refuse)

    assert run(["fit", "--config", config.name]) == 2

    error = capsys.readouterr().err
    assert error.endswith("error: reward 'length' could not score 9 of 32 responses\n")
    assert "Traceback" not in error


def test_ctrl_c_ends_with_130_in_one_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler = signal.getsignal(signal.SIGINT)
    try:
        assert _fail_with(config, "KeyboardInterrupt") == 130
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores the signal from here on

    error = capsys.readouterr().err
    assert error.endswith(
        "error: interrupted; --ckpt_path last continues from the last checkpoint\n"
    )
    assert "Traceback" not in error


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


def test_an_unknown_strategy_is_an_error_of_the_config(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fit", "--config", config.name, "--trainer.strategy=ddpp"]) == 2

    error = capsys.readouterr().err
    assert error.startswith("error: command line: --trainer.strategy: You selected an invalid")


def test_other_libraries_are_quiet(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", "--config", config.name]) == 0

    error = capsys.readouterr().err
    assert "Tip" not in error
    assert "Seed set" not in error


def test_print_config_shows_every_option(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", "--config", config.name, "--print_config"]) == 0

    shown = capsys.readouterr().out
    assert "estimator: k1" in shown
    assert "use_distributed_sampler: false" in shown


def test_a_folder_that_cannot_be_written_ends_in_one_line(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    disk.chmod(0o555)
    mounted = os.access(disk, os.W_OK)  # root may write anywhere, but for a disk that takes nothing
    command = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(disk)]
    if mounted and subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        assert run(["fit", "--config", config.name, f"--trainer.default_root_dir={disk}"]) == 1
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(disk)], check=True)

    error = capsys.readouterr().err
    why = "[Errno 30] Read-only file system" if mounted else "[Errno 13] Permission denied"
    assert error.endswith(f"error: {why}: '{disk}/config.yaml'\n")
    assert "Traceback" not in error
