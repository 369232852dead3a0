"""Options of the commands that have no config."""

from __future__ import annotations

import argparse
from typing import NoReturn

from lrlhf.foreign_files import TRUST_FLAG
from lrlhf.secrets import safe


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors, which quote names of files, are fit for a terminal."""

    def error(self, message: str) -> NoReturn:
        super().error(safe(message))


def command_parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Return a parser without options yet.

    Args:
        name: Of the command.
        description: What it does, in a sentence.
        epilog: What help says below the options, line by line as it is.
    """
    return CommandParser(
        prog=f"lrlhf {name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


SOURCE_HELP = (
    "a run's folder (its newest checkpoint), a checkpoint, an exported folder, a .gguf file, "
    "package:<module> or a hub id"
)


def add_loading_options(parser: argparse.ArgumentParser) -> None:
    """Add what says how the model is loaded."""
    parser.add_argument("source", metavar="CHECKPOINT", help=SOURCE_HELP)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights; default: as stored, of a checkpoint as in the run",
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda or cuda:1; default: a GPU where there is one"
    )
    parser.add_argument(
        TRUST_FLAG,
        action="store_true",
        help="run Python code that comes with the model, or that its run's config names",
    )
    parser.add_argument(
        "--use_ema", action="store_true", help="the averaged weights of a checkpoint (EMA)"
    )
