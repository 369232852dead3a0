"""The commands of ``lrlhf``: LightningCLI with messages that name the culprit."""

from typing import TYPE_CHECKING

from lrlhf.lazy_exports import lazy_exports

# on demand: `lrlhf --help` reads the table of commands and needs none of it
if TYPE_CHECKING:
    from lrlhf.cli.messages.errors import ConfigError
    from lrlhf.cli.start import run
else:
    __getattr__ = lazy_exports(__name__)

__all__ = ["ConfigError", "run"]
