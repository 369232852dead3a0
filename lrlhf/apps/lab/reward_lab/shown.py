"""Images, videos and audio of prompts whose responses are scored."""

from __future__ import annotations

import mimetypes
from collections.abc import Mapping
from typing import Any

from lrlhf.media import MediaOptions, MediaRefs, read_audio, read_image, read_video
from lrlhf.media.audio import check_audio
from lrlhf.media.decode import check_image, check_video


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
