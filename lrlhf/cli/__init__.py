"""The commands of ``lrlhf``: LightningCLI with messages that name the culprit."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lrlhf.cli.messages.errors import ConfigError
    from lrlhf.cli.start import run

__all__ = ["ConfigError", "run"]


def __getattr__(name: str) -> Any:
    # on demand: `lrlhf --help` reads the table of commands and needs none of it
    if name in __all__:
        return getattr(import_module("lrlhf.cli.start"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
