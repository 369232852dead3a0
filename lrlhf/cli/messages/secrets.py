"""Tokens and passwords stay out of what a run writes and says.

They belong into the environment, or into files that options such as ``token_file`` name. Where one
stands in a config all the same, the saved config, the hyperparameters (and with them checkpoints,
W&B and dumps), log lines and error messages have ``***`` in its place.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.trainer.states import TrainerFn

from lrlhf.cli.config_files import ConfigFile, walk
from lrlhf.run.atomic import atomic_write
from lrlhf.run.log_rows import hold_log_folders
from lrlhf.run.run_folder import run_folder
from lrlhf.run.secrets import HIDDEN, is_secret_name, remember, without_secrets

_logger = logging.getLogger(__name__)


def remember_secrets(files: Sequence[ConfigFile], arguments: Sequence[str]) -> None:
    """Have `hide` know the secrets of config files and of a command line."""
    found = [*_in_arguments(arguments)]
    for file in files:
        found += (
            node.value
            for keys, node in walk(file.root)
            if isinstance(node, yaml.ScalarNode)
            and any(map(is_secret_name, keys))
            and keys[-1] != "class_path"
        )
    remember(found)


def hide_hyperparameters(*parts: object) -> None:
    """Take the secrets out of the hyperparameters that loggers and checkpoints get."""
    for part in parts:
        if not isinstance(part, L.LightningModule | L.LightningDataModule) or not part.hparams:
            continue
        given = dict(part.hparams)
        plain = without_secrets(given)
        if any(_differences(given, plain, "")):
            part._set_hparams(plain)
            part._hparams_initial = deepcopy(part.hparams)  # type: ignore[union-attr]


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
        super().__init__(parser, shown, **options)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write the file whole, once it is sure that the folder is not another run's."""
        if self.already_saved:
            return
        if stage == "fit":
            hold_log_folders(trainer)
        folder = str(run_folder(trainer))
        if "://" in trainer.default_root_dir:
            super().setup(trainer, pl_module, stage)
            return
        if trainer.is_global_zero:
            # the config of the training stays what it is when its checkpoints are evaluated
            prefix = "" if stage == "fit" else f"{TrainerFn(stage).value}_"
            with atomic_write(Path(folder) / f"{prefix}{self.config_filename}") as handle:
                handle.write(self.parser.dump(self.config, skip_unset=False).encode())
        self.already_saved = trainer.strategy.broadcast(True)


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


def _in_arguments(arguments: Sequence[str]) -> Iterator[str]:
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            name, _, value = argument.removeprefix("--").partition("=")
            name = name.rpartition(".")[2].rstrip("+")
        else:
            value = argument
        if value and is_secret_name(name):
            yield value
