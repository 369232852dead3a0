"""Finding the prompt that two whole conversations share."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lrlhf.types import Message

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"

_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def is_transcript(text: str) -> bool:
    """Whether ``text`` is written as Anthropic's HH-RLHF data is."""
    return text.startswith(HUMAN) and ASSISTANT in text


def shared_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Number of leading elements that are equal."""
    low, high = 0, min(len(first), len(second))
    while low < high:  # comparing slices is far faster than going element by element
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def split_texts(first: str, second: str) -> tuple[str, str, str]:
    """Split two texts into the prompt that they share, and the rest of each.

    Transcripts part after the last ``Assistant:`` that both have, so that an answer is a whole
    turn even where both answers begin alike; other texts part at the last white space of what
    they share.
    """
    shared = first[: shared_length(first, second)]
    if is_transcript(first) and is_transcript(second):
        turn = shared.rfind(ASSISTANT)
        end = turn + len(ASSISTANT) if turn >= 0 else 0
    else:
        end = max((match.start() for match in re.finditer(r"\s", shared)), default=0)
    return first[:end], first[end:], second[end:]


def split_messages(
    first: Sequence[Message], second: Sequence[Message]
) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[Message, ...]]:
    """Split two conversations into the turns that they share, and the rest of each."""
    # at least one turn is left to each, or there would be nothing to score
    end = min(shared_length(first, second), len(first) - 1, len(second) - 1)
    return tuple(first[:end]), tuple(first[end:]), tuple(second[end:])


def transcript_messages(text: str) -> tuple[Message, ...]:
    """Read the turns of a ``Human: … Assistant: …`` transcript."""
    pieces = _TURN.split(text)[1:]
    return tuple(
        {"role": _ROLES[speaker], "content": said.strip()}
        for speaker, said in zip(pieces[::2], pieces[1::2], strict=True)
    )
