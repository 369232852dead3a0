"""Small copies of the images that responses and pairs show."""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Iterable
from pathlib import Path

from lrlhf.media import MediaError, MediaOptions, read_image

_SIDE = 384
_OPTIONS = MediaOptions(max_pixels=4 * _SIDE * _SIDE)


class Thumbnails:
    """Makes data URIs of image files until they take so many bytes.

    A record may have been written by somebody else, and a page is passed on: an image is embedded
    only where its file, symbolic links followed, lies in one of the folders.

    Args:
        max_bytes: Of all of them.
        folders: Of the runs, and of the files of their data.
    """

    def __init__(self, max_bytes: int, folders: Iterable[Path]) -> None:
        self._left = max_bytes
        self._folders = [Path(os.path.realpath(folder)) for folder in folders]
        self.uris: dict[str, str] = {}
        """By the name of the image in the records."""
        self.left_out = 0
        """Images that are files, and had no room."""
        self.outside = 0
        """Files that lie in none of the folders."""
        self._seen: set[str] = set()

    def add(self, media: Iterable[object]) -> None:
        """Add what names files of images; other names are shown as they are."""
        for name in media:
            if isinstance(name, str) and name not in self._seen:
                self._seen.add(name)
                if (uri := self._thumbnail(name)) is None:
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

    def _thumbnail(self, name: str) -> str | None:
        """Return an image file as a small JPEG; None: the name is that of none."""
        try:
            target = Path(os.path.realpath(name))
            if not target.is_file():
                return None
        except (OSError, ValueError):  # no name of a file
            return None
        if not any(target.is_relative_to(folder) for folder in self._folders):
            self.outside += 1
            return None
        try:
            small = read_image(target, _OPTIONS)
        except MediaError:
            return None  # a video, a damaged file: the page shows the name
        small.thumbnail((_SIDE, _SIDE))
        with io.BytesIO() as written:
            small.save(written, "JPEG", quality=80)
            return "data:image/jpeg;base64," + base64.b64encode(written.getvalue()).decode()
