"""Images and videos in the rows of a data set: where rows name them, and when they are read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from lrlhf.datamodules.loading.path_safety import local_path
from lrlhf.datamodules.loading.sources import Row
from lrlhf.datamodules.rows.bad_rows import BadRow
from lrlhf.datamodules.rows.tokenizing import Text, Tokens
from lrlhf.media import MediaError, MediaOptions, MediaProcessor, MediaRefs, media_name
from lrlhf.types import Media, Message

KINDS = ("image", "video")
_ALL_ROWS = 2_000
"""With ``media.check: auto``, so many rows are read before training."""
_THREADS = 8


class Readable(Protocol):
    """A row that may have media."""

    @property
    def all_unread(self) -> tuple[Unread, ...]:
        """Its media, text by text."""
        ...

    @property
    def plain_ids(self) -> tuple[Tokens, ...]:
        """Tokens of its texts that show nothing."""
        ...

    def with_media(self, reader: MediaReader) -> Self:
        """Return the row with its media read, or raise `BadRow`."""
        ...


ReadableT = TypeVar("ReadableT", bound=Readable)


def media_columns(suffix: str = "") -> tuple[str, ...]:
    """Return the columns that may hold media: ``image``, ``images``, ``video``, ``videos``.

    Args:
        suffix: ``_0`` and ``_1`` for those of one candidate of a pair.
    """
    return tuple(f"{kind}{plural}{suffix}" for kind in KINDS for plural in ("", "s"))


@dataclass(frozen=True)
class Unread:
    """Media of a row, and the text that they belong to."""

    text: Text
    refs: MediaRefs
    prompt: Unread | None = None
    """What comes before the answer, where the answer shows something itself."""


@dataclass(frozen=True)
class MediaPlaces:
    """Finds the media of a row.

    Args:
        processor: Of the model; None: it reads text only, and media columns are columns like any.
        root: Folder of relative paths; None: that of the data file.
    """

    processor: MediaProcessor | None = None
    root: str | None = None

    def of_columns(self, row: Row, folder: Path | None, suffix: str = "") -> MediaRefs:
        """Read the media columns of a row.

        Raises:
            BadRow: A file lies where rows may not name one.
        """
        if self.processor is None:
            return MediaRefs()
        found: dict[str, list[Any]] = {kind: [] for kind in KINDS}
        for kind in KINDS:
            several = row.get(f"{kind}s{suffix}")
            one = row.get(f"{kind}{suffix}")
            if kind == "image" and isinstance(one, list | tuple):
                found[kind] += one
            elif not _is_nothing(one):
                found[kind].append(one)
            if isinstance(several, list | tuple):
                found[kind] += several
            elif not _is_nothing(several):
                found[kind].append(several)
        return self._refs(found, folder)

    def of_messages(
        self, messages: Sequence[Message], columns: MediaRefs, folder: Path | None
    ) -> tuple[tuple[Message, ...], MediaRefs]:
        """Take the media out of messages, leaving a bare part in the place of each.

        Parts without data stand for the media of the columns, in order. Where no message has any
        part for them, they go into the first turn of the user: in the place of ``<image>`` and
        ``<video>`` in its text, else in front of it.

        Raises:
            BadRow: Parts and columns do not fit together, a text model is shown something, or a
                file lies where rows may not name one.
        """
        if not columns and not any(_media_parts(message) for message in messages):
            return tuple(messages), MediaRefs()
        if self.processor is None:
            raise BadRow(
                "media for a text model",
                "the messages show an image or video, and the model has no processor for them",
                remedy="train a vision-language model, or leave these rows out",
            )
        if columns and not any(_media_parts(message) for message in messages):
            messages = _put_in(messages, columns)
        waiting = {"image": list(columns.images), "video": list(columns.videos)}
        found: dict[str, list[Any]] = {kind: [] for kind in KINDS}
        bare = tuple(_without_data(message, waiting, found) for message in messages)
        left = sum(map(len, waiting.values()))
        if left:
            raise BadRow(
                "placeholder count",
                f"{left} of the {len(columns)} images and videos of the columns have no part in "
                "the messages",
            )
        return bare, self._refs(found, folder)

    def _refs(self, found: Mapping[str, Sequence[Any]], folder: Path | None) -> MediaRefs:
        images, videos = ([self._anchored(one, folder) for one in found[kind]] for kind in KINDS)
        return MediaRefs(tuple(images), tuple(videos))

    def _anchored(self, value: Any, folder: Path | None) -> Any:
        """Make the paths of a row absolute, and refuse those that lead out of its data."""
        if isinstance(value, list | tuple):
            return [self._anchored(entry, folder) for entry in value]
        if isinstance(value, Mapping):
            # what a row knows of a file beside its bytes is only its name
            path = value.get("path")
            known = value.get("bytes") is not None or path is None
            return value if known else self._anchored(path, folder)
        if not isinstance(value, str) or value.startswith("data:"):
            return value
        if "://" in value and not value.startswith("file:"):
            return value
        # absolute: parts are anchored again when columns fill them
        return local_path(value, folder, root=None if self.root is None else Path(self.root))


@dataclass(frozen=True)
class MediaReader:
    """Reads the media of rows: in the loader's workers, when the row comes into a batch.

    Args:
        processor: Of the model.
        options: How.
        max_tokens: Longest row that can be used, and the setting that says so.
    """

    processor: MediaProcessor
    options: MediaOptions
    max_tokens: tuple[int | None, str]

    def __call__(self, unread: Unread, short_ids: Tokens) -> tuple[Tokens, Media]:
        """Read a row's media and encode its text.

        Args:
            unread: The row.
            short_ids: Its text's tokens, with one placeholder per image or video.

        Raises:
            BadRow: Something is missing, broken, or does not fit.
        """
        try:
            encoded = self.processor.read(
                unread.text.text,
                unread.refs,
                self.options,
                complete=unread.text.complete,
                prompt_ids=short_ids.tolist(),
            )
        except MediaError as error:
            raise as_bad_row(error) from error
        limit, setting = self.max_tokens
        if limit is not None and len(encoded.input_ids) > limit:
            raise BadRow(
                "too long",
                f"{', '.join(unread.refs.names)}: {len(encoded.input_ids)} tokens with the text, "
                f"{setting}={limit}",
                remedy=f"raise {setting}, or lower media.max_pixels or media.max_frames",
            )
        return np.asarray(encoded.input_ids, dtype=np.int32), encoded.media

    def check(self, rows: Sequence[ReadableT | BadRow]) -> list[ReadableT | BadRow]:
        """Put a `BadRow` in the place of every row whose media are known to be unusable."""
        with_media = sum(1 for row in rows if not isinstance(row, BadRow) and row.all_unread)
        whole = self.options.check == "all" or (
            self.options.check == "auto" and with_media <= _ALL_ROWS
        )

        marks = list(self.processor.placeholders.values())

        def look(row: ReadableT | BadRow) -> ReadableT | BadRow:
            if isinstance(row, BadRow):
                return row
            if any(np.isin(ids, marks).any() for ids in row.plain_ids):
                # the forward pass of a batch in which another row shows something would fail at it
                return BadRow(
                    "placeholder count",
                    "the text has the model's mark of an image or video, and shows none",
                    remedy="leave the mark out of the text",
                )
            try:
                if whole:
                    row.with_media(self)
                    return row
                for unread in row.all_unread:
                    self.processor.check(unread.text.text, unread.refs)
            except MediaError as error:
                return as_bad_row(error)
            except BadRow as problem:
                return problem
            return row

        if not with_media:
            return [look(row) for row in rows]
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(look, rows))


@dataclass(frozen=True)
class RowReading:
    """What a data module does about images and videos.

    Args:
        places: Finds them in the rows.
        reader: Reads them; None: the model reads text only.
    """

    places: MediaPlaces = field(default_factory=MediaPlaces)
    reader: MediaReader | None = None

    @classmethod
    def by(
        cls,
        processor: MediaProcessor | None,
        options: MediaOptions,
        max_tokens: int | None,
        setting: str,
    ) -> RowReading:
        """Read with a model's processor; ``setting`` names the limit of a row's tokens."""
        if processor is None:
            return cls()
        places = MediaPlaces(processor, options.root)
        return cls(places, MediaReader(processor, options, (max_tokens, setting)))

    def check(self, rows: Sequence[ReadableT | BadRow]) -> list[ReadableT | BadRow]:
        """See `MediaReader.check`."""
        return list(rows) if self.reader is None else self.reader.check(rows)

    def __call__(self, row: ReadableT) -> ReadableT:
        """Return the row with its media read, or raise `BadRow`."""
        return row if self.reader is None else row.with_media(self.reader)


def as_bad_row(error: MediaError) -> BadRow:
    """Count unusable media among the bad rows."""
    return BadRow(error.reason, error.detail, remedy=error.remedy)


def _is_nothing(value: Any) -> bool:
    """Whether a table's cell is empty; an array has no truth of its own."""
    return value is None or (isinstance(value, str) and not value)


