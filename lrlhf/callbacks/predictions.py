"""What the model said of the prediction set, one line each."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L

from lrlhf.callbacks.output_files import (
    atomic_write,
    gather_on_zero,
    json_line,
    output_folder,
    row_number,
)
from lrlhf.modules.validation_sets import set_column

_logger = logging.getLogger(__name__)


class PredictionJSONL(L.Callback):
    """Writes what ``predict`` returns to ``predictions.jsonl``.

    Of a policy a line has the prompt, its response, score, rewards, why the response ended, and the
    other columns of the row; of a reward model both scores of the pair. The lines of all ranks go
    into one file, in the order of the data. A module whose ``predict_step`` returns something else
    than a list of mappings gets no file.

    Args:
        dirpath: Folder of the file; None: the run folder.
    """

    def __init__(self, dirpath: str | Path | None = None) -> None:
        self.dirpath = dirpath
        self.path: Path | None = None
        """The file that this process wrote; on rank zero only."""
        self._lines: list[tuple[tuple[int, str, int, int], str]] = []
        """Where each stands in the data, and its text."""

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._lines = []

    def on_predict_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not isinstance(outputs, list):
            return
        column = set_column(trainer, dataloader_idx, len(trainer.num_predict_batches))
        for record in outputs:
            if isinstance(record, Mapping):
                line = {**column, **record}
                # else the ranks took the rows of a batch in turn
                arrival = len(self._lines) * trainer.world_size + trainer.global_rank
                number = row_number(record, "row", "index")
                place = (dataloader_idx, str(record.get("source", "")), number, arrival)
                self._lines.append((place, json_line(line)))

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        lines = gather_on_zero(trainer, self._lines)
        self._lines = []
        if not trainer.is_global_zero or not lines:
            return
        self.path = output_folder(trainer, self.dirpath) / "predictions.jsonl"
        with atomic_write(self.path) as handle:
            handle.writelines(f"{text}\n".encode() for _, text in sorted(lines))
        _logger.info("wrote %d predictions to %s", len(lines), self.path)
