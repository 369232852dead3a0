"""What is wrong with a command line or a config, and the nearest thing that would be right."""

from __future__ import annotations

import difflib
import pkgutil
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

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
    if near := nearest(word, words):
        return near
    return f"; {listed_as}: {', '.join(words)}" if 0 < len(words) <= _MAX_LISTED else ""


def nearest(word: str, accepted: Iterable[str]) -> str:
    """Return a clause with the nearest accepted word; empty: none is near."""
    words = sorted(set(accepted))
    # what is abbreviated has little in common with the whole
    begun = [each for each in words if len(word) > 2 and each.startswith(word)]
    if len(begun) == 1:
        return f"; did you mean '{begun[0]}'?"
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return ""


def nearest_module(name: str, folders: Sequence[str] = ()) -> str:
    """Return the importable module whose name is nearest to one that is not; empty: none is near.

    Args:
        name: The misspelt name, of a module that is in no other.
        folders: Where code is found besides the installed packages.
    """
    known = {module.name for path in (None, folders) for module in pkgutil.iter_modules(path)}
    # lrlhf is not among them where it is installed from a clone
    return next(iter(difflib.get_close_matches(name, {*known, "lrlhf"}, n=1, cutoff=0.75)), "")


def no_package(source: str, module: str) -> str:
    """Say that a ``package:`` source is of a package that is not installed, and what to do."""
    near = nearest_module(module)
    advice = f"pip install --no-deps {module.replace('_', '-') or '<name>'}"
    advice = f"did you mean 'package:{near}'?" if near else f"run `{advice}`"
    return f"source {source!r}: the package {module!r} is not installed; {advice}"


def nearest_path(path: Path) -> str:
    """Say which entry beside a missing path has the nearest name, or where it was looked for."""
    folder = path.parent
    if not folder.is_dir():
        return f" (nor is there a folder {str(folder)!r})"
    near = nearest(path.name, (entry.name for entry in folder.iterdir()))
    return near or f" in {str(folder.resolve())!r}"


def say_error(error: BaseException, text: str, *, status: int, show: bool) -> int:
    """Write why a command ends, with ``show`` the traceback before it, and return ``status``."""
    if show:
        sys.stderr.write(safe("".join(traceback.format_exception(error))))
    described = "; ".join([text, *getattr(error, "__notes__", ())])
    # a name with a line break in it, of a folder or in data, must not look like a line of ours
    sys.stderr.write("error: " + safe(described).replace("\n", "\n  ") + "\n")
    return status


class MistakeError(ValueError):
    """Something in a config that cannot work.

    Args:
        key: The option that it is about, from the outside in, ``init_args`` left out.
        sentence: What is wrong, and what to do instead.
        value: What the config has there; tells one entry of a list from the others.
    """

    def __init__(self, key: Sequence[str], sentence: str, *, value: str | None = None) -> None:
        super().__init__(sentence)
        self.key = tuple(key)
        self.value = value


class RefusedError(Exception):
    """A class of the config refused its arguments; the cause is what jsonargparse reported."""