def _media_parts(message: Message) -> list[Mapping[str, Any]]:
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else ()
    return [part for part in parts if isinstance(part, Mapping) and _kind_of(part) is not None]


def _kind_of(part: Mapping[str, Any]) -> str | None:
    kind = str(part.get("type", "")).removesuffix("_url")
    if kind in ("audio", "input_audio"):
        raise BadRow("audio", "a message has a part of type 'audio', which is not supported yet")
    return kind if kind in KINDS else None


def _data_of(part: Mapping[str, Any], kind: str) -> Any:
    """Find what a part shows, in any of the ways that chat formats write it."""
    for key in (kind, "path", "url", f"{kind}_url", "bytes"):
        value = part.get(key)
        if isinstance(value, Mapping) and "url" in value:
            value = value["url"]
        if value is not None:
            return value
    return None


def _without_data(
    message: Message, waiting: Mapping[str, list[Any]], found: Mapping[str, list[Any]]
) -> Message:
    """Leave ``{"type": kind}`` of each media part, and collect what it shows."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    parts: list[Any] = []
    for part in content:
        kind = _kind_of(part) if isinstance(part, Mapping) else None
        if kind is None:
            parts.append(part)
            continue
        value = _data_of(part, kind)
        if value is None:
            if not waiting[kind]:
                raise BadRow(
                    "placeholder count",
                    f"a message has more parts of type {kind!r} than the row has {kind}s",
                )
            value = waiting[kind].pop(0)
        found[kind].append(value)
        parts.append({"type": kind})
    return {**message, "content": parts}


def _put_in(messages: Sequence[Message], refs: MediaRefs) -> tuple[Message, ...]:
    turn = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if turn is None:
        raise BadRow("placeholder count", "the row has media, and no turn of a user to show them")
    content = messages[turn].get("content", "")
    if isinstance(content, list | tuple):
        parts = [*bare_parts(refs), *content]
    else:
        parts = text_parts(str(content), refs)
    changed = {**messages[turn], "content": parts}
    return (*messages[:turn], changed, *messages[turn + 1 :])


def bare_parts(refs: MediaRefs) -> list[Mapping[str, Any]]:
    """Return one message part per image and video, without data."""
    kinds = ["image"] * len(refs.images) + ["video"] * len(refs.videos)
    return [{"type": kind} for kind in kinds]


def text_parts(text: str, refs: MediaRefs) -> list[Mapping[str, Any]]:
    """Turn a text with ``<image>`` and ``<video>`` in it into the parts of a message.

    Raises:
        BadRow: It has some, but not as many as there are images and videos.
    """
    counts = {"image": len(refs.images), "video": len(refs.videos)}
    marked = {kind: text.count(f"<{kind}>") for kind in KINDS}
    if not any(marked.values()):
        return [*bare_parts(refs), {"type": "text", "text": text}]
    if marked != counts:
        raise BadRow(
            "placeholder count",
            f"the text has {marked['image']} <image> and {marked['video']} <video>, the row "
            f"{counts['image']} image(s) and {counts['video']} video(s): "
            f"{', '.join(media_name(value) for value in (*refs.images, *refs.videos))}",
        )
    pieces = re.split(r"<(image|video)>", text)
    parts: list[Mapping[str, Any]] = []
    for piece, kind in zip_longest(pieces[::2], pieces[1::2]):
        if piece:
            parts.append({"type": "text", "text": piece})
        if kind:
            parts.append({"type": kind})
    return parts
