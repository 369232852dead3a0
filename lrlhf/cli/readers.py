"""Commands that read the config of ``fit`` and load no weights."""

from __future__ import annotations

import sys

from lightning.pytorch.cli import LightningArgumentParser

from lrlhf.cli.application import Application
from lrlhf.secrets import safe


class Reader(Application):
    """Reads the config of ``fit``, and builds nothing: the constructors would load weights."""

    def before_instantiate_classes(self) -> None:
        """Leave checks to the command itself, which says what it looks at."""

    def instantiate_classes(self) -> None:
        """Build nothing."""


class Checker(Reader):
    """Reads the config of ``fit`` and looks for mistakes; loads no weights and writes nothing.

    Args:
        arguments: Those of ``fit``, the command included.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.usage = "lrlhf check [--show ROWS] [the options of lrlhf fit]"
        parser.description = (
            "Look for mistakes in a config, its files and the first rows of its data, as fit does "
            "before it loads weights. Reward functions are called on made responses."
        )
        parser.add_argument(
            "--show", type=int, default=0, help="show so many rows: each token, and the loss mask"
        )

    def run_command(self, subcommand: str) -> None:
        del subcommand
        for finding in self.findings():
            sys.stdout.write(f"{safe(finding)}\n")
            sys.stdout.flush()
        sys.stdout.write("found no mistake in what was looked at\n")
