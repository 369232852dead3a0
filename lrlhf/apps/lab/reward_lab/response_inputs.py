"""Responses that are to be scored, as files hold them."""

from __future__ import annotations

import json
import mimetypes
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lrlhf.datamodules import FileSource
from lrlhf.datamodules.loading.plain_rows import plain
from lrlhf.datamodules.rows.bad_rows import BadRow
from lrlhf.datamodules.rows.chat import read_messages
from lrlhf.datamodules.rows.columns import structure_of, with_turns
from lrlhf.datamodules.rows.media_rows import MediaReader, media_columns
from lrlhf.media import MediaOptions, MediaRefs, read_audio, read_image, read_video
from lrlhf.media.audio import check_audio
from lrlhf.media.decode import check_image, check_video
from lrlhf.rewards import TextSegment, completion_text
from lrlhf.rollout.records import segments_of, written_ids

_TEXTS = {"prompt", "messages", "completion", "completions"}


_PLACE = ("set", "dataloader", "source", "row")
"""What tells the prompts of a run apart."""


Prompt = str | tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class ResponseInput:
    """One response that is to be scored."""

    place: str
    group: Hashable
    """Responses to one prompt, of one step, have the same."""
    prompt_key: Hashable
    """Responses to one prompt, of whatever step, have the same."""
    step: int | None
    prompt: Prompt
    completion: str
    segments: Sequence[TextSegment]
    """Tell what of it the policy wrote."""
    turns: Sequence[Mapping[str, Any]] | None
    """Of a completion that is a chat; None: it is text."""
    token_ids: Sequence[int] | None
    truncated: bool
    """Whether a run has cut it off."""
    columns: Mapping[str, Any]
    refs: MediaRefs
    """What the prompt shows, as far as the model reads such."""


@dataclass(frozen=True)
class _RecordPrompt:
    """The prompt of a row, and what goes with it."""

    prompt: Prompt
    refs: MediaRefs
    columns: Mapping[str, Any]
    turns: Sequence[Mapping[str, Any]] | None
    step: int | None
    group: Hashable
    prompt_key: Hashable


def read_response_inputs(
    path: Path,
    media: MediaReader = MediaReader(),  # noqa: B008  frozen
    *,
    reads_media: bool = False,
) -> list[ResponseInput]:
    """Read responses from a file of rows (.jsonl, .json, .parquet or .csv, perhaps .gz or .zst).

    A row has a ``prompt`` (text or messages) with a ``completion``, or several ``completions``,
    each text or messages; the other columns go to the rewards. Or it is a line of
    ``rollouts.jsonl`` or of an evaluation.

    Args:
        path: The file.
        media: Finds images and videos in rows, as it would in the data of a run.
        reads_media: Look whether each can be read.

    Raises:
        ValueError: A row cannot be used, or there is none; names file and row.
    """
    responses: list[ResponseInput] = []
    for number, row in enumerate(FileSource(str(path)).rows(), start=1):
        try:
            if isinstance(row, BadRow):
                raise row
            own = list(_responses_of_record(row, f"{path.name}:{number}", path.parent, media))
            if reads_media:
                check_readable(own[0].refs)
            responses += own
        except ValueError as error:
            raise ValueError(f"{path}, row {number}: {error}") from error
    if not responses:
        raise ValueError(f"{path} holds no responses")
    return responses


def _responses_of_record(
    record: Mapping[str, Any], place: str, folder: Path, media: MediaReader
) -> Iterator[ResponseInput]:
    of_run = all(isinstance(record.get(name), Mapping) for name in ("columns", "rewards"))
    if not of_run:  # else it is as it was written by a run
        record = {name: plain(value) for name, value in record.items()}
        record = with_turns(record, "prompt", "completion")
    several = structure_of(record, "completions", list)
    completions = [record.get("completion")] if several is None else several
    if completions == []:
        raise ValueError("completions is an empty list; leave the row out")
    if not isinstance(completions, list) or completions == [None]:
        near = ", ".join(sorted(record)) or "none"
        raise ValueError(f"there is no column completion or completions (columns: {near})")
    row_prompt = _of_run(record, media) if of_run else _of_row(record, folder, media)
    for completion in completions:
        if not isinstance(completion, str | list):
            raise ValueError(f"completion is {completion!r:.40}; give text or a list of messages")
        text = completion if isinstance(completion, str) else _chat_text(completion)
        has_ids = several is None and record.get("token_ids") is not None
        yield ResponseInput(
            place=place,
            group=row_prompt.group,
            prompt_key=row_prompt.prompt_key,
            step=row_prompt.step,
            prompt=row_prompt.prompt,
            completion=text,
            segments=segments_of(record) if of_run else [TextSegment(text, sampled=True)],
            turns=completion if isinstance(completion, list) else row_prompt.turns,
            token_ids=written_ids(record) if has_ids else None,
            truncated=of_run and record.get("finish_reason") == "length",
            columns=row_prompt.columns,
            refs=row_prompt.refs,
        )


