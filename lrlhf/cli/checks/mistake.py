"""What a check raises."""

from __future__ import annotations

from collections.abc import Sequence


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
