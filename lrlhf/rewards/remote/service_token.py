"""The bearer token of a reward service: from the environment or a file, never from a config."""

from __future__ import annotations

import os
import re
from pathlib import Path

DEFAULT_TOKEN_ENV = "LRLHF_REWARD_TOKEN"
_VISIBLE = re.compile(r"[!-~]+")


def read_token(token_env: str, token_file: str | None) -> str | None:
    """Read the token that clients send and services want.

    Args:
        token_env: Environment variable that holds it.
        token_file: File that holds it, instead.

    Returns:
        None: there is none.

    Raises:
        ValueError: A file or a variable was named that is not there, or what it holds is no token.
    """
    token = os.environ.get(token_env)
    source = f"token_env {token_env!r}"
    if token_file is not None:
        source = f"token_file {token_file!r}"
        try:
            token = Path(token_file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{source} cannot be read: {type(error).__name__}") from error
    if token is None:
        if token_env != DEFAULT_TOKEN_ENV:
            raise ValueError(f"token_env is {token_env!r}, and there is no such variable: set it")
        return None
    token = token.strip()
    if not _VISIBLE.fullmatch(token):  # the token itself must not show up in a message
        raise ValueError(
            f"{source}: a token is one line of letters, digits and signs without spaces; write a "
            "new one, such as `openssl rand -hex 32` prints"
        )
    return token
