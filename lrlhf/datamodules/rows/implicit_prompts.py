"""Finding the prompt that two whole conversations share, or that both repeat."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lrlhf.datamodules.rows.bad_rows import BadRow
from lrlhf.datamodules.rows.columns import shown
from lrlhf.models.chat_messages import text_of_parts
from lrlhf.types import Message

HUMAN = "\n\nHuman:"
ASSISTANT = "\n\nAssistant:"

_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_BEFORE_ANSWERS = {"system", "developer", "user"}
"""Roles with which no answer to a user begins, but a conversation does."""
_CLEARLY_REPEATED = 5


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


def repeat_prompt(prompt: str, first: str, second: str, *, in_chat: bool) -> bool:
    """Whether two texts are prompt and answer, so that the prompt beside them is there twice.

    They are if both begin with the whole prompt. In a chat, where two answers may well say a
    greeting back, the prompt has to have five words or more.
    """
    long_enough = len(prompt.split()) >= (_CLEARLY_REPEATED if in_chat else 1)
    return long_enough and first.startswith(prompt) and second.startswith(prompt)


def split_messages(
    first: Sequence[Message], second: Sequence[Message]
) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[Message, ...]]:
    """Split two conversations into the turns that they share, and the rest of each."""
    # at least one turn is left to each, or there would be nothing to score
    end = min(shared_length(first, second), len(first) - 1, len(second) - 1)
    return tuple(first[:end]), tuple(first[end:]), tuple(second[end:])


def without_prompt(
    prompt: Sequence[Message], candidate: Sequence[Message], column: str
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Split a candidate into prompt and answer, if it is a whole conversation with the prompt.

    What stands before the prompt in the conversation, such as a system turn, goes with the prompt;
    a system turn that only the prompt has stays there.

    Raises:
        BadRow: A user has the last word in the prompt, the candidate begins with another turn of a
            user or system, and the prompt is not in it.
    """
    given, turns = [_said(turn) for turn in prompt], [_said(turn) for turn in candidate]
    whole = turns[0][0] in _BEFORE_ANSWERS
    for start in range(len(turns) - len(given) + 1 if whole else 1):
        if given and turns[start : start + len(given)] == given:
            end = start + len(given)
            return tuple(candidate[:end]), tuple(candidate[end:])
    if given and given[0][0] == "system" and given[1:] and turns[: len(given) - 1] == given[1:]:
        return tuple(prompt), tuple(candidate[len(given) - 1 :])
    if whole and given and given[-1][0] == "user":
        raise BadRow(
            "prompt not in the conversation",
            f"column {column!r} begins with {turns[0][0]} {shown(turns[0][1])} and does not hold "
            f"the prompt, which ends with user {shown(given[-1][1])}",
            remedy="name the right column in `prompt_column`",
        )
    return tuple(prompt), tuple(candidate)


def _said(turn: Message) -> tuple[str, object]:
    """Return the role and content, by which turns are compared."""
    content = turn.get("content")
    text = text_of_parts(content)
    content = content if text is None else text
    return turn["role"], content.strip() if isinstance(content, str) else content


def transcript_messages(text: str) -> tuple[Message, ...]:
    """Read the turns of a ``Human: … Assistant: …`` transcript."""
    pieces = _TURN.split(text)[1:]
    return tuple(
        {"role": _ROLES[speaker], "content": said.strip()}
        for speaker, said in zip(pieces[::2], pieces[1::2], strict=True)
    )
