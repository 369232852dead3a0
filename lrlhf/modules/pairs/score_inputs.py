"""Prompts as people write them, read for a reward model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lrlhf.datamodules.rows.bad_rows import BadRow
from lrlhf.datamodules.rows.chat import read_messages
from lrlhf.datamodules.rows.columns import text_of
from lrlhf.datamodules.rows.media_rows import MediaReader
from lrlhf.datamodules.rows.prompt_rows import DEFAULT_PROMPT_COLUMN, column_or_dialogue
from lrlhf.media import MediaOptions, MediaProcessor, read_audio, read_image, read_video
from lrlhf.modules.prompt_forms import refusal, rows_of
from lrlhf.types import Prompt


class Asked(NamedTuple):
    """A prompt, and what it shows."""

    prompt: Prompt
    images: list[Any]
    videos: list[Any]
    audios: list[Any]


def prompts_of(
    prompts: Any, images: Any, count: int, processor: MediaProcessor | None
) -> list[Asked]:
    """Read the prompt of each of ``count`` responses.

    Raises:
        TypeError: A prompt is of no known form.
        ValueError: They are not as many, or one cannot be read.
    """
    if images is not None and processor is None:
        raise ValueError("images were given, and the reward model reads text only")
    rows, alone = rows_of(prompts, images)
    reader = MediaReader(processor)
    asked = []
    for number, row in enumerate(rows):
        try:
            asked.append(_read(row, reader))
        except BadRow as problem:
            raise refusal(number, problem) from problem
    if alone:
        return asked * count
    if len(asked) != count:
        raise ValueError(
            f"there are {len(asked)} prompts and {count} responses; give a prompt for each "
            "response, or one prompt for all"
        )
    return asked


def _read(row: Mapping[str, Any], reader: MediaReader) -> Asked:
    column = column_or_dialogue(
        row, DEFAULT_PROMPT_COLUMN, default=DEFAULT_PROMPT_COLUMN, setting="prompt"
    )
    turns: Prompt
    refs = reader.of_columns(row, None)
    if isinstance(row[column], str):
        (turns,) = reader.of_texts((text_of(row, column),), refs)
    else:
        turns, refs = reader.of_messages(read_messages(row[column], column), refs, None)
    options = MediaOptions()
    return Asked(
        turns,
        [read_image(value, options) for value in refs.images],
        [read_video(value, options) for value in refs.videos],
        [read_audio(value) for value in refs.audios],
    )
