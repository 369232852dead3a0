"""Tokens and passwords stay out of what a run writes and says.

They belong into the environment, or into files that options such as ``token_file`` name. Where one
stands in a config all the same, the saved config, the hyperparameters (and with them checkpoints,
W&B and dumps), log lines and error messages have ``***`` in its place.
"""

from __future__ import annotations

import logging
import os
import re
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

_logger = logging.getLogger(__name__)

HIDDEN = "***"
_NAME = re.compile(
    r"(^|.*[_.-])("
    r"api_?keys?|access_?keys?|secret(_?access)?(_?key)?|secrets|private_?key|passw(or)?ds?"
    r"|passphrase|credentials?|bearer|authorization"
    r"|(access|auth|api|bearer|bot|hub|hf|refresh|sas|service|session|reward|wandb|github)_?tokens?"
    r")|token",
    re.IGNORECASE,
)
"""Options whose value is a secret; ``eos_token``, ``max_tokens`` and ``token_file`` are none."""
_ADDRESS = re.compile(r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/?#@'\"]+@")
_SHORTEST = 8
"""Shorter values are words such as ``false``, which messages need."""
_known: set[str] = set()


def is_secret_name(name: str) -> bool:
    """Whether an option of this name holds a secret."""
    return _NAME.fullmatch(name) is not None


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
    _known.update(value for value in found if len(value) >= _SHORTEST)


def hide(text: str) -> str:
    """Put ``***`` in the place of every known secret, and of what stands before the @ of a URL."""
    in_environment = {
        value
        for name, value in os.environ.items()
        # a secret is one word: what has spaces, slashes or brackets is something else
        if is_secret_name(name) and re.fullmatch(rf"[^\s/<>|]{{{_SHORTEST},}}", value)
    }
    # the longest first, as one may contain another
    for secret in sorted(_known | in_environment, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", HIDDEN, text)
    return _ADDRESS.sub(rf"\g<scheme>{HIDDEN}@", text)


def without_secrets(value: Any, *, secret: bool = False) -> Any:
    """Copy a config, with ``***`` for the secrets in it.

    Args:
        value: Mappings, namespaces and lists are gone through; other objects stay what they are.
        secret: Whether the whole value stands under the name of a secret.
    """
    if isinstance(value, Namespace):
        items = without_secrets(vars(value), secret=secret)
        return Namespace(**items)  # type: ignore[no-untyped-call]
    if isinstance(value, Mapping):
        items = {
            key: without_secrets(
                part, secret=(secret or is_secret_name(str(key))) and key != "class_path"
            )
            for key, part in value.items()
        }
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if type(value) in (list, tuple):
        return type(value)(without_secrets(item, secret=secret) for item in value)
    # digits alone are a number in YAML; a short one is no password
    long_number = isinstance(value, int) and value > 99_999
    if secret and value and (isinstance(value, str) or long_number):
        return HIDDEN
    return hide(value) if isinstance(value, str) else value


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
