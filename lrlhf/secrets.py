"""Which options hold tokens and passwords, and how these stay out of what a run writes and says.

Nothing outside the standard library may be imported here, see `lrlhf.__main__`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

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
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u2028-\u202e\u2066-\u2069]")
"""Controls but line breaks and tabs, halves of surrogate pairs, and what turns lines around."""
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


def safe(text: str) -> str:
    """Make a text fit for a terminal: what is a secret is hidden, what it would act on escaped."""
    return escaped(hide(text))


def escaped(text: str) -> str:
    """Write as escape sequences what a terminal would act on, or could not encode.

    Messages quote data, and a terminal acts on control sequences wherever they come from.
    """
    return _UNSAFE.sub(
        lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text
    )
