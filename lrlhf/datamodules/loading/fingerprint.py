"""What tells whether the rows of a resumed run are those that the checkpoint was made with."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from lrlhf.datamodules.rows.media_rows import Unread
from lrlhf.media import MediaRefs

Feed = Callable[[bytes], None]

_PIECE = 1 << 14
_PIECES = 4
"""Of a file larger than all of them together, so many pieces of so many bytes are read."""
_THREADS = 8

_JSON = {str, int, float, bool, type(None), dict, list, tuple}
"""Of these, json makes one line, which takes a tenth of the time of going through them here."""


class Fingerprint(NamedTuple):
    """Digests of all rows in their order."""

    data: str
    """Of what rows hold: texts, columns, labels, and the names of files."""
    tokens: str
    """Of the token ids, which depend on the tokenizer too."""
    files: str
    """Of what is in the files that rows name, such as images: the size of each, and all of it up to
    64 KiB, else four pieces of 16 KiB evenly from its first to its last byte. An image that was
    made anew has another size or, compressed, another end; a change that keeps the size and lies
    between two pieces is not seen. Empty where rows name no file."""


class _Feeds(NamedTuple):
    """Where the parts of a row go."""

    data: Feed
    tokens: Feed
    files: dict[Path, None]
    """In the order in which they are named, each once."""


def fingerprint(rows: Iterable[object]) -> Fingerprint:
    """Digest rows; equal rows in equal order have equal digests, in every process.

    A folder that was moved makes no difference: of a path only the name counts, and the file.
    """
    data, tokens, files = (hashlib.blake2b(digest_size=16) for _ in range(3))
    feeds = _Feeds(data.update, tokens.update, {})
    for row in rows:
        _feed(row, feeds)
    if feeds.files:
        with ThreadPoolExecutor(_THREADS) as pool:  # disks of a network answer late
            for content in pool.map(_content, feeds.files):
                files.update(content)
    contents = files.hexdigest() if feeds.files else ""
    return Fingerprint(data.hexdigest(), tokens.hexdigest(), contents)


def _content(path: Path) -> bytes:
    """Digest a file; see `Fingerprint.files`."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            digest.update(b"%d:" % size)
            last = max(size, _PIECE * _PIECES) - _PIECE
            for piece in range(_PIECES):
                start = last * piece // (_PIECES - 1)
                digest.update(os.pread(stream.fileno(), _PIECE, start))
    except OSError:  # it is told when its row is read, and is another row's turn then
        return b"missing"
    return digest.digest()


def _feed(value: Any, feeds: _Feeds) -> None:
    if type(value) in _JSON:
        try:
            feeds.data(json.dumps(value, sort_keys=True).encode() + b"\n")
        except (TypeError, ValueError):  # something in it that JSON has no form for
            _feed_parts(value, feeds)
    elif isinstance(value, np.ndarray | Tensor | Image.Image):
        array = np.ascontiguousarray(value)
        feed = feeds.tokens if array.dtype == np.int32 else feeds.data
        feed(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    elif isinstance(value, bytes | bytearray):
        feeds.data(b"b%d:" % len(value) + value)
    elif isinstance(value, Path):
        feeds.files[value] = None
        _feed(value.name, feeds)
    else:
        _feed_parts(value, feeds)


def _feed_parts(value: Any, feeds: _Feeds) -> None:
    parts: Iterable[Any]
    if isinstance(value, Mapping):
        parts = (part for key in sorted(value, key=str) for part in (str(key), value[key]))
    elif isinstance(value, list | tuple):
        parts = value
    elif isinstance(value, Unread):
        parts = (value.refs,)  # its text was made of the row by the chat template
    elif isinstance(value, MediaRefs):
        shown = (*value.images, *value.videos)
        feeds.files.update(dict.fromkeys(_files_of(shown)))
        parts = [_without_folder(entry) for entry in shown]
    elif is_dataclass(value):
        parts = [getattr(value, field.name) for field in fields(value)]
    else:
        # dates and the like; what prints its address would differ in every process
        text = str(value)
        parts = (type(value).__name__, "" if " at 0x" in text else text)
    feeds.data(b"(")
    for part in parts:
        _feed(part, feeds)
    feeds.data(b")")


def _without_folder(media: Any) -> Any:
    """Return the name of a file, where an image or video is given by its path."""
    if isinstance(media, Mapping):
        return media.get("bytes") or _without_folder(media.get("path"))
    if isinstance(media, str) and not media.startswith("data:"):
        return Path(media).name
    return media


def _files_of(media: Any) -> Iterator[Path]:
    """Go through the files by which images and videos are given."""
    if isinstance(media, Mapping):
        yield from () if media.get("bytes") else _files_of(media.get("path"))
    elif isinstance(media, list | tuple):
        for entry in media:
            yield from _files_of(entry)
    elif isinstance(media, str | Path) and not str(media).startswith("data:"):
        yield Path(media)
