"""Images and videos of prompts whose responses are scored."""

from __future__ import annotations

import mimetypes
from collections.abc import Mapping
from typing import Any

from lrlhf.media import MediaOptions, MediaRefs, read_image, read_video
from lrlhf.media.decode import check_image, check_video


def of_record(record: Mapping[str, Any]) -> MediaRefs:
    """Return what a line of a run names: its images, then its videos.

    The parts of messages tell which are videos; of a prompt that is text, the names of files do.
    """
    names = tuple(record.get("media") or ())
    kinds = [
        part.get("type")
        for turn in record.get("messages") or ()
        if isinstance(turn.get("content"), list)
        for part in turn["content"]
    ]
    shown = [kind for kind in kinds if kind in ("image", "video")]
    if len(shown) == len(names):
        images = shown.count("image")
    else:
        images = sum(not _is_video(name) for name in names)
    return MediaRefs(names[:images], names[images:])


def _is_video(name: str) -> bool:
    return str(mimetypes.guess_type(str(name))[0]).startswith("video/")


def check_readable(refs: MediaRefs) -> None:
    """Look at what is named, without its pixels.

    Raises:
        MediaError: It cannot be read.
    """
    for image in refs.images:
        check_image(image)
    for video in refs.videos:
        check_video(video)


def read_media(refs: MediaRefs, options: MediaOptions) -> dict[str, list[Any]]:
    """Return the columns ``images`` and ``videos`` of a response to a prompt.

    Raises:
        MediaError: Something is broken.
    """
    return {
        "images": [read_image(image, options) for image in refs.images],
        "videos": [read_video(video, options) for video in refs.videos],
    }
