from pathlib import Path

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lrlhf.callbacks import EMA, HFExport
from tests.callbacks.fakes import ToyPolicy, batches, trainer


def exported(folder: Path) -> dict[str, str]:
    return {path.name: (path / "weight.txt").read_text() for path in folder.iterdir()}


def test_the_model_and_its_tokenizer_leave_at_the_end(tmp_path: Path) -> None:
    export = HFExport()
    trainer(tmp_path, export).fit(ToyPolicy(), batches(3))
    assert exported(tmp_path / "export") == {"final": "3"}
    assert (tmp_path / "export" / "final" / "tokenizer.json").exists()
    assert export.last_export == tmp_path / "export" / "final"


def test_the_newest_exports_are_kept(tmp_path: Path) -> None:
    export = HFExport(tmp_path / "out", every_n_steps=2, keep=2)
    trainer(tmp_path, export).fit(ToyPolicy(), batches(7))
    assert exported(tmp_path / "out") == {"step_000004": "4", "step_000006": "6", "final": "7"}


def test_the_averaged_weights_are_exported_on_request(tmp_path: Path) -> None:
    module = ToyPolicy()
    trainer(tmp_path, EMA(decay=0.5, warmup=False), HFExport(use_ema=True)).fit(module, batches(3))
    assert exported(tmp_path / "export") == {"final": "2.125"}  # see test_ema
    assert module.weight == 3.0


def test_an_export_that_fails_midway_leaves_the_old_one(tmp_path: Path) -> None:
    class Full(ToyPolicy):
        def export_pretrained(self, folder: Path) -> None:
            (folder / "weight.txt").write_text("half")
            raise OSError("disk full")

    trainer(tmp_path, HFExport()).fit(ToyPolicy(), batches(1))
    with pytest.raises(OSError, match="disk full"):
        trainer(tmp_path, HFExport()).fit(Full(), batches(2))
    assert exported(tmp_path / "export") == {"final": "1"}


def test_what_is_missing_is_said_before_training(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no EMA"):
        trainer(tmp_path, HFExport(use_ema=True)).fit(ToyPolicy(), batches(1))
    with pytest.raises(ValueError, match="BoringModel has none"):
        trainer(tmp_path, HFExport()).fit(BoringModel())
