"""Entry point that answers help, version and misspelt commands without importing Lightning.

Importing torch and Lightning takes seconds; a person who asks which commands there are should not
wait for them. Nothing that imports more than the standard library may be imported at the top of
this file.
"""

import atexit
import contextlib
import difflib
import gc
import io
import os
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any, NoReturn

from lrlhf.cli.command_table import COMMANDS, CommandKind
from lrlhf.threads import spin_briefly

_REFUSED = 2
_HELP = """\
usage: lrlhf COMMAND --config FILE [--config OVERLAY ...] [--KEY VALUE ...] [--debug]

Reward models and RLHF policies as PyTorch Lightning modules.

commands:
{commands}

examples:
  lrlhf fit --config lrlhf:quickstart
  lrlhf fit --config lrlhf:quickstart --trainer.max_steps 20 --model.optimizer.lr 1e-5
  lrlhf fit --config lrlhf:quickstart --ckpt_path last     continue where it stopped
  lrlhf fit --config lrlhf:quickstart --print_config       every option and its value
  lrlhf check --config lrlhf:quickstart                    what is wrong with a config
  lrlhf plan --config lrlhf:quickstart                     what fit would do, in numbers
  lrlhf help LearnedReward                                        what a class accepts
  lrlhf serve-reward --model.source runs/reward_text/export/final a reward model over HTTP

options:
  -h, --help   this text; `lrlhf COMMAND --help` explains a command, --help.all lists all options
  --version    the version of lrlhf
  --debug      show tracebacks and what other libraries log; LRLHF_DEBUG=1 does the same
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Arguments without the program's name; None: those of this process.

    Returns:
        The exit status: 0 done, 1 the run failed, 2 the command line or a config is wrong, 3 a
        replayed step did not go wrong again, 130 interrupted, 143 terminated.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments or os.environ.get("LRLHF_DEBUG", "") not in {"", "0"}
    arguments = [argument for argument in arguments if argument != "--debug"]
    of_class = arguments[:1] == ["help"] and any(map(_names_class, arguments[1:2]))
    if arguments[:1] == ["help"] and not of_class:
        arguments = [*arguments[1:2], "--help"]
    if not arguments or arguments[0] in {"-h", "--help"}:
        listing = "\n".join(f"  {name:<12} {command.summary}" for name, command in COMMANDS.items())
        sys.stdout.write(_HELP.format(commands=listing))
        return 0
    if arguments[0] in {"--version", "-V"}:
        sys.stdout.write(f"lrlhf {version('lrlhf')}\n")
        return 0
    if arguments[0] not in COMMANDS and not of_class:
        return _refuse(arguments[0])
    if not of_class and {"-h", "--help"} & set(arguments[1:]):
        command = COMMANDS[arguments[0]]
        if shown := import_module("lrlhf.cli.help_texts").help_text(arguments[0]):
            sys.stdout.write(shown)
            return 0
        if command.kind is not CommandKind.FIT:
            import_module(command.module).parser().print_help()
            return 0
    arguments = ["--help" if argument == "--help.all" else argument for argument in arguments]
    spin_briefly()  # before torch is loaded
    run = import_module("lrlhf.cli").run
    status: int = run(arguments, debug=debug)
    return status


def _names_class(word: str) -> bool:
    """Whether it is the name of a class rather than of a command."""
    return word[:1].isupper() or "." in word


def _refuse(word: str) -> int:
    if word.startswith("-"):
        hint = f"the command comes first: lrlhf {{{','.join(COMMANDS)}}} {word} ..."
    else:
        close = difflib.get_close_matches(word, COMMANDS, n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"there are {', '.join(COMMANDS)}"
    sys.stderr.write(f"error: no command {word!r}; {hint}\n")
    return _REFUSED


def console() -> NoReturn:
    """Run the command of this process, and end it."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a terminal cannot show is no error
        sys.stdout.reconfigure(errors="backslashreplace")
    end_process(main())


def end_process(status: int) -> NoReturn:
    """End this process without taking apart what it has imported.

    Python would free each object of torch and of all else, which takes seconds and gives nothing
    back that the operating system does not take. What a program may count on is done as Python does
    it: threads end, functions of ``atexit`` run (child processes, process groups, wandb, Ray), and
    open files are written to the end.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing ends its processes
        atexit._run_exitfuncs()
    finally:
        try:
            _finish_files()
        finally:
            os._exit(status)


def _package(value: object) -> str:
    return str(type(value).__module__).partition(".")[0]  # some types have a descriptor there


_CLOSED_LATE = {"zipfile", "tarfile", "tempfile", "pyarrow", "h5py"}
"""Packages whose files get their end when they are freed."""


def _finish_files() -> None:
    """Write what is left in the buffers of Python, and of C."""
    kind = io.IOBase.__base__  # that of C: to ask the abstract class takes seconds
    assert kind is not None
    objects = gc.get_objects()
    files: list[Any] = [each for each in objects if issubclass(type(each), kind)]
    written = [sys.stdout, sys.stderr, *files]
    # those of gzip and its like end with a check sum, which may go into another file
    ends = [file for file in files if _package(file) != "_io"]
    ends += [each for each in objects if _package(each) in _CLOSED_LATE]
    # texts go into them before, and what they end with goes into others after
    for action, chosen in (("flush", written), ("close", ends), ("flush", written)):
        for each in chosen:
            with contextlib.suppress(Exception):  # closed, half freed, or the reader has gone
                getattr(each, action)()
    if "ctypes" in sys.modules:
        sys.modules["ctypes"].CDLL(None).fflush(None)


if __name__ == "__main__":
    console()
