"""What the model answered in an evaluation, one line each."""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

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
from lrlhf.datamodules.core import set_column
from lrlhf.run.numbered_files import move_to_numbered
from lrlhf.run.seeding import LoadedStep, model_step

_AT_ONCE = 1000
"""Lines that ranks send each other in one go."""


class _SpooledLine(NamedTuple):
    """What a line is sorted by, and where it is in the file."""

    key: tuple[Any, ...]
    offset: int
    length: int


class LineSpool:
    """Lines of text and their places in an order, kept in a temporary file."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._lines: list[_SpooledLine] = []

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, key: tuple[Any, ...], line: str) -> None:
        """Keep a line; of equal keys the one that came first stays first."""
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the lines
        text = line.encode()
        self._lines.append(_SpooledLine(key, self._file.seek(0, 2), len(text)))
        self._file.write(text)

    def clear(self) -> None:
        """Drop all lines."""
        if self._file is not None:
            self._file.close()
        self._file, self._lines = None, []

    def gather(self, trainer: L.Trainer) -> None:
        """Move the lines of all ranks to rank zero, in rank order; all ranks call."""
        if trainer.world_size == 1:
            return
        own, self._lines = self._lines, []
        source, self._file = self._file, None
        counts = gather_on_zero(trainer, [len(own)])
        rounds = trainer.strategy.broadcast(-(-max(counts, default=0) // _AT_ONCE))
        for number in range(rounds):
            part = own[number * _AT_ONCE : (number + 1) * _AT_ONCE]
            lines = [(spooled.key, _read(source, spooled).decode()) for spooled in part if source]
            for key, line in gather_on_zero(trainer, lines):
                self.add(key, line)
        if source is not None:
            source.close()

    def write(self, path: Path) -> None:
        """Write the lines to a file, in the order of their keys."""
        with atomic_write(path) as handle:
            for spooled in sorted(self._lines, key=lambda spooled: spooled.key):
                if self._file is not None:
                    handle.write(_read(self._file, spooled) + b"\n")


def _read(file: IO[bytes], spooled: _SpooledLine) -> bytes:
    file.seek(spooled.offset)
    return file.read(spooled.length)


_FILE = re.compile(r"eval_scores_(\d+)(\.\d+)?\.jsonl")


class EvalJSONL(KeepsArguments, LoadedStep):
    """Writes the records of each evaluation to ``eval_scores_{step}.jsonl``.

    Each line has the step, where its row stands in the data (``source`` and ``row``, from 1), and
    what the module tells of it: of a policy the prompt, its answer, the score, the rewards and the
    ``columns`` that they read; of a reward model both texts, labels, scores and margins. Of several
    validation sets it has the name too (``set``).

    The lines of all ranks go into one file, in the order of the data: that of ``source`` and
    ``row``, or of an ``index`` in the records. A test run writes ``test_scores_{step}.jsonl``. A
    sanity check that covers the whole validation set (``num_sanity_val_steps: -1``) is an
    evaluation too: that of the model before training. A shorter one is no evaluation and writes
    nothing.

    A training gives the evaluations of an earlier one in its folder a number of their own,
    ``eval_scores_{step}.1.jsonl``: all if it starts from the beginning, and those of steps after
    its checkpoint if it goes on.

    Args:
        dirpath: Folder of the files; None: the run folder.
    """

    def __init__(self, dirpath: str | Path | None = None) -> None:
        self.dirpath = dirpath
        self.needs_records = True
        """Refuse a step that returns none; false: write no file then."""
        self.paths: list[Path] = []
        """Files written by this process, oldest first; on rank zero only."""
        self._lines = LineSpool()
        """By data loader, source, and position in it."""
        self._cleared = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        hold_output_folder(trainer, self.dirpath, stage)
        self._cleared = False

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._clear(trainer)  # the check itself may be the evaluation of step 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._clear(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._lines.clear()

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
        loaders = trainer.num_test_batches if trainer.testing else trainer.num_val_batches
        column = set_column(trainer, dataloader_idx, len(loaders))
        for record in outputs["records"]:
            # without a position the order of arrival stands, because the sort is stable
            position = row_number(record, "index", "row")
            line = json_line({"step": model_step(trainer), **column, **record})
            self._lines.add((dataloader_idx, str(record.get("source", "")), position), line)

    on_test_batch_end = on_validation_batch_end

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if is_evaluation(trainer):
            self._write(trainer, "eval_scores")
        self._lines.clear()

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer, "test_scores")
        self._lines.clear()

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._lines.clear()

    def _clear(self, trainer: L.Trainer) -> None:
        """Make room for the evaluations of this training, once."""
        if self._cleared or not trainer.is_global_zero:
            return
        self._cleared = True
        folder, done = output_folder(trainer, self.dirpath), trainer.global_step
        matches = map(_FILE.fullmatch, (path.name for path in folder.glob("eval_scores_*.jsonl")))
        steps = sorted({int(named[1]) for named in matches if named})
        # one number for all, also of those that lie aside already
        names = {step: folder / f"eval_scores_{step}.jsonl" for step in steps}
        later = [path for step, path in names.items() if step > done or not done]
        old = [path for path in later if path.exists()]
        move_to_numbered("EvalJSONL", [*names.values()], old)
        self.paths = [path for path in self.paths if path not in old]

    def _write(self, trainer: L.Trainer, name: str) -> None:
        self._lines.gather(trainer)
        if not trainer.is_global_zero or not (len(self._lines) or self.needs_records):
            return
        path = output_folder(trainer, self.dirpath) / f"{name}_{model_step(trainer)}.jsonl"
        self._lines.write(path)
        self.paths.append(path)


def is_evaluation(trainer: L.Trainer) -> bool:
    """Tell whether the validation that ends saw every batch: a sanity check may have seen less."""
    return not trainer.sanity_checking or (
        trainer.num_sanity_val_batches == trainer.num_val_batches
    )


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
        self._lines = LineSpool()

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._lines.clear()

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
                key = (dataloader_idx, str(record.get("source", "")), number, arrival)
                self._lines.add(key, json_line(line))

    def on_predict_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._lines.gather(trainer)
        if trainer.is_global_zero and len(self._lines):
            self.path = output_folder(trainer, self.dirpath) / "predictions.jsonl"
            self._lines.write(self.path)
            _logger.info("wrote %d predictions to %s", len(self._lines), self.path)
        self._lines.clear()
