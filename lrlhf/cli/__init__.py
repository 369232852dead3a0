"""The commands of ``lrlhf``: LightningCLI with messages that name the culprit."""

from lrlhf.cli.messages.errors import ConfigError
from lrlhf.cli.start import run

__all__ = ["ConfigError", "run"]
