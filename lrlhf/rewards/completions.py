"""What rewards read of a completion, whether it is plain text or a chat turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Completion = str | Sequence[Mapping[str, Any]]
"""Plain text, or the turns that the policy added to a chat."""


def completion_text(completion: Completion) -> str:
    """Text of a completion; of a chat, the contents of its turns, one after the other."""
    if isinstance(completion, str):
        return completion
    return "\n".join(str(turn["content"]) for turn in completion)
