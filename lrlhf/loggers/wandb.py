"""Weights & Biases runs that are one run, however often the process was killed."""

from __future__ import annotations

import os
import secrets
from argparse import Namespace
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lrlhf.arguments import KeepsArguments
from lrlhf.run.lightning_internals import open_writer, wandb_options

_X_AXIS = "trainer/global_step"


class ResumingWandbLogger(KeepsArguments, WandbLogger):
    """Continues the same W&B run when training is resumed.

    Rows are numbered, and a resumed run sends those after its checkpoint under their old numbers:
    W&B takes the ones that it lacks and ignores the ones that it has. Two things are beyond its
    public interface: rows that its service had not yet written when the whole machine died are
    missing (``metrics.csv`` of `ResumingCSVLogger` has them), and a run that is offline cannot ask
    what W&B has, so that rows after the checkpoint are in the files of both processes. The x-axis
    is ``trainer/global_step``. A run that starts from the beginning is a new one in W&B too.

    The run in W&B begins when training does: until then ``experiment`` ignores all calls, and
    hyperparameters are kept for it.

    Args:
        save_dir: Folder of the run; W&B's own folder ``wandb`` is inside it. None: that of
            `lrlhf.Trainer`, else the working folder.
        project: Name of the project in W&B; None: ``WANDB_PROJECT``, else ``lrlhf``.
        name: Of the run, for display; None: W&B makes one up.
        id: Of the run; None: a new one for each run that starts from the beginning.
        offline: Write to the folder only; ``wandb sync`` sends it later.
        log_model: Also send the checkpoints: ``all`` each, true at the end.
        **kwargs: Those of ``wandb.init``.

    Raises:
        ModuleNotFoundError: W&B is not installed.
        TypeError: ``prefix`` is given, which Lightning's logger has and this one has not.
    """

    def __init__(
        self,
        save_dir: str | Path | None = None,
        project: str | None = None,
        name: str | None = None,
        id: str | None = None,
        offline: bool = False,
        log_model: Literal["all"] | bool = False,
        **kwargs: Any,
    ) -> None:
        if "prefix" in kwargs:  # Lightning would take it, and the rows here would lack it
            raise TypeError("ResumingWandbLogger has no prefix; give the run a name instead")
        self._options: dict[str, Any] = {
            "save_dir": "." if save_dir is None else save_dir,
            "project": project or os.environ.get("WANDB_PROJECT", "lrlhf"),
            "name": name,
            "offline": offline,
            "log_model": log_model,
            **kwargs,
        }
        super().__init__(id=id, **self._options)
        self._in_run_folder = save_dir is None
        self._chosen_id = id
        self._held_back: list[dict[str, Any] | Namespace] = []
        self._run_id: str | None = None
        """Of the run in W&B; None: it has not begun."""
        self._rows = 0
        self._numbers_rows = True

    def use_run_folder(self, folder: Path | str) -> None:
        """Write there, unless a folder was given."""
        if self._in_run_folder:
            self._options["save_dir"] = str(folder)

    @property
    def save_dir(self) -> str:
        """Folder of the run."""
        return str(self._options["save_dir"])

    @property
    def experiment(self) -> Any:
        """The run of W&B, once training has begun."""
        # the trainer asks before it is known which run this is
        return DummyLogger().experiment if self._run_id is None else super().experiment

    @property
    def version(self) -> str:
        """Id of the run; empty before it has begun, so that folders do not depend on it."""
        return self._run_id or ""

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace) -> None:
        if self._run_id is None:
            self._held_back.append(params)
        else:
            super().log_hyperparams(params)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if self._run_id is None:
            self.start_run()
        row = {k: v.item() if isinstance(v, Tensor) else v for k, v in metrics.items()}
        row |= {} if step is None else {_X_AXIS: step}
        if not self._numbers_rows:
            self.experiment.log(row)
            return
        number, self._rows = self._rows, self._rows + 1
        # W&B would ignore one that it has, and warn of each
        if number >= self.experiment.starting_step:
            # without commit it would wait for the next row
            self.experiment.log(row, step=number, commit=True)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        super().finalize(status)
        run = open_writer(self)
        if not self._numbers_rows and run is not None and run.id == self._run_id:
            # a training that follows would write to the run that is active
            run.finish()

    # ---- what `ResumableLog` asks for

    def log_position(self) -> dict[str, Any]:
        return {"id": self._run_id, "rows": self._rows}

    def rewind(self, position: Mapping[str, Any]) -> None:
        self._rows = position["rows"]
        self._begin(position["id"])

    def start_run(self) -> None:
        self._rows = 0
        self._begin(self._chosen_id or secrets.token_hex(4))

    def for_stage(self, stage: str) -> ResumingWandbLogger:
        options = self._options | {"job_type": self._options.get("job_type") or stage}
        evaluation = ResumingWandbLogger(id=secrets.token_hex(4), **options)
        evaluation._numbers_rows = False
        if self._run_id is not None and open_writer(self) is not None:
            # Lightning would write to the run of the training, which is active
            run = import_module("wandb").init(**wandb_options(evaluation), reinit="create_new")
            evaluation._options["experiment"] = run
        evaluation.start_run()
        return evaluation

    def _begin(self, run_id: str) -> None:
        super().__init__(id=run_id, **self._options)
        self._run_id = run_id
        Path(self.save_dir).mkdir(parents=True, exist_ok=True)
        postponed, self._held_back = self._held_back, []
        for params in postponed:
            super().log_hyperparams(params)
