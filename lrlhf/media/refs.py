"""What a row names as its images, videos and audio, not yet read."""

from __future__ import annotations

import functools
import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

_PIECE = 1 << 14
_PIECES = 4
"""Of a file larger than all of them together, so many pieces of so many bytes are read."""


@dataclass(frozen=True, kw_only=True)
class PartOptions:
    """How one image or video is read, as its part of a message says.

    ``max_pixels`` and ``max_frames`` lower those of `MediaOptions`; ``fps`` takes the place of
    its own.

    Args:
        max_pixels: A larger image or frame is scaled down to this many.
        min_pixels: A smaller image or frame is scaled up to this many.
        resized_height: Height that it is scaled to, with ``resized_width``.
        resized_width: Width that it is scaled to.
        fps: Frames per second that are taken from a film; of frames that are given, their rate.
        sample_fps: Rate of frames that are given.
        timestamps: Seconds at which frames that are given were taken.
        nframes: Frames that are taken.
        min_frames: Frames that are taken at least, where there are as many.
        max_frames: Frames that are taken at most.
        video_start: Second, by the clock of ``timestamps``, at which what is shown begins.
        video_end: Second at which it ends.
    """

    max_pixels: int | None = None
    min_pixels: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None
    fps: float | None = None
    sample_fps: float | None = None
    timestamps: tuple[float, ...] | None = None
    nframes: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    video_start: float | None = None
    video_end: float | None = None


@dataclass(frozen=True)
class MediaPart:
    """An image, video or audio with options of its own."""

    value: Any
    options: PartOptions


@dataclass(frozen=True)
class MediaRefs:
    """Images, videos and audio of one text, each kind in the order of its placeholders.

    A further kind would be a field here, a reader in `lrlhf.media`, an argument of the processor in
    `lrlhf.media.processing`, and a part type in `lrlhf.datamodules.rows.media_rows`.

    Args:
        images: Each a path, bytes, a ``PIL.Image``, an array, or ``{"bytes": …, "path": …}``.
        videos: Each a path, bytes, an array of frames, or a list of images.
        audios: Each a path, bytes, or ``{"array": …, "sampling_rate": …}``.
        columns: Kinds for which the row has a column, whatever it holds.
    """

    images: tuple[Any, ...] = ()
    videos: tuple[Any, ...] = ()
    audios: tuple[Any, ...] = ()
    columns: frozenset[str] = field(default=frozenset(), compare=False, kw_only=True)

    def __len__(self) -> int:
        return len(self.images) + len(self.videos) + len(self.audios)

    def __add__(self, other: MediaRefs) -> MediaRefs:
        return MediaRefs(
            self.images + other.images, self.videos + other.videos, self.audios + other.audios
        )

    def first(self, counts: Mapping[str, int]) -> MediaRefs:
        """Return so many of each kind, from the front."""
        return MediaRefs(
            self.images[: counts["image"]],
            self.videos[: counts["video"]],
            self.audios[: counts["audio"]],
        )

    @property
    def everything(self) -> tuple[Any, ...]:
        """All of them, kind by kind."""
        return (*self.images, *self.videos, *self.audios)

    @property
    def counts(self) -> dict[str, int]:
        """How many there are of each kind."""
        return {
            "image": len(self.images),
            "video": len(self.videos),
            "audio": len(self.audios),
        }

    @property
    def names(self) -> tuple[str, ...]:
        """What messages and logs call them."""
        return tuple(media_name(value) for value in self.everything)

    @property
    def key(self) -> str:
        """A digest that is equal where the same is shown.

        Of a file its content counts, wherever it lies and whether a path or its bytes are given;
        see `file_digest`. Pixels and samples in memory are other things than files of them.
        """
        digest = hashlib.blake2b(digest_size=16)
        for value in self.everything:
            _feed(digest, value)
        return digest.hexdigest()


