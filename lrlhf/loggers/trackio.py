"""Trackio runs that are one run, however often the process was killed."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from copy import copy
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image
from torch import Tensor

from lrlhf.arguments import KeepsArguments


class ResumingTrackioLogger(KeepsArguments, Logger):
    """Continues the same Trackio run when training is resumed.

    Rows are numbered, and a resumed run leaves out those that Trackio's store on this machine has
    already. Trackio writes twice a second: rows that a kill cut off before are missing. What is
    sent to a Space or a server cannot be counted, so that rows after the checkpoint are there
    twice. Trackio's store is ``TRACKIO_DIR``, by default a folder beside the cache of the hub;
    ``trackio show`` opens it.

    Args:
        project: Name of the project; None: ``lrlhf``.
        name: Of the run; None: Trackio makes one up.
        **kwargs: Those of ``trackio.init``, such as ``space_id``.

    Raises:
        ModuleNotFoundError: Trackio is not installed.
    """

    def __init__(self, project: str | None = None, name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        try:
            self._trackio = import_module("trackio")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "ResumingTrackioLogger needs the package trackio: pip install 'lrlhf[trackio]'"
            ) from error
        self._project = project or "lrlhf"
        self._chosen_name = name
        self._options = {"embed": False, **kwargs}
        self._folder = "."
        self._config: dict[str, Any] = {}
        self._run: Any = None
        self._run_name: str | None = None
        """Of the run that has begun; None: none has."""
        self._rows = 0
        self._kept = 0
        """Rows that Trackio has already."""

    def use_run_folder(self, folder: Path | str) -> None:
        """Stand for this run, of which there is one at a time; Trackio writes elsewhere."""
        self._folder = str(folder)

    @property
    def save_dir(self) -> str:
        """Folder of the run."""
        return self._folder

    @property
    def name(self) -> str:
        return self._project

    @property
    def version(self) -> str:
        """Name of the run; empty before it has begun."""
        return self._run_name or ""

    @property
    def experiment(self) -> Any:
        """The run of Trackio; None: it has not begun."""
        return self._run

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: Any) -> None:
        options = vars(params) if isinstance(params, Namespace) else params
        # Trackio keeps names with an underscore in front for itself
        config = {str(key).lstrip("_"): value for key, value in options.items()}
        self._config |= config

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self._log({k: v.item() if isinstance(v, Tensor) else v for k, v in metrics.items()}, step)

    @rank_zero_only
    def log_table(
        self, key: str, columns: Sequence[str], data: Sequence[Sequence[Any]], step: int
    ) -> None:
        """Log a table, whose texts Trackio takes for Markdown.

        Args:
            key: Name of the table.
            columns: Headings.
            data: Rows of numbers, texts, pictures and None.
            step: Step that it belongs to.
        """
        shown = [
            [self._trackio.Image(cell) if isinstance(cell, Image.Image) else cell for cell in row]
            for row in data
        ]
        self._log({key: self._trackio.Table(columns=[*columns], data=shown)}, step)

    def _log(self, row: dict[str, Any], step: int | None) -> None:
        if self._run_name is None:
            self.start_run()
        elif self._run is None:
            self._begin(self._run_name, resume="must")
        number, self._rows = self._rows, self._rows + 1
        if number >= self._kept:
            self._run.log(row, step=step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None

    # ---- what `ResumableLog` asks for

    def log_position(self) -> dict[str, Any]:
        return {"name": self._run_name, "rows": self._rows}

    def rewind(self, position: Mapping[str, Any]) -> None:
        self._rows = position["rows"]
        self._begin(position["name"], resume="allow")
        # beside what its package exports: nothing there counts rows
        store = import_module("trackio.sqlite_storage").SQLiteStorage
        self._kept = store.get_log_count(self._project, run_id=self._run.id)

    def start_run(self) -> None:
        self._rows = self._kept = 0
        self._begin(self._chosen_name, resume="never")

    def for_stage(self, stage: str) -> ResumingTrackioLogger:
        evaluation = copy(self)
        evaluation._options = {"group": stage, **self._options}
        evaluation.start_run()
        return evaluation

    def _begin(self, name: str | None, *, resume: str) -> None:
        self._run = self._trackio.init(
            self._project, name=name, resume=resume, config=self._config, **self._options
        )
        self._run_name = self._run.name
