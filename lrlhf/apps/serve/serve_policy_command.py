"""``lrlhf serve-policy``: a policy behind OpenAI's chat completions, for agents."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from lrlhf.cli.command_parser import command_parser
from lrlhf.cli.generation_options import add_loading_options

TOKEN_ENV = "LRLHF_POLICY_TOKEN"
_EPILOG = f"""\
Clients give the address and the token that are printed as base_url and api_key. The token is that
of the environment variable {TOKEN_ENV}, else a new one. How turns are sampled is for these options
to say, not for requests; a request may only make its answer shorter, with max_tokens.

example:
  lrlhf serve-policy runs/openai_agent --record turns.jsonl
"""


def parser() -> argparse.ArgumentParser:
    """Return what reads the options."""
    parser = command_parser(
        "serve-policy",
        "Serve a policy to agents, as OpenAI's chat completions.",
        _EPILOG,
    )
    add_loading_options(parser)
    parser.add_argument("--host", default="127.0.0.1", help="default: this machine only")
    parser.add_argument("--port", type=int, default=8200, help="default: 8200; 0: any free one")
    parser.add_argument("--temperature", type=float, default=1.0, help="default: 1")
    parser.add_argument("--top_p", type=float, default=1.0, help="default: 1, all tokens")
    parser.add_argument("--max_new_tokens", type=int, default=512, help="default: 512")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--batch_size", type=int, default=16, help="turns at once; default: 16")
    parser.add_argument(
        "--record",
        type=Path,
        help=".jsonl file to which every turn is added, with its time, its token ids, their "
        "log-probabilities and the user that the request names",
    )
    return parser


def serve_policy(arguments: Sequence[str]) -> None:
    """Run the command until it is interrupted.

    Raises:
        ConfigError: Nothing that generates is there, or an option cannot be used.
        KeyboardInterrupt: When the user wants it to end.
    """
    given = parser().parse_args(arguments)
    # not at the top: it brings torch, which help does without
    import_module("lrlhf.apps.serve.policy_service").serve(given)
