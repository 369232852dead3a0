"""Weights & Biases runs that are one run, however often the process was killed."""

from __future__ import annotations

import importlib
import secrets
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.loggers.logger import _DummyExperiment, rank_zero_experiment
from lightning.fabric.utilities.logger import _add_prefix
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn
from torch import Tensor

from lrlhf.loggers.wandb_files import rows_on_file
from lrlhf.loggers.wandb_journal import RowJournal

_X_AXIS = "trainer/global_step"


class ResumingWandbLogger(WandbLogger):
    """Continues the same W&B run when training is resumed, with every row once.

    Rows are numbered and sent under their number. W&B's service loses what it has not yet written
    or sent when the process is killed, so each row is first written to ``wandb_rows.jsonl``; a
    resumed run sends what W&B lacks and leaves out what it has. The x-axis is
    ``trainer/global_step``. A run that starts from the beginning is a new one in W&B too.

    The run in W&B begins when training does: until then ``experiment`` ignores all calls, and
    hyperparameters are kept for it.

    Args:
        save_dir: Folder of the run; W&B's own folder ``wandb`` is inside it.
        project: Name of the project in W&B; None: ``WANDB_PROJECT``, else ``lrlhf``.
        name: Of the run, for display; None: W&B makes one up.
        id: Of the run; None: a new one for each run that starts from the beginning.
        offline: Write to the folder only; ``wandb sync`` sends it later.
        log_model: Also send the checkpoints: ``all`` each, true at the end.
        prefix: Put before the name of every metric, with a ``-``.
        **kwargs: Those of ``wandb.init``.

    Raises:
        ModuleNotFoundError: W&B is not installed.
    """

    def __init__(
        self,
        save_dir: str | Path = ".",
        project: str | None = None,
        name: str | None = None,
        id: str | None = None,
        offline: bool = False,
        log_model: Literal["all"] | bool = False,
        prefix: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            save_dir=save_dir,
            project=project,
            name=name,
            id=id,
            offline=offline,
            log_model=log_model,
            prefix=prefix,
            **kwargs,
        )
        self._chosen_id = id
        self._begun = False
        self._held_back: list[dict[str, Any] | Namespace] = []
        self._journal = RowJournal(Path(save_dir) / "wandb_rows.jsonl")
        self._present: set[int] = set()
        """Rows that W&B has of the process that was killed."""
        self._keeps_rows = True

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The run of W&B, once training has begun."""
        # the trainer asks before it is known which run this is
        return super().experiment if self._begun else _DummyExperiment()

    @property
    def version(self) -> str:
        """Id of the run; empty before it has begun, so that folders do not depend on it."""
        return self._id or "" if self._begun else ""

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        if self._begun:
            super().log_hyperparams(params)
        else:
            self._held_back.append(params)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if not self._begun:
            self.start_over()
        values = {name: _number(value) for name, value in metrics.items()}
        row = _add_prefix(values, self._prefix, self.LOGGER_JOIN_CHAR)
        if not self._keeps_rows:
            super().log_metrics(values, step)
            return
        number = self._journal.append(row, step)
        if number not in self._present:
            self._send(number, row, step)

    def _send(self, number: int, row: Mapping[str, Any], step: int | None) -> None:
        axis = {} if step is None else {_X_AXIS: step}
        # without commit it would wait for the next row
        self.experiment.log({**row, **axis}, step=number, commit=True)

    # ---- what `ResumableLog` asks for

    def log_position(self) -> dict[str, Any]:
        self._journal.sync()
        return {"id": self._id, "rows": self._journal.rows}

    def go_back(self, position: Mapping[str, Any]) -> None:
        kept = self._journal.go_back(position["id"], position["rows"])
        self._begin(position["id"])
        self._present = self._rows_at_wandb()
        lost = [record for record in kept if record["row"] not in self._present]
        for record in lost:
            if record["metrics"] is not None:
                self._send(record["row"], record["metrics"], record["step"])
        tables = sum(record["metrics"] is None for record in lost)
        if tables:
            rank_zero_warn(
                f"W&B lost {tables} tables or images that it had not written when the run was "
                "killed; rollouts and evaluations are in the files of the run"
            )

    def start_over(self) -> None:
        run_id = self._chosen_id or secrets.token_hex(4)
        self._journal.begin(run_id)
        self._begin(run_id)

    def stand_apart(self, stage: str) -> None:
        self._keeps_rows = False
        self._wandb_init["job_type"] = self._wandb_init.get("job_type") or stage
        self._begin(secrets.token_hex(4))

    def _begin(self, run_id: str) -> None:
        self._id = self._wandb_init["id"] = run_id
        self._begun = True
        Path(self.save_dir or ".").mkdir(parents=True, exist_ok=True)
        held, self._held_back = self._held_back, []
        for params in held:
            super().log_hyperparams(params)

    def _rows_at_wandb(self) -> set[int]:
        run = self.experiment
        if isinstance(run, importlib.import_module("wandb").Run) and not run.offline:
            # the server takes rows in order
            return set(range(run.starting_step)) if run.resumed else set()
        return rows_on_file(Path(self.save_dir or "."), str(self._id))


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
