"""Tokens and passwords stay out of what a run writes and says.

They belong into the environment, or into files that options such as ``token_file`` name. Where one
stands in a config all the same, the saved config, the hyperparameters (and with them checkpoints,
W&B and dumps), log lines and error messages have ``***`` in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import yaml

from lrlhf.cli.config_files import ConfigFile, walk
from lrlhf.secrets import is_secret_name, remember


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
