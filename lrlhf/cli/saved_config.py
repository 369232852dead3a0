"""The config that a run saves, and the hyperparameters that its loggers get: without secrets."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.trainer.states import TrainerFn

from lrlhf.cli.command_table import LAUNCHED
from lrlhf.cli.config_entries import class_of
from lrlhf.run.atomic import atomic_write
from lrlhf.run.lightning_internals import replace_hyperparameters
from lrlhf.run.log_rows import hold_log_folders, without_secrets
from lrlhf.run.run_folder import run_folder
from lrlhf.secrets import HIDDEN

_logger = logging.getLogger(__name__)


def hide_hyperparameters(*parts: object) -> None:
    """Take the secrets out of the hyperparameters that loggers and checkpoints get."""
    for part in parts:
        if not isinstance(part, L.LightningModule | L.LightningDataModule) or not part.hparams:
            continue
        hyperparameters = dict(part.hparams)
        plain = without_secrets(hyperparameters)
        if any(_differences(hyperparameters, plain, "")):
            replace_hyperparameters(part, plain)


class SaveConfig(SaveConfigCallback):
    """Saves the config of a run without its secrets.

    Args:
        parser: Of the command.
        config: As it was read.
        options: Of Lightning's callback.
    """

    def __init__(self, parser: LightningArgumentParser, config: Namespace, **options: Any) -> None:
        shown = without_secrets(config)
        if changed := list(_differences(config, shown, "")):
            _logger.warning(
                "%s: a secret; the saved config has %s there. Give it through the environment or a "
                "file instead",
                ", ".join(changed),
                HIDDEN,
            )
        if LAUNCHED in os.environ:
            shown = _as_without_launch(shown)
            # each trainer is a node with one device there
            shown.trainer.devices, shown.trainer.num_nodes = shown.trainer.num_nodes, 1
        super().__init__(parser, shown, **options)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write the file whole, once it is sure that the folder is not another run's."""
        if self.already_saved:
            return
        if stage == "fit":
            hold_log_folders(trainer)
        folder = str(run_folder(trainer))
        if trainer.is_global_zero:
            # the config of the training stays what it is when its checkpoints are evaluated
            prefix = "" if stage == "fit" else f"{TrainerFn(stage).value}_"
            with atomic_write(Path(folder) / f"{prefix}{self.config_filename}") as handle:
                handle.write(self.parser.dump(self.config, skip_unset=False).encode())
        self.already_saved = trainer.strategy.broadcast(True)


def _as_without_launch(value: Any) -> Any:
    """Copy a config, with the classes that the user named."""
    if isinstance(value, Namespace):
        return Namespace(**_as_without_launch(vars(value)))  # type: ignore[no-untyped-call]
    if isinstance(value, dict):
        copy = {key: _as_without_launch(part) for key, part in value.items()}
        if stands_for := getattr(class_of(value), "stands_for", None):
            copy["class_path"] = stands_for
        return copy
    return [_as_without_launch(part) for part in value] if type(value) is list else value


def _differences(first: Any, second: Any, path: str) -> Iterator[str]:
    if isinstance(first, Namespace | Mapping):
        items = vars(first).items() if isinstance(first, Namespace) else first.items()
        for key, value in items:
            yield from _differences(value, second[key], f"{path}.{key}".lstrip("."))
    elif isinstance(first, list | tuple):
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            yield from _differences(one, other, f"{path}[{index}]")
    elif isinstance(first, str | int | float) and first != second:
        yield path