def _of_run(record: Mapping[str, Any], media: MediaReader) -> _RecordPrompt:
    """Read a line that a run has written; in training a rank numbers the groups of each step."""
    step, placed = record.get("step"), "source" in record
    position = [record.get(name) for name in _PLACE]
    prompt = _prompt(record)
    # an evaluation numbers those of each batch anew
    number = record.get("group") if "rank" in record or not placed else None
    group = _key([step, record.get("rank"), number, record.get("temperature"), *position])
    return _RecordPrompt(
        prompt=prompt,
        refs=of_record(record) if media.processor is not None else MediaRefs(),
        columns=record["columns"],
        turns=None if isinstance(prompt, str) else record.get("episode"),
        step=step,
        group=group,
        prompt_key=_key(position) if placed else group,
    )


def _of_row(record: Mapping[str, Any], folder: Path, media: MediaReader) -> _RecordPrompt:
    """Read a row as data has it: what its columns and messages show is taken out of them."""
    prompt, refs = _prompt(record), media.of_columns(record, folder)
    unwanted = {*_TEXTS, *(media_columns() if refs else ())}
    if isinstance(prompt, str):
        (prompt,) = media.of_texts((prompt,), refs)
    elif media.processor is not None:
        prompt, refs = media.of_messages(read_messages(prompt, "prompt"), refs, folder)
    key = (_key(prompt), refs.key)
    return _RecordPrompt(
        prompt=prompt,
        refs=refs,
        columns={name: value for name, value in record.items() if name not in unwanted},
        turns=None,
        step=None,
        group=key,
        prompt_key=key,
    )


def _prompt(record: Mapping[str, Any]) -> Prompt:
    messages = record.get("messages")
    prompt = record.get("prompt") if messages is None else messages
    if isinstance(prompt, list):
        return tuple(prompt)
    if isinstance(prompt, str):
        return prompt
    raise ValueError(f"prompt is {prompt!r:.40}; give text or a list of messages")


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _chat_text(turns: Sequence[Any]) -> str:
    bad = next(
        (turn for turn in turns if not isinstance(turn, Mapping) or "role" not in turn), None
    )
    if bad is not None:
        raise ValueError(f"completion has a turn without role: {bad!r:.40}")
    return completion_text(turns)


def of_record(record: Mapping[str, Any]) -> MediaRefs:
    """Return what a line of a run names: its images, then its videos, then its audio.

    The parts of messages tell how many are of each kind; of a prompt that is text, the names of
    files do.
    """
    names = tuple(record.get("media") or ())
    kinds = [
        part.get("type")
        for turn in record.get("messages") or ()
        if isinstance(turn.get("content"), list)
        for part in turn["content"]
    ]
    shown = [kind for kind in kinds if kind in ("image", "video", "audio")]
    if len(shown) != len(names):
        shown = [_kind_of(name) for name in names]
    images, videos = shown.count("image"), shown.count("video")
    return MediaRefs(names[:images], names[images : images + videos], names[images + videos :])


def _kind_of(name: str) -> str:
    kind = str(mimetypes.guess_type(str(name))[0]).split("/")[0]
    return kind if kind in ("video", "audio") else "image"


def check_readable(refs: MediaRefs) -> None:
    """Look at what is named, without its pixels or samples.

    Raises:
        MediaError: It cannot be read.
    """
    for image in refs.images:
        check_image(image)
    for video in refs.videos:
        check_video(video)
    for audio in refs.audios:
        check_audio(audio)


def read_media(refs: MediaRefs, options: MediaOptions) -> dict[str, list[Any]]:
    """Return the columns ``images``, ``videos`` and ``audios`` of a response to a prompt.

    Raises:
        MediaError: Something is broken.
    """
    return {
        "images": [read_image(image, options) for image in refs.images],
        "videos": [read_video(video, options) for video in refs.videos],
        "audios": [read_audio(audio) for audio in refs.audios],
    }
