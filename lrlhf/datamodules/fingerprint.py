"""What tells whether the rows of a resumed run are those that the checkpoint was made with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from torch import Tensor

from lrlhf.datamodules.media_rows import Unread
from lrlhf.media import MediaRefs

Feed = Callable[[bytes], None]

_JSON = {str, int, float, bool, type(None), dict, list, tuple}
"""Of these, json makes one line, which takes a tenth of the time of going through them here."""


class Fingerprint(NamedTuple):
    """Digests of all rows in their order."""

    data: str
    """Of what rows hold: texts, columns, labels, and the names of files (not their content)."""
    tokens: str
    """Of the token ids, which depend on the tokenizer too."""


def fingerprint(rows: Iterable[object]) -> Fingerprint:
    """Digest rows; equal rows in equal order have equal digests, in every process.

    A folder that was moved makes no difference: of a path only the name counts.
    """
    data, tokens = (hashlib.blake2b(digest_size=16) for _ in range(2))
    for row in rows:
        _feed(row, data.update, tokens.update)
    return Fingerprint(data.hexdigest(), tokens.hexdigest())


def _feed(value: Any, data: Feed, tokens: Feed) -> None:
    if type(value) in _JSON:
        try:
            data(json.dumps(value, sort_keys=True).encode() + b"\n")
        except (TypeError, ValueError):  # something in it that JSON has no form for
            _feed_parts(value, data, tokens)
    elif isinstance(value, np.ndarray | Tensor | Image.Image):
        array = np.ascontiguousarray(value)
        feed = tokens if array.dtype == np.int32 else data
        feed(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    elif isinstance(value, bytes | bytearray):
        data(b"b%d:" % len(value) + value)
    elif isinstance(value, Path):
        _feed(value.name, data, tokens)
    else:
        _feed_parts(value, data, tokens)


def _feed_parts(value: Any, data: Feed, tokens: Feed) -> None:
    parts: Iterable[Any]
    if isinstance(value, Mapping):
        parts = (part for key in sorted(value, key=str) for part in (str(key), value[key]))
    elif isinstance(value, list | tuple):
        parts = value
    elif isinstance(value, Unread):
        parts = (value.refs,)  # its text was made of the row by the chat template
    elif isinstance(value, MediaRefs):
        parts = [_without_folder(entry) for entry in (*value.images, *value.videos)]
    elif is_dataclass(value):
        parts = [getattr(value, field.name) for field in fields(value)]
    else:
        # dates and the like; what prints its address would differ in every process
        text = str(value)
        parts = (type(value).__name__, "" if " at 0x" in text else text)
    data(b"(")
    for part in parts:
        _feed(part, data, tokens)
    data(b")")


def _without_folder(media: Any) -> Any:
    """Return the name of a file, where an image or video is given by its path."""
    if isinstance(media, Mapping):
        return media.get("bytes") or _without_folder(media.get("path"))
    if isinstance(media, str) and not media.startswith("data:"):
        return Path(media).name
    return media
