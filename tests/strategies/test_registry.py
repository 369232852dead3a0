"""Strategies by name, and what a strategy's names and options reach."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest

from lrlhf.cli import run
from lrlhf.strategies import FSDP2, DeepSpeed, register_strategies
from tests.cli.conftest import CONFIG

NAMES = ("fsdp2", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")


@pytest.mark.parametrize("name", NAMES)
def test_a_trainer_knows_the_name(name: str) -> None:
    register_strategies()  # a second time
    trainer = L.Trainer(strategy=name, accelerator="cpu", devices=2, logger=False)
    strategy = trainer.strategy
    if name == "fsdp2":
        assert type(strategy) is FSDP2
    else:
        assert type(strategy) is DeepSpeed
        assert strategy.stage == int(name[-1])
        assert strategy.config is None or strategy.config["zero_optimization"]["stage"] == int(
            name[-1]
        )


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("FSDP2", {"reshard_after_forward": "false", "shard_group": "2", "checkpoint": "full"}),
        ("DeepSpeed", {"stage": "3", "offload_optimizer": "true", "checkpoint": "full"}),
    ],
)
def test_print_config_takes_the_class_with_its_options(
    strategy: str,
    options: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.yaml").write_text(CONFIG)
    __import__("tests.cli.toys")
    flags = [f"--trainer.strategy.{key}={value}" for key, value in options.items()]
    command = ["fit", "--config", "toy.yaml", f"--trainer.strategy={strategy}", *flags]
    assert run([*command, "--print_config"]) == 0
    printed = capsys.readouterr().out
    assert f"class_path: lrlhf.strategies.{strategy}" in printed
    for key, value in options.items():
        assert f"      {key}: {value}\n" in printed


@pytest.mark.slow
def test_importing_the_library_imports_no_deepspeed() -> None:
    code = "import sys, lrlhf.strategies; sys.exit('deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code]).returncode == 0


@pytest.mark.parametrize("group", [0, -1])
def test_a_group_of_no_ranks_is_refused(group: int) -> None:
    with pytest.raises(ValueError, match=f"shard_group is {group}"):
        FSDP2(shard_group=group)
