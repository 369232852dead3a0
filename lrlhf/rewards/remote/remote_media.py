"""Images and videos as they are sent to a reward service."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image

from lrlhf.media import Video
from lrlhf.rewards.function import RewardError

_JPEG_QUALITY = 95


class MediaTexts:
    """Encodes every image and video once, however many responses share it.

    Args:
        encode: From an image or video to the bytes of a file.
    """

    def __init__(self, encode: Callable[[Any], bytes]) -> None:
        self._encode = encode
        self._known: dict[int, tuple[Any, str]] = {}

    def __call__(self, rows: Sequence[Sequence[Any]]) -> list[list[str] | None]:
        """Return the files in base64, None for a row that shows nothing."""
        return [[self._text(entry) for entry in row] if row else None for row in rows]

    def _text(self, entry: Any) -> str:
        if id(entry) not in self._known:
            # with the object itself, so that no other one gets its id
            self._known[id(entry)] = (entry, base64.b64encode(self._encode(entry)).decode())
        return self._known[id(entry)][1]


def png(image: Any) -> bytes:
    """Return an image as a PNG file, without loss."""
    return _saved(image, "PNG", compress_level=1)


def jpeg(image: Any) -> bytes:
    """Return an image as a JPEG file."""
    return _saved(image, "JPEG", quality=_JPEG_QUALITY)


def animated_png(video: Any) -> bytes:
    """Return the frames of a video as an animated PNG file, without loss."""
    if not isinstance(video, Video):
        raise RewardError(f"a video is a lrlhf.media.Video, not a {type(video).__name__}")
    first, *others = (Image.fromarray(frame) for frame in video.frames)
    count = len(video.frames)
    # Pillow leaves out a frame that is like the one before it, unless they are laid down
    # differently; on frames without transparency both ways look the same
    return _saved(
        first,
        "PNG",
        save_all=True,
        append_images=others,
        duration=1000 / video.fps,
        blend=[index % 2 for index in range(count)],
        compress_level=1,
    )


def _saved(image: Any, kind: str, **options: Any) -> bytes:
    if not isinstance(image, Image.Image):
        raise RewardError(f"an image is a PIL.Image, not a {type(image).__name__}")
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
