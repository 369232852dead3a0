"""Rows in memory and in small files, and a module that only remembers what it was fed."""

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lrlhf.datamodules import Source, text
from tests.conftest import build_tokenizer
from tests.vlms import Vlm, build_vlm, save_vlm

WriteRows = Callable[..., str]
TOKENIZER = build_tokenizer()


class Rows(Source):
    """Rows in memory, as JSON would give them.

    Args:
        rows: The rows.
        name: What messages call them.
        folder: What relative paths in them start from.
    """

    def __init__(
        self, rows: Iterable[Any], name: str = "rows.jsonl", folder: Path | None = None
    ) -> None:
        self._rows = json.loads(json.dumps(list(rows)))
        self._name = name
        self._folder = folder

    @property
    def name(self) -> str:
        return self._name

    @property
    def folder(self) -> Path | None:
        return self._folder

    def rows(self) -> list[Mapping[str, Any]]:
        return [dict(row) for row in self._rows]


@functools.cache
def vlm() -> Vlm:
    """What `vlm_folder` holds."""
    return build_vlm("qwen2_vl")


@pytest.fixture(scope="session")
def vlm_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Qwen2-VL: 28 x 28 pixels make a token."""
    path = tmp_path_factory.mktemp("qwen2_vl")
    save_vlm("qwen2_vl", path)
    return str(path)


@pytest.fixture(autouse=True, scope="session")
def _load_once() -> Iterator[None]:
    """Read a folder with a tokenizer and processor once, however many tests name it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("load_tokenizer", "load_processor", "load_config"):
            patch.setattr(text, name, functools.cache(getattr(text, name)))
        yield


@pytest.fixture
def write_rows(tmp_path: Path) -> WriteRows:
    """Write rows as JSON lines; a row that is text is written as it is."""

    def write(rows: Iterable[Mapping[str, Any] | str], name: str = "rows.jsonl") -> str:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return str(path)

    return write


def numbered_prompts(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"prompt {number}", "number": number} for number in range(count)]


class Remembers(L.LightningModule):
    """Manual optimization; keeps the row numbers of every train and validation batch."""

    def __init__(self, *, ask_for_steps: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[Any] = []
        self.validated: list[list[int]] = []
        self.ask_for_steps = ask_for_steps

    def training_step(self, batch: Any, index: int) -> None:
        self.optimizers().step()
        self.seen.append([columns["number"] for columns in batch.columns])

    def validation_step(self, batch: Any, index: int) -> None:
        self.validated.append([columns["number"] for columns in batch.columns])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.ask_for_steps:
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(save_to: Path | None = None, **options: Any) -> L.Trainer:
    """A quiet trainer of three epochs that saves a checkpoint after every step, if it is to."""
    saving = ModelCheckpoint(
        save_to,
        filename="{step}",
        every_n_train_steps=1,
        save_top_k=-1,
        save_on_train_epoch_end=False,
    )
    return L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        enable_checkpointing=save_to is not None,
        **{"callbacks": [saving] if save_to else [], "max_epochs": 3, **options},
    )


def resumes_alike(
    tmp_path: Path,
    module: Callable[[], Remembers],
    data: Callable[[], L.LightningDataModule],
    stops: Iterable[int],
    **options: Any,
) -> Remembers:
    """Stop a run after each of ``stops``; what it sees afterwards is what the whole run saw."""
    whole = module()
    trainer(tmp_path / "checkpoints", **options).fit(whole, datamodule=data())
    for stop in stops:
        assert stop < len(whole.seen)
        resumed = module()
        trainer(**options).fit(
            resumed,
            datamodule=data(),
            ckpt_path=str(tmp_path / "checkpoints" / f"step={stop}.ckpt"),
            weights_only=True,
        )
        assert resumed.seen == whole.seen[stop:], f"stopped after batch {stop}"
    return whole
