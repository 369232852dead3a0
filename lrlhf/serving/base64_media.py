"""Images and videos of a request: base64 of a file, looked at before anything is decoded."""

from __future__ import annotations

import base64
import hashlib
import importlib
import io
import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from PIL import Image

from lrlhf.media import MediaError, MediaOptions, Video, read_image, read_video
from lrlhf.serving.limits import RequestLimits
from lrlhf.serving.refused import RefusedRequestError, malformed

_Seen = TypeVar("_Seen")
_PICTURES = ("PNG", "JPEG", "WEBP")
_ANIMATIONS = ("PNG", "GIF", "WEBP")
_ALL = 1e9
"""Frames per second of which no video has more: all are taken."""
_LEAST_PIXELS = 2**14
"""What a frame of an animation counts at least: a million of one pixel take memory too."""

_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    EOFError,
    RuntimeError,
    OverflowError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)
"""How Pillow's readers fail at damaged files."""


class MediaFile(NamedTuple):
    """A file as it was sent."""

    kind: str
    content: bytes
    place: str
    """Where in the body it stood first."""


class MediaFiles:
    """The media of one request, each file once: collected, then measured, then decoded.

    No path and no address is ever opened: a text is base64 of a file's content or refused, and
    only formats that cannot refer to other files are read.

    Args:
        limits: Of the request.
    """

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        # completions of one prompt show the same: the model then looks once
        self._known: dict[tuple[str, bytes], MediaFile] = {}

    def __len__(self) -> int:
        return len(self._known)

    def image(self, text: Any, place: str) -> MediaFile:
        """Take an image file: PNG, JPEG or WebP.

        Args:
            text: Base64 of its content.
            place: Where in the body it stands.

        Raises:
            RefusedRequestError: It is not, or there are too many.
        """
        return self._once("image", text, place)

    def video(self, text: Any, place: str) -> MediaFile:
        """Take a video file: MP4, MOV, Matroska, WebM, AVI, animated PNG, GIF or WebP.

        Args:
            text: Base64 of its content.
            place: Where in the body it stands.

        Raises:
            RefusedRequestError: It is not, or there are too many.
        """
        return self._once("video", text, place)

    def pixels(self) -> int:
        """Count the pixels of all files by their heads, before anything is decoded.

        Raises:
            RefusedRequestError: There are too many, or a file is none of these formats.
        """
        total = 0
        for file in self._known.values():
            count = _image_pixels if file.kind == "image" else _film_pixels
            total += count(file.content, file.place)
            if total > self._limits.max_megapixels * 1e6:
                raise _refused(
                    file.place,
                    f"the media of the request have more than {self._limits.max_megapixels:g} "
                    "million pixels: send fewer or smaller ones, or raise the service's "
                    "max_megapixels",
                )
        return total

    def decoded(self) -> dict[MediaFile, Any]:
        """Decode all files.

        Returns:
            A ``PIL.Image`` or `lrlhf.media.Video` for each.

        Raises:
            RefusedRequestError: One is broken, or has too many frames.
        """
        decode = {"image": self._image, "video": self._video}
        return {file: decode[file.kind](file.content, file.place) for file in self._known.values()}

    def _once(self, kind: str, text: Any, place: str) -> MediaFile:
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

    def _image(self, content: bytes, place: str) -> Image.Image:
        return _readable(lambda: read_image(content, self._options), place)

    def _video(self, content: bytes, place: str) -> Video:
        video = _readable(lambda: read_video(content, self._options), place)
        if len(video.frames) > self._limits.max_frames:
            raise _refused(
                place,
                f"a video of more than {self._limits.max_frames} frames: send fewer, or raise the "
                "service's max_frames",
            )
        return video

    @property
    def _options(self) -> MediaOptions:
        return MediaOptions(
            max_pixels=self._limits.max_pixels,
            fps=self._limits.fps or _ALL,
            max_frames=self._limits.max_frames + 1,  # one more tells that there are too many
        )


def decoded(text: str, place: str) -> bytes:
    """Decode base64.

    Raises:
        RefusedRequestError: It is none, or nothing.
    """
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


def _image_pixels(content: bytes, place: str) -> int:
    return _measured(content, _PICTURES, place, frames=False)


def _measured(content: bytes, formats: tuple[str, ...], place: str, *, frames: bool) -> int:
    """Pixels of an image, or of all frames of an animation, as its head tells."""

    def measure() -> int:
        with Image.open(io.BytesIO(content), formats=formats) as opened:
            if not frames:
                return opened.width * opened.height
            count: int = opened.n_frames  # type: ignore[attr-defined]  # of the three formats
            return max(opened.width * opened.height, _LEAST_PIXELS) * count

    return _readable(measure, place, expected=f"one of {', '.join(formats)}")


def _film_pixels(content: bytes, place: str) -> int:
    if content.startswith((b"GIF8", b"\x89PNG")) or content[8:12] == b"WEBP":
        return _measured(content, _ANIMATIONS, place, frames=True)
    # other formats of FFmpeg may name further files or addresses, and it would open them
    known = content[4:8] == b"ftyp" or content.startswith(b"\x1a\x45\xdf\xa3")
    if not known and not (content.startswith(b"RIFF") and content[8:12] == b"AVI "):
        raise malformed(
            place, "no video: expected MP4, MOV, Matroska, WebM, AVI, or an animated PNG, GIF, WebP"
        )
    return _container_pixels(content, place)


def _container_pixels(content: bytes, place: str) -> int:
    """Pixels of all frames of a video, counted by its packets, which takes no decoding."""
    try:
        av = importlib.import_module("av")
    except ImportError as error:
        raise _refused(place, "this service reads no video files: it lacks PyAV") from error
    try:
        with av.open(io.BytesIO(content)) as container:
            if not container.streams.video:
                raise malformed(place, "a file without a video stream")
            stream = container.streams.video[0]
            packets = sum(1 for packet in container.demux(stream) if packet.size)
            return int((stream.width or 1) * (stream.height or 1) * packets)
    except RefusedRequestError:
        raise
    except (av.error.FFmpegError, *_BROKEN) as error:
        raise malformed(place, "a broken video") from error


def _readable(read: Callable[[], _Seen], place: str, *, expected: str = "") -> _Seen:
    try:
        return read()
    except MediaError as error:
        raise _refused(place, str(error)) from error
    except _BROKEN as error:
        what = f"it cannot be read; expected {expected}" if expected else "it cannot be decoded"
        raise _refused(place, what) from error


def _refused(place: str, what: str) -> RefusedRequestError:
    return RefusedRequestError(f"{place}: {what}", reason="media")
