"""What a row names as its images, videos and audio, not yet read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor


@dataclass(frozen=True)
class MediaRefs:
    """Images, videos and audio of one text, each kind in the order of its placeholders.

    A further kind would be a field here, a reader in `lrlhf.media`, an argument of the processor in
    `lrlhf.media.processing`, and a part type in `lrlhf.datamodules.rows.media_rows`.

    Args:
        images: Each a path, bytes, a ``PIL.Image``, an array, or ``{"bytes": …, "path": …}``.
        videos: Each a path, bytes, an array of frames, or a list of images.
        audios: Each a path, bytes, or ``{"array": …, "sampling_rate": …}``.
    """

    images: tuple[Any, ...] = ()
    videos: tuple[Any, ...] = ()
    audios: tuple[Any, ...] = ()

    def __len__(self) -> int:
        return len(self.images) + len(self.videos) + len(self.audios)

    def __add__(self, other: MediaRefs) -> MediaRefs:
        return MediaRefs(
            self.images + other.images, self.videos + other.videos, self.audios + other.audios
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
        """A digest that is equal where the same files or bytes are named."""
        digest = hashlib.blake2b(digest_size=16)
        for value in self.everything:
            _feed(digest, value)
        return digest.hexdigest()


def _feed(digest: hashlib.blake2b, value: Any) -> None:
    if isinstance(value, Mapping):
        held = (value.get(key) for key in ("bytes", "array", "path"))
        digest.update(f"{value.get('sampling_rate', '')}".encode())
        _feed(digest, next((one for one in held if one is not None), None))
        return
    if isinstance(value, list | tuple):
        for entry in value:
            _feed(digest, entry)
    elif isinstance(value, bytes | bytearray):
        digest.update(value)
    elif isinstance(value, Image.Image | np.ndarray | Tensor):
        pixels = np.ascontiguousarray(value)
        digest.update(f"{pixels.shape}{pixels.dtype}".encode())
        digest.update(pixels.tobytes())
    else:
        digest.update(str(value).encode("utf-8", "surrogatepass"))
    digest.update(b"|")


def media_name(value: Any) -> str:
    """Return what messages and logs call an image, video or audio."""
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
