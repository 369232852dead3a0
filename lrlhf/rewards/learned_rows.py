"""Responses with their prompts, as a reward model reads them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from lrlhf.rewards.function import Completion, content_text
from lrlhf.types import Media, Message, Prompt, SequenceBatch


class Row(NamedTuple):
    """One response with its prompt, as the reward model reads it."""

    input_ids: Sequence[int]
    media: Media | None = None
    prompt: int = 0
    """Number that rows with the same prompt have in common."""


def sharing(
    rows: Sequence[Row | None],
    prompts: Sequence[Prompt],
    images: Sequence[Sequence[Any]],
    videos: Sequence[Sequence[Any]],
) -> list[Row | None]:
    """Give rows that show the same objects the same `Media`, so that the model looks once."""
    known: dict[tuple[int, ...], Media] = {}
    numbers: dict[str, int] = {}
    shared: list[Row | None] = []
    for row, prompt, *shown in zip(rows, prompts, images, videos, strict=True):
        if row is not None:
            text = prompt if isinstance(prompt, str) else repr(prompt)
            row = row._replace(prompt=numbers.setdefault(text, len(numbers)))
        if row is not None and row.media is not None:
            key = tuple(id(entry) for kind in shown for entry in kind)
            row = row._replace(media=known.setdefault(key, row.media))
        shared.append(row)
    return shared


def without_marks(completion: Completion, marks: Sequence[str]) -> Completion:
    """Remove what the reward model would read as an image: a policy can spell it by letters."""
    if not marks:
        return completion
    if isinstance(completion, str):
        return re.sub("|".join(map(re.escape, marks)), "", completion)
    return [
        {**turn, "content": without_marks(turn["content"], marks)}
        if isinstance(turn.get("content"), str)
        else turn
        for turn in completion
    ]


def as_text(turn: Message) -> Message:
    """Leave of content that comes in parts what a text model reads."""
    content = turn.get("content")
    return {**turn, "content": content_text(content)} if isinstance(content, list) else turn


def encoded(tokenizer: PreTrainedTokenizerBase, text: str, *, specials: bool) -> list[int]:
    """Tokenize a text; a token that begins texts is not said twice."""
    ids: list[int] = tokenizer(text, add_special_tokens=specials, verbose=False)["input_ids"]
    bos = tokenizer.bos_token_id
    doubled = bos is not None and ids[:2] == [bos, bos]
    return ids[1:] if doubled else ids


def padded(rows: Sequence[Row]) -> SequenceBatch:
    """Pad at the right; the id does not matter, as the mask says what counts."""
    lengths = torch.tensor([len(row.input_ids) for row in rows])
    input_ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row.input_ids) for row in rows], True)
    mask = torch.arange(input_ids.shape[1]) < lengths[:, None]
    return SequenceBatch(
        input_ids=input_ids,
        attention_mask=mask,
        response_mask=mask,
        media=tuple(row.media for row in rows),
        group_ids=torch.tensor([row.prompt for row in rows]),
    )
