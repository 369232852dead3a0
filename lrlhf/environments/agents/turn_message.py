"""A turn of the policy's as a message of a chat."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from lrlhf.environments.session import described
from lrlhf.environments.tool_calls import ToolCall, ToolCallFormat
from lrlhf.types import Message


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
    return {
        "role": "assistant",
        "content": _before(calls[0], text, raw, read_calls),
        "tool_calls": [{"id": next(ids), **described(one)} for one in calls],
    }


def call_ids() -> Iterator[str]:
    """Go through ids of nine letters and digits, as Mistral's chat templates demand."""
    return (f"call{number % 100_000:05d}" for number in itertools.count(1))


def _before(first: ToolCall, text: str, raw: str, read_calls: ToolCallFormat) -> str:
    """Return what a turn says before its first call."""
    in_text = [one.start for one in read_calls(text) if isinstance(one, ToolCall)]
    if in_text:
        return text[: in_text[0]].rstrip()
    # special tokens tell the calls: the two texts differ from the first one on
    pairs = zip(text, raw[: first.start], strict=False)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
    return "".join(letter for letter, _ in same).rstrip()
