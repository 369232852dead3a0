"""The commands ``audit`` and ``reward``, which read the config of ``fit`` and load no policy."""

from __future__ import annotations

from lightning.pytorch.cli import LightningArgumentParser

from lrlhf.apps.lab.audit_command import add_audit_options, audit_data
from lrlhf.apps.lab.reward_command import add_reward_options, run_rewards
from lrlhf.cli.cheap_parts import CheapParts
from lrlhf.cli.readers import Reader


class Auditor(Reader):
    """Reads the config of ``fit`` and looks for faults in its data; loads no weights.

    Args:
        arguments: Those of ``fit``, the command included.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.usage = "lrlhf audit [--json FILE] [--html FILE] [the options of lrlhf fit]"
        parser.description = "Look for faults in all rows of the training and validation data."
        add_audit_options(parser)

    def run_command(self, subcommand: str) -> None:
        options = self.config[subcommand]
        audit_data(options, CheapParts(options).data)


class RewardRunner(Reader):
    """Builds the rewards of a ``fit`` config, and runs them over given responses.

    Args:
        arguments: Those of ``fit``, the command included.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.usage = (
            "lrlhf reward --config FILE RESPONSES [--json FILE] [--html FILE] "
            "[the options of lrlhf fit]"
        )
        parser.description = "Tell what the rewards of a config say of given responses."
        add_reward_options(parser)

    def run_command(self, subcommand: str) -> None:
        options = self.config[subcommand]
        run_rewards(options, CheapParts(options).all_rewards)
