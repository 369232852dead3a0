"""Responses with what the rewards said of them, as a run has written them."""

from __future__ import annotations

import math
import mimetypes
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lrlhf.apps.lab.run_files import RunFiles
from lrlhf.media import MediaOptions, MediaRefs, read_audio, read_image, read_video
from lrlhf.media.audio import check_audio
from lrlhf.media.decode import check_image, check_video

_EXCERPT = 300


@dataclass(frozen=True, kw_only=True)
class Response:
    """One response and its values."""

    place: str
    """File and line."""
    group: Hashable
    """Responses to one prompt, of one step, have the same."""
    asked: Hashable
    """Responses to one prompt, of whatever step, have the same: they resemble each other."""
    step: int | None
    prompt: str
    """The end of it."""
    completion: str
    """The beginning of it."""
    length: int
    """In the unit of the `Lab`."""
    score: float
    """NaN: none."""
    parts: Mapping[str, float]
    """What each reward function returned; NaN: nothing."""


def responses_of_run(folder: str | Path) -> list[Response]:
    """Read the responses of a run.

    Raises:
        FileNotFoundError: There is no such folder, or it has no ``rollouts.jsonl``.
        ValueError: A line is no record of a rollout; names file and line.
    """
    run = RunFiles(folder)
    path = run.folder / "rollouts.jsonl"
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} has no rollouts.jsonl: the run has the callback RolloutLog switched off, or "
            "trains no policy"
        )
    found = []
    for number, record in enumerate(run.responses(), start=1):
        try:
            found.append(_of_record(record, f"{path.name}:{number}"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number} is no record of a rollout ({type(error).__name__}: {error})"
            ) from error
    if not found:
        raise ValueError(f"{path} is empty: there are no responses yet")
    return found


def _of_record(record: Mapping[str, Any], place: str) -> Response:
    group = (record["step"], record.get("rank", 0), record["group"])
    return Response(
        place=place,
        group=group,
        asked=(record["source"], record.get("row")) if record.get("source") else group,
        step=int(record["step"]),
        prompt=end_of(str(record["prompt"])),
        completion=beginning_of(str(record["completion"])),
        length=int(record["length"]),
        score=_number(record["score"]),
        parts={str(name): _number(value) for name, value in record["rewards"].items()},
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def end_of(text: str) -> str:
    """Return the end of a prompt, which is where the question is."""
    return text if len(text) <= _EXCERPT else f"…{text[-_EXCERPT:]}"


def beginning_of(text: str) -> str:
    """Return the beginning of a completion."""
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}…"


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
