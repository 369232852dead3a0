"""The commands of ``lrlhf``: LightningCLI with messages that name the culprit."""

from typing import TYPE_CHECKING

from lrlhf.lazy_exports import lazy_exports

# on demand: `lrlhf --help` reads the table of commands and needs none of it
if TYPE_CHECKING:
    from lrlhf.cli.start import run
    from lrlhf.options.errors import ConfigError
else:
    __getattr__ = lazy_exports(__name__)

__all__ = ["ConfigError", "run"]
