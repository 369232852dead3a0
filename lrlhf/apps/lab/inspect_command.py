"""``lrlhf inspect``: one page with the curves and the responses of runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lrlhf.cli.command_parser import command_parser
from lrlhf.options.errors import ConfigError
from lrlhf.secrets import safe

_EPILOG = """\
The page is one file, which opens from disk and loads nothing. Responses that do not fit are left
out evenly over the steps, and the top of the page says how many.

examples:
  lrlhf inspect runs/quickstart
  lrlhf inspect runs/seed_1 runs/seed_2 --output seeds.html
"""


def parser() -> argparse.ArgumentParser:
    """Return what reads the options."""
    parser = command_parser(
        "inspect", "Write a page with the curves and the responses of runs.", _EPILOG
    )
    parser.add_argument(
        "runs", metavar="RUN", type=Path, nargs="+", help="folder of a run (default_root_dir)"
    )
    parser.add_argument(
        "--output", type=Path, help="the page; default: inspect.html in the folder of the first run"
    )
    parser.add_argument(
        "--responses",
        type=_count,
        help="responses of all runs in the page at most; default: 10000, or as many as 20 MB hold",
    )
    parser.add_argument(
        "--media_root",
        type=Path,
        help="folder whose images the page may embed; default: those of the runs, and their "
        "media.root below the working folder",
    )
    return parser


def inspect(arguments: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: A folder or file cannot be used.
    """
    options = parser().parse_args(arguments)
    output = options.output or options.runs[0] / "inspect.html"
    # not at the top: help needs none of it
    from lrlhf.apps.lab.inspector import write_inspector  # noqa: PLC0415

    try:
        note = write_inspector(
            options.runs, output, max_responses=options.responses, media_root=options.media_root
        )
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(str(error)) from error
    sys.stdout.write(safe(f"{note}\n"))


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return count
