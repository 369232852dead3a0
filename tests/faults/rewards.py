"""A reward that differs between almost any two responses, of text and of chats."""

from collections.abc import Mapping, Sequence
from typing import Any


def letters(completions: Sequence[str | Sequence[Mapping[str, Any]]]) -> list[float]:
    """Share of the characters that are ASCII letters."""
    texts = [one if isinstance(one, str) else str(one[0]["content"]) for one in completions]
    return [sum(c.isascii() and c.isalpha() for c in text) / max(len(text), 1) for text in texts]
