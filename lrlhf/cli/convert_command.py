"""``lrlhf convert``: checkpoints from one form into the other."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from lrlhf.cli.command_parser import command_parser
from lrlhf.cli.messages.exit_status import blaming_user
from lrlhf.run.checkpoints.checkpoint_reader import is_folder_checkpoint
from lrlhf.run.checkpoints.sharded_checkpoint import convert_checkpoint
from lrlhf.secrets import safe


def convert(arguments: Sequence[str]) -> None:
    """Run the command with its options.

    Raises:
        UserError: The target exists, or the source is no checkpoint.
    """
    parser = command_parser("convert", "Turn a checkpoint into the other of its two forms.", "")
    parser.add_argument("source", type=Path, help="checkpoint to read")
    parser.add_argument("target", type=Path, help="checkpoint to write; must not exist")
    parser.add_argument("--to", choices=("sharded", "full"), help="default: what SOURCE is not")
    options = parser.parse_args(arguments)
    to: Literal["sharded", "full"]
    with blaming_user():
        to = options.to or ("full" if is_folder_checkpoint(options.source) else "sharded")
        convert_checkpoint(options.source, options.target, to)
    sys.stdout.write(safe(f"wrote {options.target}\n"))
