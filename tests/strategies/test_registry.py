"""Strategies by name, and what a strategy's names and options reach."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest

from lrlhf.cli import run
from lrlhf.strategies import FSDP2, DeepSpeed
from tests.cli.conftest import CONFIG


def test_a_trainer_knows_the_names() -> None:
    def named(name: str) -> object:
        return L.Trainer(strategy=name, accelerator="cpu", devices=2, logger=False).strategy

    assert type(named("fsdp2")) is FSDP2
    for stage in (1, 2, 3):
        strategy = named(f"deepspeed_zero{stage}")
        assert isinstance(strategy, DeepSpeed)
        assert strategy.stage == stage


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


def test_a_group_of_no_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="shard_group is 0"):
        FSDP2(shard_group=0)
