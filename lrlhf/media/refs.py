"""What a row names as its images and videos, not yet read."""

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
    """Images and videos of one text, each kind in the order of its placeholders.

    A sound would be a third kind: a field here, a reader in `lrlhf.media.decode`, an argument of
    the processor in `lrlhf.media.processing`, and a part type in
    `lrlhf.datamodules.rows.media_rows`.

    Args:
        images: Each a path, bytes, a ``PIL.Image``, an array, or ``{"bytes": …, "path": …}``.
        videos: Each a path, bytes, an array of frames, or a list of images.
    """

    images: tuple[Any, ...] = ()
    videos: tuple[Any, ...] = ()

    def __len__(self) -> int:
        return len(self.images) + len(self.videos)

    def __add__(self, other: MediaRefs) -> MediaRefs:
        return MediaRefs(self.images + other.images, self.videos + other.videos)

    @property
    def names(self) -> tuple[str, ...]:
        """What messages and logs call them."""
        return tuple(media_name(value) for value in (*self.images, *self.videos))

    @property
    def key(self) -> str:
        """A digest that is equal where the same files or bytes are named."""
        digest = hashlib.blake2b(digest_size=16)
        for value in (*self.images, *self.videos):
            _feed(digest, value)
        return digest.hexdigest()


def _feed(digest: hashlib.blake2b, value: Any) -> None:
    if isinstance(value, Mapping):
        inner = value.get("bytes")
        _feed(digest, value.get("path") if inner is None else inner)
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
    """Return what messages and logs call an image or video."""
    if isinstance(value, Mapping):
        return media_name(value.get("path") or value.get("bytes"))
    if isinstance(value, str | Path):
        text = str(value)
        return text if len(text) <= 200 else f"{text[:60]}…"
    if isinstance(value, bytes | bytearray):
        return f"{len(value)} bytes"
    if isinstance(value, list | tuple):
        return f"{len(value)} frames"
    return type(value).__name__
