"""Commands that read the config of ``fit`` and load no weights."""

from __future__ import annotations

import sys

from lightning.pytorch.cli import LightningArgumentParser

from lrlhf.cli.application import Application, check_checkpoint
from lrlhf.cli.plan_command import add_plan_options, describe_run
from lrlhf.planning.checks.mistake import RefusedError
from lrlhf.planning.checks.trainer_options import check_strategy
from lrlhf.secrets import safe


class Reader(Application):
    """Reads the config of ``fit``, and builds nothing: the constructors would load weights."""

    def before_instantiate_classes(self) -> None:
        """Leave checks to the command itself, which says what it looks at."""

    def instantiate_classes(self) -> None:
        """Build nothing."""


class Planner(Reader):
    """Reads the config of ``fit`` and prints what it would do; builds and writes nothing.

    Args:
        arguments: Those of ``fit``, the command included.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.usage = "lrlhf plan [--gpus N] [--gpu NAME] [the options of lrlhf fit]"
        parser.description = (
            "Print the batch sizes, the steps and the memory of fit, without training."
        )
        add_plan_options(parser)

    def before_instantiate_classes(self) -> None:
        # the run may be meant for another machine, with other devices and data
        options = self.config[self.subcommand]
        check_checkpoint(options.ckpt_path)
        check_strategy(options.trainer)

    def run_command(self, subcommand: str) -> None:
        try:
            for number, paragraph in enumerate(describe_run(self.config[subcommand])):
                sys.stdout.write(f"\n{paragraph}\n" if number else f"{paragraph}\n")
                sys.stdout.flush()
        except ValueError as error:
            raise RefusedError from error


class Checker(Reader):
    """Reads the config of ``fit`` and looks for mistakes; loads no weights and writes nothing.

    Args:
        arguments: Those of ``fit``, the command included.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.usage = "lrlhf check [the options of lrlhf fit]"
        parser.description = (
            "Look for mistakes in a config, its files and the first rows of its data, as fit does "
            "before it loads weights."
        )

    def run_command(self, subcommand: str) -> None:
        del subcommand
        for finding in self.findings():
            sys.stdout.write(f"{safe(finding)}\n")
            sys.stdout.flush()
        sys.stdout.write("found no mistake in what was looked at\n")
