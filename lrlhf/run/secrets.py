"""Which options hold tokens and passwords, and how these stay out of what a run writes and says."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jsonargparse import Namespace

HIDDEN = "***"
_NAME = re.compile(
    r"(^|.*[_.-])("
    r"api_?keys?|access_?keys?|secret(_?access)?(_?key)?|secrets|private_?key|passw(or)?ds?"
    r"|passphrase|credentials?|bearer|authorization"
    r"|(access|auth|api|bearer|bot|hub|hf|refresh|sas|service|session|reward|wandb|github)_?tokens?"
    r")|token",
    re.IGNORECASE,
)
"""Options whose value is a secret; ``eos_token``, ``max_tokens`` and ``token_file`` are none."""
_ADDRESS = re.compile(r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/?#@'\"]+@")
_SHORTEST = 8
"""Shorter values are words such as ``false``, which messages need."""
_known: set[str] = set()


def is_secret_name(name: str) -> bool:
    """Whether an option of this name holds a secret."""
    return _NAME.fullmatch(name) is not None


def remember(values: Iterable[str]) -> None:
    """Have `hide` know further secrets."""
    _known.update(value for value in values if len(value) >= _SHORTEST)


def hide(text: str) -> str:
    """Put ``***`` in the place of every known secret, and of what stands before the @ of a URL."""
    in_environment = {
        value
        for name, value in os.environ.items()
        # a secret is one word: what has spaces, slashes or brackets is something else
        if is_secret_name(name) and re.fullmatch(rf"[^\s/<>|]{{{_SHORTEST},}}", value)
    }
    # the longest first, as one may contain another
    for secret in sorted(_known | in_environment, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", HIDDEN, text)
    return _ADDRESS.sub(rf"\g<scheme>{HIDDEN}@", text)


def without_secrets(value: Any, *, secret: bool = False) -> Any:
    """Copy a config, with ``***`` for the secrets in it.

    Args:
        value: Mappings, namespaces and lists are gone through; other objects stay what they are.
        secret: Whether the whole value stands under the name of a secret.
    """
    if isinstance(value, Namespace):
        items = without_secrets(vars(value), secret=secret)
        return Namespace(**items)  # type: ignore[no-untyped-call]
    if isinstance(value, Mapping):
        items = {
            key: without_secrets(
                part, secret=(secret or is_secret_name(str(key))) and key != "class_path"
            )
            for key, part in value.items()
        }
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if type(value) in (list, tuple):
        return type(value)(without_secrets(item, secret=secret) for item in value)
    # digits alone are a number in YAML; a short one is no password
    long_number = isinstance(value, int) and value > 99_999
    if secret and value and (isinstance(value, str) or long_number):
        return HIDDEN
    return hide(value) if isinstance(value, str) else value


def safe(text: str) -> str:
    """Make a text fit for a terminal: what a secret is hidden, what is no print is escaped.

    Messages quote data, and a terminal acts on escape sequences wherever they come from.
    """
    return "".join(
        character
        if character.isprintable() or character in "\n\t"
        else character.encode("unicode_escape", "surrogatepass").decode()
        for character in hide(text)
    )