def _feed(digest: hashlib.blake2b, value: Any) -> None:
    if isinstance(value, MediaPart):
        digest.update(repr(value.options).encode())
        _feed(digest, value.value)
        return
    if isinstance(value, Mapping):
        contents = (value.get(key) for key in ("bytes", "array", "path"))
        digest.update(f"{value.get('sampling_rate', '')}".encode())
        _feed(digest, next((content for content in contents if content is not None), None))
        return
    if isinstance(value, list | tuple):
        for entry in value:
            _feed(digest, entry)
    elif isinstance(value, bytes | bytearray):
        digest.update(_content_digest(value))
    elif isinstance(value, Image.Image | np.ndarray | Tensor):
        if isinstance(value, Image.Image) and value.mode in ("P", "PA"):
            digest.update(str(value.getpalette()).encode())
        pixels = np.ascontiguousarray(value)
        digest.update(f"{pixels.shape}{pixels.dtype}".encode())
        digest.update(pixels.tobytes())
    elif isinstance(value, str | Path):
        text = str(value)
        digest.update(file_digest(text.removeprefix("file://")) or text.encode(errors="replace"))
    else:
        digest.update(str(value).encode("utf-8", "surrogatepass"))
    digest.update(b"|")


def file_digest(path: str | Path) -> bytes | None:
    """Digest a file: its size, and all of it up to 64 KiB, else four pieces of 16 KiB.

    The pieces lie evenly from its first to its last byte. None: there is no such file.
    """
    try:
        status = Path(path).stat()
        if not stat.S_ISREG(status.st_mode):
            return None
        return _digest_of(str(path), status.st_size, status.st_mtime_ns)
    except (OSError, ValueError):  # reported when its row is read
        return None


@functools.lru_cache(maxsize=1 << 17)
def _digest_of(path: str, size: int, changed: int) -> bytes:
    del changed  # part of the key: a file that was written again is read again
    digest = hashlib.blake2b(b"%d:" % size, digest_size=16)
    with Path(path).open("rb", buffering=0) as stream:
        for start in _starts(size):
            digest.update(os.pread(stream.fileno(), _PIECE, start))
    return digest.digest()


def _content_digest(content: bytes | bytearray) -> bytes:
    digest = hashlib.blake2b(b"%d:" % len(content), digest_size=16)
    for start in _starts(len(content)):
        digest.update(content[start : start + _PIECE])
    return digest.digest()


def _starts(size: int) -> list[int]:
    last = max(size, _PIECE * _PIECES) - _PIECE
    return [last * piece // (_PIECES - 1) for piece in range(_PIECES)]


def media_name(value: Any) -> str:
    """Return what messages and logs call an image, video or audio."""
    if isinstance(value, MediaPart):
        return media_name(value.value)
    if isinstance(value, Mapping):
        if value.get("array") is not None and not value.get("path"):
            return f"an array of {value.get('sampling_rate')} samples per second"
        return media_name(value.get("path") or value.get("bytes"))
    if isinstance(value, str | Path):
        text = str(value)
        return text if len(text) <= 200 else f"{text[:60]}…"
    if isinstance(value, bytes | bytearray):
        return f"{len(value)} bytes"
    if isinstance(value, list | tuple):
        return f"{len(value)} frames"
    return type(value).__name__


def is_file(value: Any) -> bool:
    """Whether a file is named, without its content, beside which a name may be any."""
    if isinstance(value, MediaPart):
        return is_file(value.value)
    if isinstance(value, Mapping):
        contents = (value.get(key) for key in ("bytes", "array", "path"))
        return is_file(next((content for content in contents if content is not None), None))
    return isinstance(value, Path) or (isinstance(value, str) and not value.startswith("data:"))


UNNAMED = "image #"
"""How names of images begin that have no file."""


def image_name(image: Image.Image, key: str | None = None) -> str:
    """Return what messages and logs call an image that has no file: by its pixels, or their key."""
    key = key or MediaRefs((image,)).key
    return f"{UNNAMED}{key[:8]} of {image.width} x {image.height} pixels"
