"""The commands of ``lrlhf``: LightningCLI with messages that name the culprit."""

from lrlhf.cli.application import run
from lrlhf.cli.messages.errors import ConfigError

__all__ = ["ConfigError", "run"]
