"""Images and videos of a request: base64 of a file, looked at before anything is decoded."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from PIL import Image

from lrlhf.apps.serve.limits import RequestLimits
from lrlhf.media import MediaError, MediaOptions, Video, read_image, read_video
from lrlhf.media.animations import ANIMATIONS, animation_of
from lrlhf.media.decode import explained, open_image
from lrlhf.web.body import RefusedRequestError, malformed

_FORMATS = {"image": ("PNG", "JPEG", "WEBP"), "video": ANIMATIONS}
_ALL = 1e9
"""Frames per second of which no video has more: all are taken."""
_LEAST_PIXELS = 2**14
"""What a frame of an animation counts at least: a million of one pixel take memory too."""


class MediaFile(NamedTuple):
    """A file as it was sent."""

    kind: str
    """``image`` or ``video``."""
    content: bytes
    place: str
    """Where in the body it stood first."""


class MediaFiles:
    """The media of one request, each file once: collected, then measured, then decoded.

    No path and no address is ever opened: a text is base64 of a file's content or refused, and
    only formats that cannot refer to other files are read. Images are PNG, JPEG or WebP, and
    videos animated PNG, GIF or WebP.

    Args:
        limits: Of the request.
    """

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        # completions of one prompt show the same: the model then looks once
        self._known: dict[tuple[str, bytes], MediaFile] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, kind: str, text: Any, place: str) -> MediaFile:
        """Take an ``image`` or ``video`` as base64, unless it is none or there are too many."""
        if not isinstance(text, str):
            raise malformed(place, f"expected base64 of a file, found {kind_of(text)}")
        key = (kind, hashlib.sha256(text.encode()).digest())  # not the text, which is longer
        if key not in self._known:
            if len(self._known) >= self._limits.max_images:
                raise _refused(
                    place, f"the request has more than {self._limits.max_images} images and videos"
                )
            self._known[key] = MediaFile(kind, decoded(text, place), place)
        return self._known[key]

    def pixels(self) -> int:
        """Count the pixels of all files by their heads, unless there are too many to decode."""
        total = 0
        for file in self._known.values():
            total += _pixels(file)
            if total > self._limits.max_megapixels * 1e6:
                raise _refused(
                    file.place,
                    f"the media of the request have more than {self._limits.max_megapixels:g} "
                    "million pixels: send fewer or smaller ones, or raise the service's "
                    "max_megapixels",
                )
        return total

    def decoded(self) -> dict[MediaFile, Any]:
        """Decode all files: to a ``PIL.Image`` or `lrlhf.media.Video` each."""
        return {file: self._decoded(file) for file in self._known.values()}

    def _decoded(self, file: MediaFile) -> Image.Image | Video:
        most = self._limits.max_frames
        options = MediaOptions(
            max_pixels=self._limits.max_pixels,
            fps=_ALL,
            max_frames=most + 1,  # one more tells that there are too many
        )
        with _answered(file.place):
            if file.kind == "image":
                return read_image(file.content, options)
            video = read_video(file.content, options)
        if len(video.frames) > most:
            raise _refused(
                file.place,
                f"a video of more than {most} frames: send fewer, or raise the service's "
                "max_frames",
            )
        return video


class PixelRoom:
    """Room for decoded media, which may take ten thousand times as much as their files.

    Args:
        most: Pixels at a time; a request that has more is alone.
    """

    def __init__(self, most: int) -> None:
        self._most = self._free = most
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        self._closed = False

    def take(self, pixels: int) -> None:
        """Wait until there is room, first come first served, or the service ends."""
        needed = min(pixels, self._most)
        # one after the other: a large request would wait for ever behind small ones
        with self._turn, self._changed:
            self._changed.wait_for(lambda: self._closed or needed <= self._free)
            if self._closed:
                raise RefusedRequestError(
                    "the service ends", status=503, reason="closing", retry_after=5
                )
            self._free -= needed

    def release(self, pixels: int) -> None:
        """Give back what was taken."""
        with self._changed:
            self._free += min(pixels, self._most)
            self._changed.notify_all()

    def close(self) -> None:
        """Send away whoever waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def decoded(text: str, place: str) -> bytes:
    """Decode base64, and refuse what is none, or nothing."""
    try:
        content = base64.b64decode(text, validate=True)
    except ValueError as error:  # also what is not ASCII
        raise malformed(
            place, "this is no base64; files are sent by content, not by path or address"
        ) from error
    if not content:
        raise malformed(place, "an empty file")
    return content


def kind_of(value: Any) -> str:
    """Return what JSON calls a value."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")


def _pixels(file: MediaFile) -> int:
    formats = _FORMATS[file.kind]
    what = f"it cannot be read; expected one of {', '.join(formats)}"
    # others may be read by programs of the system, or name further files
    with (
        _answered(file.place, what),
        explained("broken file", file.place),
        open_image(file.content, formats) as opened,
    ):
        if file.kind == "image":
            return opened.width * opened.height
        frames: int = opened.n_frames  # type: ignore[attr-defined]  # of the three formats
        animation = animation_of(io.BytesIO(file.content))
        assert animation is not None  # it is of one of them
        width, height = map(max, opened.size, animation.extent)
        return max(width * height, _LEAST_PIXELS) * frames


@contextlib.contextmanager
def _answered(place: str, what: str | None = None) -> Iterator[None]:
    """Have a file that cannot be read answered, with ``what`` or what its reader says."""
    try:
        yield
    except MediaError as error:
        raise _refused(place, what or str(error)) from error
    except MemoryError as error:
        raise RefusedRequestError(
            "out of memory: send fewer or smaller images and videos at once",
            status=503,
            reason="out of memory",
            retry_after=5,
        ) from error


def _refused(place: str, what: str) -> RefusedRequestError:
    return RefusedRequestError(f"{place}: {what}", reason="media")
