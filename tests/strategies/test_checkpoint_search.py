"""What several processes read when a run goes on from its newest checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lrlhf.callbacks import AtomicCheckpointIO, RLCheckpoint
from tests.callbacks.fakes import ToyPolicy, batches, trainer

COUNTER = Path("/proc/self/io")
pytestmark = pytest.mark.skipif(not COUNTER.exists(), reason="nothing counts what is read")


def bytes_read() -> int:
    return int(COUNTER.read_text().split()[1])


class Heavy(ToyPolicy):
    """Has checkpoints of 4 MB."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(8):
            self.register_buffer(f"ballast{number}", torch.full((125_000,), float(number)))


class Counting(RLCheckpoint):
    """Notes what this process has read when the checkpoint is chosen, and when it is loaded."""

    def _find_last_checkpoints(self, trainer: L.Trainer) -> set[str]:
        self.before = bytes_read()
        found = super()._find_last_checkpoints(trainer)
        self.chosen = bytes_read()
        return found

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        read = (self.chosen - self.before, bytes_read() - self.chosen)
        Path(f"{self.dirpath}.{trainer.global_rank}").write_text(f"{read[0]} {read[1]}")
        super().on_train_start(trainer, pl_module)


def fit(tmp_path: Path, steps: int, **options: Any) -> None:
    run = trainer(
        tmp_path,
        Counting(tmp_path / "ck", every_n_train_steps=2),
        enable_checkpointing=True,
        plugins=[AtomicCheckpointIO()],
        max_steps=steps,
        max_epochs=-1,
        **options,
    )
    run.fit(Heavy(), batches(20), ckpt_path="last", weights_only=True)


def continued_by_two(tmp_path: Path) -> list[tuple[int, int]]:
    """What each of two processes reads to choose a checkpoint, and then to load it."""
    options = {"devices": 2, "strategy": "ddp_fork_find_unused_parameters_true"}
    fit(tmp_path, 5, **options)
    texts = [(tmp_path / f"ck.{rank}").read_text().split() for rank in range(2)]
    return [(int(choose), int(load)) for choose, load in texts]


quiet = pytest.mark.filterwarnings("ignore:.*(is passed over|fork)")


@quiet
def test_each_of_two_processes_reads_half_to_verify_and_all_once_to_load(tmp_path: Path) -> None:
    fit(tmp_path, 4)
    size = (tmp_path / "ck" / "last.ckpt").stat().st_size
    read = continued_by_two(tmp_path)
    assert sum(choose for choose, _ in read) > 0.95 * size
    for choose, load in read:
        assert choose < 0.65 * size
        assert 0.95 * size < load < 1.3 * size


@quiet
def test_what_one_process_finds_damaged_all_pass_over(tmp_path: Path) -> None:
    fit(tmp_path, 4)
    newest = tmp_path / "ck" / "step=000004.ckpt"
    content = bytearray(newest.read_bytes())
    content[content.index(torch.full((9,), 5.0).numpy().tobytes())] ^= 1
    newest.write_bytes(content)
    continued_by_two(tmp_path)
    names = {path.name for path in (tmp_path / "ck").iterdir()}
    assert "step=000004.ckpt.damaged" in names
    last = torch.load(tmp_path / "ck" / "last.ckpt", weights_only=True)
    assert last["state_dict"]["policy.trained"].item() == 5.0


@quiet
def test_a_checkpoint_that_one_process_does_not_see_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tmp_path, 4)
    original = os.path.lexists

    def hidden(path: Any) -> bool:
        second = os.environ.get("LOCAL_RANK") == "1" or (
            torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
        )
        return original(path) and not (second and str(path).endswith(".ckpt"))

    monkeypatch.setattr("os.path.lexists", hidden)
    with pytest.raises(Exception, match=r"rank 1 has no .*; set dirpath"):
        continued_by_two(tmp_path)
    assert "last.ckpt" in {path.name for path in (tmp_path / "ck").iterdir()}
