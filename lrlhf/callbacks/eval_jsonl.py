"""What the model answered in an evaluation, one line each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from lrlhf.arguments import KeepsArguments
from lrlhf.callbacks.output_files import (
    atomic_write,
    gather_on_zero,
    hold_output_folder,
    json_line,
    output_folder,
)


class EvalJSONL(KeepsArguments, L.Callback):
    """Writes the records of each evaluation to ``eval_scores_{step}.jsonl``.

    The lines of all ranks go into one file, in the order of the data set where records carry an
    ``index``. A test run writes ``test_scores_{step}.jsonl``. A sanity check that covers the
    whole validation set (``num_sanity_val_steps: -1``) is an evaluation too: that of the model
    before training. A shorter one is no evaluation and writes nothing.

    Args:
        dirpath: Folder of the files; None: the run folder.
    """

    def __init__(self, dirpath: str | Path | None = None) -> None:
        self.dirpath = dirpath
        self.paths: list[Path] = []
        """Files written by this process, oldest first; on rank zero only."""
        self._lines: list[tuple[int, int, str]] = []
        """Data loader, position in the data set and text of each."""
        self._loaded_step: int | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        hold_output_folder(trainer, self.dirpath, stage)

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # outside of fit the trainer leaves its own counter at 0
        self._loaded_step = int(checkpoint["global_step"])

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._lines = []

    on_test_start = on_validation_start

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not isinstance(outputs, Mapping) or "records" not in outputs:
            step = "test_step" if trainer.testing else "validation_step"
            raise ValueError(
                f"EvalJSONL needs {step} of {type(pl_module).__name__} to return "
                "{'records': [...]}; return them, or remove EvalJSONL from trainer.callbacks"
            )
        several = len(trainer.num_test_batches if trainer.testing else trainer.num_val_batches) > 1
        for record in outputs["records"]:
            line = {"dataloader": dataloader_idx, **record} if several else record
            # without an index the order of arrival stands, because the sort is stable
            position = int(record.get("index", 0))
            self._lines.append((dataloader_idx, position, json_line(line)))

    on_test_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if is_evaluation(trainer):
            self._write(trainer, "eval_scores")

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer, "test_scores")

    def _write(self, trainer: L.Trainer, name: str) -> None:
        lines = gather_on_zero(trainer, self._lines)
        self._lines = []
        if not trainer.is_global_zero:
            return
        lines.sort(key=lambda line: line[:2])
        fitting = trainer.state.fn == TrainerFn.FITTING
        step = trainer.global_step if fitting else (self._loaded_step or trainer.global_step)
        path = output_folder(trainer, self.dirpath) / f"{name}_{step}.jsonl"
        with atomic_write(path) as handle:
            handle.writelines(f"{text}\n".encode() for _, _, text in lines)
        self.paths.append(path)


def is_evaluation(trainer: L.Trainer) -> bool:
    """Tell whether the validation that ends saw every batch: a sanity check may have seen less."""
    return not trainer.sanity_checking or (
        trainer.num_sanity_val_batches == trainer.num_val_batches
    )
