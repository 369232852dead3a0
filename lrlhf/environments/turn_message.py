"""A turn of the policy's as a message of a chat: its calls stand apart from what it says."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lrlhf.environments.tool_calls import MalformedCall, ToolCall, ToolCallFormat
from lrlhf.types import Message

_SPECIAL = re.compile(r"<[|\uff5c][^<>\s]*[|\uff5c]>|</?s>|\[/?[A-Z_]+\]")
"""What special tokens look like."""


def turn_message(
    text: str, raw: str, read_calls: ToolCallFormat | None, ids: Iterator[str]
) -> Message:
    """Return a turn as a message, with the calls in it, as chat templates take it.

    Args:
        text: Without special tokens; all of it is content if a call cannot be read.
        raw: With special tokens, which mark the calls of some models.
        read_calls: Finds calls; None: there is nothing to call.
        ids: Of the calls.
    """
    found = read_calls(raw) if read_calls is not None else ()
    calls = [one for one in found if isinstance(one, ToolCall)]
    if read_calls is None or not calls or len(calls) < len(found):
        return {"role": "assistant", "content": text}
    content = beside_calls(calls, text, raw, read_calls)
    return {
        "role": "assistant",
        "content": text if content is None else content,
        "tool_calls": [{"id": next(ids), **described(one)} for one in calls],
    }


def described(call: ToolCall) -> Mapping[str, Any]:
    """Return a call as chat templates take it."""
    return {
        "type": "function",
        "function": {"name": call.name, "arguments": dict(call.arguments)},
    }


def call_ids() -> Iterator[str]:
    """Go through ids of nine letters and digits, as Mistral's chat templates demand."""
    return (f"call{number % 100_000:05d}" for number in itertools.count(1))


def beside_calls(
    found: Sequence[ToolCall | MalformedCall], text: str, raw: str, read_calls: ToolCallFormat
) -> str | None:
    """Return what a turn says beside the calls that can be read.

    Args:
        found: In ``raw``.
        text: Without special tokens.
        raw: With special tokens.
        read_calls: Finds calls.

    Returns:
        None: the format does not tell where its calls are.
    """
    calls = [one for one in found if isinstance(one, ToolCall)]
    in_text = [one for one in read_calls(text) if isinstance(one, ToolCall)]
    if in_text == calls:
        calls, raw = in_text, text
    # else special tokens tell the calls
    shown = _shown(text, raw)
    for call in calls:
        if call.start is None or call.end is None:
            return None
        shown[call.start : call.end] = [False] * (call.end - call.start)
    return "".join(itertools.compress(raw, shown)).strip()


def _shown(text: str, raw: str) -> list[bool]:
    """Return which letters of a text with special tokens are those of the one without."""
    shown: list[bool] = []
    place = 0
    while len(shown) < len(raw):
        special = _SPECIAL.match(raw, len(shown))
        if special and not text.startswith(special[0], place):
            shown += [False] * len(special[0])
            continue
        same = text[place : place + 1] == raw[len(shown)]
        shown.append(same)
        place += same
    return shown
