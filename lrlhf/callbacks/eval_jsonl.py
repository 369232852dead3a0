"""What the model answered in an evaluation, one line each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L

from lrlhf.arguments import KeepsArguments
from lrlhf.callbacks.output_files import (
    atomic_write,
    gather_on_zero,
    hold_output_folder,
    json_line,
    output_folder,
    row_number,
)
from lrlhf.run.step_numbers import LoadedStep, model_step


class EvalJSONL(KeepsArguments, LoadedStep):
    """Writes the records of each evaluation to ``eval_scores_{step}.jsonl``.

    Each line has the step, where its row stands in the data (``source`` and ``row``, from 1), and
    what the module tells of it: of a policy the prompt, its answer, the score, the rewards and the
    ``columns`` that they read; of a reward model both texts, labels, scores and margins.

    The lines of all ranks go into one file, in the order of the data: that of ``source`` and
    ``row``, or of an ``index`` in the records. A test run writes ``test_scores_{step}.jsonl``. A
    sanity check that covers the whole validation set (``num_sanity_val_steps: -1``) is an
    evaluation too: that of the model before training. A shorter one is no evaluation and writes
    nothing.

    Args:
        dirpath: Folder of the files; None: the run folder.
    """

    def __init__(self, dirpath: str | Path | None = None) -> None:
        self.dirpath = dirpath
        self.needs_records = True
        """Refuse a step that returns none; false: write no file then."""
        self.paths: list[Path] = []
        """Files written by this process, oldest first; on rank zero only."""
        self._lines: list[tuple[int, str, int, str]] = []
        """Data loader, source, position in it and text of each."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        hold_output_folder(trainer, self.dirpath, stage)

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
            if not self.needs_records:
                return
            step = "test_step" if trainer.testing else "validation_step"
            raise ValueError(
                f"EvalJSONL needs {step} of {type(pl_module).__name__} to return "
                "{'records': [...]}; return them, or remove EvalJSONL from trainer.callbacks"
            )
        several = len(trainer.num_test_batches if trainer.testing else trainer.num_val_batches) > 1
        loader = {"dataloader": dataloader_idx} if several else {}
        for record in outputs["records"]:
            # without a position the order of arrival stands, because the sort is stable
            position = row_number(record, "index", "row")
            line = json_line({"step": model_step(trainer), **loader, **record})
            self._lines.append((dataloader_idx, str(record.get("source", "")), position, line))

    on_test_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if is_evaluation(trainer):
            self._write(trainer, "eval_scores")

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer, "test_scores")

    def _write(self, trainer: L.Trainer, name: str) -> None:
        lines = gather_on_zero(trainer, self._lines)
        self._lines = []
        if not trainer.is_global_zero or not (lines or self.needs_records):
            return
        lines.sort(key=lambda line: line[:3])
        path = output_folder(trainer, self.dirpath) / f"{name}_{model_step(trainer)}.jsonl"
        with atomic_write(path) as handle:
            handle.writelines(f"{text}\n".encode() for *_, text in lines)
        self.paths.append(path)


def is_evaluation(trainer: L.Trainer) -> bool:
    """Tell whether the validation that ends saw every batch: a sanity check may have seen less."""
    return not trainer.sanity_checking or (
        trainer.num_sanity_val_batches == trainer.num_val_batches
    )
