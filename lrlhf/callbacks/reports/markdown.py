"""Markdown in which the texts of users and models are texts only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from lrlhf.secrets import escaped

_FENCES = re.compile("`{3,}")


def inert(text: str) -> str:
    """Keep Markdown and HTML from reading a text: every sign that could open either is escaped.

    A line break becomes a visible one, so that the text stays in its cell or paragraph.
    """
    shown = escaped(text).replace("\t", "\\t").replace("\n", "\\n")
    return "".join(
        f"&#{ord(character)};" if character in "\\`*_{}[]()<>#+-!|&~:@" else character
        for character in shown
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Draw a table; its cells are Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


def fenced(text: str, language: str) -> str:
    """Draw a block of code that nothing inside it can end."""
    longest = max((len(run) for run in _FENCES.findall(text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{escaped(text).rstrip()}\n{fence}"
