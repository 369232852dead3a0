"""The first second of a command: reads its config files, says so, and loads what takes longer.

Nothing that imports torch may be imported at the top of this file: a file that cannot be read is
refused at once.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version

from lrlhf.cli.command_table import COMMANDS, HELP_OF_CLASS, REWARDS_OF_RUN, CommandKind
from lrlhf.cli.config_files import ConfigFile, config_arguments, read_config_files, remember_secrets
from lrlhf.cli.shipped_configs import with_files
from lrlhf.options.errors import ConfigError, say_error
from lrlhf.secrets import safe

_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
_INTERRUPTED = 130


def run(arguments: Sequence[str], *, debug: bool = False) -> int:
    """Run one command of ``lrlhf``.

    Args:
        arguments: The command and its options, without ``--debug``.
        debug: Show tracebacks, and what other libraries log.

    Returns:
        The exit status, see `lrlhf.__main__.main`.
    """
    try:
        arguments = with_files(arguments)
        command = COMMANDS.get(arguments[0], HELP_OF_CLASS)
        if arguments[0] == "reward" and not _runs_rewards(arguments):
            command = REWARDS_OF_RUN
        if command.kind is CommandKind.FILES:
            command.load()(arguments[1:])
            return 0
        files = read_config_files(arguments)
        remember_secrets(files, arguments)
        run_command = _load(files)
    except ConfigError as error:
        return say_error(error, str(error), status=2, show=debug)
    except KeyboardInterrupt as error:
        return say_error(error, "interrupted", status=_INTERRUPTED, show=debug)
    return run_command(arguments, debug=debug)


def _runs_rewards(arguments: Sequence[str]) -> bool:
    """Tell whether ``reward`` has the options of ``fit``, which a config goes with."""
    return bool(config_arguments(arguments) or "--help" in arguments)


def _load(files: Sequence[ConfigFile]) -> Callable[..., int]:
    """Import what runs commands: torch, Lightning, transformers and all of lrlhf."""
    if "torch" in sys.modules:
        return import_module("lrlhf.cli.commands").run  # type: ignore[no-any-return]
    if all(os.environ.get(name, "0") == "0" for name in _RANKS):
        read = safe(", ".join(file.path for file in files)).replace("\n", "\\n")
        sys.stderr.write(f"lrlhf {version('lrlhf')}: {f'read {read}; ' if read else ''}")
        sys.stderr.write("loading torch ...\n")
        sys.stderr.flush()
    with _nothing_is_garbage():
        return import_module("lrlhf.cli.commands").run  # type: ignore[no-any-return]


@contextmanager
def _nothing_is_garbage() -> Iterator[None]:
    """Spare the garbage collector all that is made inside, now and for good.

    Imports make a million objects that live as long as the process. To look through them again and
    again took a third of the time of the imports.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        # else libraries that count what is left over at the end (triton's nanobind) complain of it
        atexit.register(gc.unfreeze)
