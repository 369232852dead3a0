"""What shows whether the rows of a resumed run are those that the checkpoint was made with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from lrlhf.datamodules.rows.media_rows import Unread
from lrlhf.media import MediaRefs
from lrlhf.media.refs import MediaPart, file_digest

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


def fingerprint(rows: Iterable[object], *, read_files: bool = True) -> Fingerprint:
    """Digest rows; equal rows in equal order have equal digests, in every process.

    A folder that was moved makes no difference: of a path only the name counts, and the file.
    Without ``read_files`` only the name does.
    """
    digest, files = _Digest(), hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.feed(row)
    if digest.files and read_files:
        with ThreadPoolExecutor(_THREADS) as pool:  # disks of a network answer late
            for content in pool.map(file_digest, digest.files):
                files.update(content or b"missing")
    contents = files.hexdigest() if digest.files and read_files else ""
    return Fingerprint(digest.data.hexdigest(), digest.tokens.hexdigest(), contents)


class _Digest:
    """Goes through the parts of rows."""

    def __init__(self) -> None:
        self.data, self.tokens = (hashlib.blake2b(digest_size=16) for _ in range(2))
        self.files: dict[Path, None] = {}  # in the order in which they are named, each once

    def feed(self, value: Any) -> None:
        if type(value) in _JSON:
            try:
                self.data.update(json.dumps(value, sort_keys=True).encode() + b"\n")
            except (TypeError, ValueError):  # something in it that JSON has no form for
                self._feed_parts(value)
        elif isinstance(value, np.ndarray | Tensor | Image.Image):
            array = np.ascontiguousarray(
                value.detach().cpu() if isinstance(value, Tensor) else value
            )
            if array.dtype == object:  # its bytes are addresses
                self._feed_parts(array.tolist())
                return
            digest = self.tokens if array.dtype == np.int32 else self.data
            digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        elif isinstance(value, bytes | bytearray):
            self.data.update(b"b%d:" % len(value) + value)
        elif isinstance(value, Path):
            self.files[value] = None
            self.feed(value.name)
        else:
            self._feed_parts(value)

    def _feed_parts(self, value: Any) -> None:
        self.data.update(b"(")
        for part in self._parts(value):
            self.feed(part)
        self.data.update(b")")

    def _parts(self, value: Any) -> Iterable[Any]:
        if isinstance(value, Mapping):
            return (part for key in sorted(value, key=str) for part in (str(key), value[key]))
        if isinstance(value, list | tuple):
            return value
        if isinstance(value, set | frozenset):
            return sorted(value, key=str)  # their own order is another in every process
        if isinstance(value, Unread):
            return (value.refs,)  # its text was made of the row by the chat template
        if isinstance(value, MediaRefs):
            return (_named(entry) for entry in value.everything)
        if is_dataclass(value):
            return (getattr(value, field.name) for field in fields(value) if field.compare)
        # dates and the like; what prints its address would differ in every process
        text = str(value)
        return (type(value).__name__, "" if " at 0x" in text else text)


def _named(media: Any) -> Any:
    """Return an image, video or audio, as a `Path` where it is given by one."""
    if isinstance(media, MediaPart):
        return [_named(media.value), media.options]
    if isinstance(media, Mapping):
        if media.get("array") is not None:
            return [media["array"], media.get("sampling_rate")]
        return media.get("bytes") or _named(media.get("path"))
    if isinstance(media, list | tuple):
        return [_named(entry) for entry in media]
    if isinstance(media, str) and not media.startswith("data:"):
        return Path(media)
    return media
