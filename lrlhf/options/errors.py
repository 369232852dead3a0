"""What is wrong with a command line or a config, and the nearest thing that would be right."""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Iterable

from lrlhf.secrets import safe

_MAX_LISTED = 16


class ConfigError(ValueError):
    """A config file or a flag that cannot be used; the message is all that the user is shown."""


class ValidationError(ConfigError):
    """A config that does not fit; the message is still the parser's nested report."""


class UserError(Exception):
    """The cause, which came up in a run, is about what the user wrote."""


def hint(word: str, accepted: Iterable[str], *, listed_as: str = "accepted") -> str:
    """Say what the user may have meant.

    Returns:
        A clause to append to a sentence: the nearest accepted word, else all of them when they
        are few, else nothing.
    """
    words = sorted(set(accepted))
    # what is abbreviated has little in common with the whole
    begun = [each for each in words if len(word) > 2 and each.startswith(word)]
    if len(begun) == 1:
        return f"; did you mean '{begun[0]}'?"
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; {listed_as}: {', '.join(words)}" if 0 < len(words) <= _MAX_LISTED else ""


def say_error(error: BaseException, text: str, *, status: int, show: bool) -> int:
    """Write why a command ends, with ``show`` the traceback before it, and return ``status``."""
    if show:
        sys.stderr.write(safe("".join(traceback.format_exception(error))))
    described = "; ".join([text, *getattr(error, "__notes__", ())])
    # a name with a line break in it, of a folder or in data, must not look like a line of ours
    sys.stderr.write("error: " + safe(described).replace("\n", "\n  ") + "\n")
    return status
