"""``lrlhf generate``: a file of prompts in, a file of responses out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from lrlhf.cli.command_parser import add_loading_options, command_parser
from lrlhf.secrets import safe

_EPILOG = """\
A line of the output has the row's number, its prompt, the completion, why it ended (stop, length,
or prompt_too_long for a prompt that leaves no room), its length in tokens, and the row's other
columns. A run's prompts and sampling are those of its config unless options say otherwise. A
command that was interrupted goes on where it was when it is given again.

example:
  lrlhf generate runs/quickstart prompts.jsonl --output answers.jsonl --temperature 0
"""


def parser() -> argparse.ArgumentParser:
    """Return what reads the options."""
    parser = command_parser("generate", "Answer a file of prompts.", _EPILOG)
    add_loading_options(parser)
    parser.add_argument(
        "prompts",
        metavar="PROMPTS",
        type=Path,
        help=".jsonl, .json, .csv or .parquet (also .gz) with a column of prompts, text or "
        "messages; .txt: a prompt per line",
    )
    parser.add_argument("--output", type=Path, required=True, help=".jsonl file; must not exist")
    parser.add_argument("--n", type=int, default=1, help="responses to each prompt; default: 1")
    parser.add_argument("--max_new_tokens", type=int, help="default: as in the run, else 512")
    parser.add_argument("--temperature", type=float, help="default: as in the run, else 1")
    parser.add_argument("--top_p", type=float)
    parser.add_argument("--top_k", type=int)
    parser.add_argument("--min_p", type=float)
    parser.add_argument("--stop", action="append", help="ends a response; may be given again")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--batch_size", type=int, default=16, help="responses at once; default: 16")
    parser.add_argument("--prompt_column", help="default: prompt")
    parser.add_argument("--prompt_template", help="jinja2 template over the columns, instead")
    parser.add_argument(
        "--as_chat",
        action=argparse.BooleanOptionalAction,
        help="make a text the user's turn of a chat; default: as in the run, which an exported "
        "folder does not tell",
    )
    parser.add_argument("--system_prompt", help="of every chat that has none")
    return parser


def generate(arguments: Sequence[str]) -> None:
    """Run the command.

    Raises:
        ConfigError: A file, a row or an option cannot be used.
    """
    options = parser().parse_args(arguments)
    # not at the top: it brings torch, which help does without
    summary = import_module("lrlhf.cli.batch_generation").answer_file(options)
    sys.stdout.write(safe(f"{summary}\n"))
