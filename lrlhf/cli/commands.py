"""Runs a command, and ends it with one clear message whatever goes wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from lrlhf.cli.command_table import COMMANDS, HELP_OF_CLASS, CommandKind
from lrlhf.cli.config_files import (
    ConfigFile,
    folders_of_own_code,
    read_config_files,
    remember_secrets,
    with_sources,
)
from lrlhf.cli.messages.exit_status import configure_output, end
from lrlhf.cli.replay_command import dump_and_options

_OF_LIGHTNING = ("fit", "validate", "test", "predict")


def run(arguments: Sequence[str], *, debug: bool = False) -> int:
    """Run one command of ``lrlhf``.

    Args:
        arguments: The command and its options, without ``--debug``.
        debug: Show tracebacks, and what other libraries log.

    Returns:
        The exit status, see `lrlhf.__main__.main`.
    """
    configure_output(debug=debug)
    files: list[ConfigFile] = []
    try:
        of_dump = arguments[0] == "replay"
        application, arguments = _application(arguments, debug=debug)
        files = read_config_files(arguments)
        remember_secrets(files, arguments)
        # last, so that a file of the user's never takes the place of an installed module
        known = {str(Path(entry).absolute()) for entry in sys.path}
        # a dump, whose config is the first, holds no code of the user's
        folders = folders_of_own_code(files[1:] if of_dump else files)
        sys.path += [folder for folder in folders if folder not in known]
        application(with_sources(arguments, files))
    except BaseException as error:  # noqa: BLE001  the outermost frame: everything ends in one line
        return end(error, files, arguments, debug=debug)
    return 0


def _application(
    arguments: Sequence[str], *, debug: bool
) -> tuple[Callable[[Sequence[str]], object], Sequence[str]]:
    """What runs a command, and the arguments that it reads."""
    name, *options = arguments
    command = COMMANDS.get(name, HELP_OF_CLASS)
    if command.kind is CommandKind.OPTIONS:
        return command.load(), options
    if name == "launch":
        return partial(command.load(), debug=debug), ["fit", *options]
    if name == "replay":
        folder, options = dump_and_options(options)
        return partial(command.load(), folder), ["fit", *options]
    return command.load(), [name if name in _OF_LIGHTNING else "fit", *options]
