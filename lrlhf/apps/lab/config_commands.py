"""The commands ``audit`` and ``reward``, which read the config of ``fit`` and load no policy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import lightning as L
from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from lrlhf.apps.lab.audit import as_json, as_page, as_text, audit
from lrlhf.apps.lab.reward_command import add_reward_options, run_rewards
from lrlhf.apps.lab.run_files import check_output, write_json
from lrlhf.cli.application import Reader
from lrlhf.cli.checks.config_objects import ConfigObjects
from lrlhf.cli.checks.data_rows import taken_from
from lrlhf.cli.checks.models import check_models
from lrlhf.cli.config_entries import options_of
from lrlhf.datamodules import RowDataModule
from lrlhf.options.errors import MistakeError
from lrlhf.secrets import safe


def audit_data(config: Namespace, build: Callable[[], L.LightningDataModule]) -> None:
    """Look at all rows of the data of a config, and print and write what was found.

    Args:
        config: Parsed.
        build: Makes the data module.

    Raises:
        ConfigError: An output cannot be written.
        MistakeError: The data cannot be looked at.
    """
    sections = config.as_dict()
    for name in ("json", "html"):
        check_output(name, sections[name])
    model = sections["model"]
    trained = check_models(model)
    trainer = SimpleNamespace() if trained is None else taken_from(model, trained)
    if sections.get("data") is None:
        raise MistakeError(("data",), "audit needs a config with data")
    data = build()
    if not isinstance(data, RowDataModule):
        raise MistakeError(
            ("data",),
            f"{type(data).__name__} is no data module whose rows can be looked at one by one; use "
            "PromptDataModule, PreferenceDataModule or SupervisedDataModule",
        )
    room = options_of(options_of(model).get("sampling")).get("max_new_tokens")
    try:
        result = audit(
            data,
            trainer,
            context=None if trained is None else trained.context,
            new_tokens=room or 0,
        )
    except ValueError as error:
        raise MistakeError(("data",), str(error)) from error
    sys.stdout.write(safe(f"{as_text(result)}\n"))
    if sections["html"] is not None:
        as_page(result, sections["html"], "Audit of the data")
    if sections["json"] is not None:
        write_json(sections["json"], as_json(result))


class Auditor(Reader):
    """Reads the config of ``fit`` and looks for faults in its data; loads no weights.

    Args:
        arguments: Those of ``fit``, the command included.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.usage = "lrlhf audit [--json FILE] [--html FILE] [the options of lrlhf fit]"
        parser.description = "Look for faults in all rows of the training and validation data."
        parser.add_argument(
            "--json", type=str | None, help="file for all findings with all their rows"
        )
        parser.add_argument("--html", type=str | None, help="file for a page of the findings")

    def run_command(self, subcommand: str) -> None:
        options = self.config[subcommand]
        audit_data(options, ConfigObjects(options).data)


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
        run_rewards(options, ConfigObjects(options).all_rewards)
