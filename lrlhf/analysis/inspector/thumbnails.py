"""Small copies of the images that responses and pairs show."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

_SIDE = 384
_MAX_PIXELS = 64_000_000
"""A larger image would take more memory than a page is worth."""


class Thumbnails:
    """Makes data URIs of image files until they take so many bytes.

    Args:
        max_bytes: Of all of them.
    """

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes
        self.uris: dict[str, str] = {}
        """By the name of the image in the records."""
        self.left_out = 0
        """Images that are files, and had no room."""
        self._seen: set[str] = set()

    def add(self, media: Iterable[object]) -> None:
        """Add what names files of images; other names are shown as they are."""
        for name in media:
            if isinstance(name, str) and name not in self._seen:
                self._seen.add(name)
                if (uri := _thumbnail(name)) is None:
                    continue
                if len(uri) > self._left:
                    self.left_out += 1
                else:
                    self._left -= len(uri)
                    self.uris[name] = uri

    def add_json(self, media: str) -> None:
        """The same of a list of names as JSON."""
        names = json.loads(media)
        self.add(names if isinstance(names, list) else ())


def _thumbnail(name: str) -> str | None:
    """Return an image file as a small JPEG; None: the name is that of none."""
    try:
        if not Path(name).is_file():
            return None
        with Image.open(name) as image:
            if image.width * image.height > _MAX_PIXELS:
                return None
            small = ImageOps.exif_transpose(image.convert("RGB"))
            small.thumbnail((_SIDE, _SIDE))
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError):
        return None  # a video, a damaged file, no name of a file: the page shows the name
    with io.BytesIO() as written:
        small.save(written, "JPEG", quality=80)
        return "data:image/jpeg;base64," + base64.b64encode(written.getvalue()).decode()
