"""``lrlhf chat``: talk with a policy in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from lrlhf.cli.command_parser import add_loading_options, command_parser
from lrlhf.secrets import safe

_COMMANDS = """\
commands:
  /reset            forget the conversation
  /system TEXT      set the system prompt, /system alone removes it
  /temperature X    0 takes the likeliest token
  /max_new_tokens N
  /help             these lines
  /exit             or Ctrl-D; Ctrl-C stops an answer
"""


def parser() -> argparse.ArgumentParser:
    """Return what reads the options."""
    parser = command_parser(
        "chat",
        "Talk with a policy in the terminal. Lines from a pipe are a turn each.",
        f"{_COMMANDS}\nexample:\n  lrlhf chat runs/quickstart",
    )
    add_loading_options(parser)
    parser.add_argument("--system", help="system prompt; default: that of the run's data, if any")
    parser.add_argument("--temperature", type=float, default=0.7, help="default: 0.7")
    parser.add_argument("--top_p", type=float, default=1.0, help="default: 1, all tokens")
    parser.add_argument("--max_new_tokens", type=int, default=512, help="default: 512")
    parser.add_argument("--seed", type=int, help="default: another one each time")
    parser.add_argument(
        "--plain", action="store_true", help="go on with the text, without a chat template"
    )
    return parser


def chat(arguments: Sequence[str]) -> None:
    """Run the command until the user leaves.

    Raises:
        ConfigError: Nothing that generates is there, or an option is out of its range.
    """
    options = parser().parse_args(arguments)
    # not at the top: it brings torch, which help does without
    conversation = import_module("lrlhf.apps.serve.conversation").open_conversation(options)
    _remark(f"{conversation.opening}; /help lists the commands")
    for line in _lines():
        if not line.strip():
            continue
        if not line.startswith("/"):
            conversation.say(line)
        elif line.split()[0] in {"/exit", "/quit"}:
            return
        elif line.split()[0] == "/help":
            sys.stderr.write(_COMMANDS)
        else:
            _remark(conversation.command(*_split(line)))


def _split(line: str) -> tuple[str, str]:
    name, _, value = line[1:].partition(" ")
    return name.strip(), value.strip()


def _remark(text: str) -> None:
    sys.stderr.write(safe(f"[{text}]\n"))
    sys.stderr.flush()


def _lines() -> Iterator[str]:
    """Go through what the user writes, until the end of the input."""
    stdin: Any = sys.stdin
    if not stdin.isatty():
        if hasattr(stdin, "reconfigure"):
            stdin.reconfigure(errors="replace")
        yield from (line.rstrip("\r\n") for line in stdin)
        return
    with contextlib.suppress(ImportError):
        import_module("readline")  # input() then knows the lines before
    while True:
        try:
            yield input("> ")
        except EOFError:
            sys.stdout.write("\n")
            return
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            _remark("Ctrl-D or /exit leaves")
