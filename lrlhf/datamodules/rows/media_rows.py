"""Images, videos and audio of a data set: where its rows name them, and when they are read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from lrlhf.datamodules.loading.path_safety import local_path
from lrlhf.datamodules.loading.sources import Row
from lrlhf.datamodules.rows.bad_rows import BadRow
from lrlhf.datamodules.rows.columns import is_empty
from lrlhf.datamodules.rows.tokenizing import Text, Tokens
from lrlhf.media import MediaOptions, MediaProcessor, MediaRefs
from lrlhf.types import Media, Message

KINDS = ("image", "video", "audio")
_ALL_ROWS = 2_000
"""With ``media.check: auto``, so many rows are read before training."""
_THREADS = 8


@dataclass(frozen=True)
class Unread:
    """Media of a row, and the text that they belong to."""

    text: Text
    refs: MediaRefs
    prompt: Unread | None = None
    """What comes before the answer, where the answer shows something itself."""


@dataclass(frozen=True, kw_only=True)
class TokenizedText:
    """A text that may show something."""

    input_ids: Tokens
    unread: Unread | None = None
    media: Media | None = None
    """What ``unread`` names, once it is read."""
    ends: tuple[int, ...] = ()
    """Tokens that end what is learnt of it."""

    @property
    def texts(self) -> tuple[TokenizedText, ...]:
        """Itself, see `Readable`."""
        return (self,)


class Readable(Protocol):
    """A row whose texts may show something."""

    @property
    def texts(self) -> Sequence[TokenizedText]:
        """Its texts."""
        ...

    def with_media(self, reader: MediaReader) -> Self:
        """Return the row with its media read, or raise `BadRow`."""
        ...


ReadableT = TypeVar("ReadableT", bound=Readable)


def media_columns(suffix: str = "") -> tuple[str, ...]:
    """Return the columns that may hold media: ``images`` and others; ``_0`` is a candidate's."""
    return tuple(f"{kind}{plural}{suffix}" for kind in KINDS for plural in ("", "s"))


def media_in(row: Row, suffix: str = "") -> dict[str, list[Any]]:
    """Return what the media columns of a row hold, by kind; ``suffix`` as in `media_columns`."""
    return {
        kind: [
            # a list of images in ``video`` is one video
            *_listed(row.get(f"{kind}{suffix}"), several=kind == "image"),
            *_listed(row.get(f"{kind}s{suffix}"), several=True),
        ]
        for kind in KINDS
    }


def media_said(
    messages: Sequence[Message], columns: Mapping[str, list[Any]]
) -> dict[str, list[Any]]:
    """Return what messages show, by kind: their parts, and the columns of the row.

    Raises:
        BadRow: They have more parts without data than the columns hold.
    """
    waiting = {kind: [*columns[kind]] for kind in KINDS}
    found: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    for message in messages:
        _without_data(message, waiting, found)
    return {kind: [*found[kind], *waiting[kind]] for kind in KINDS}


@dataclass(frozen=True)
class MediaReader:
    """Finds the media of rows, and reads them when the row comes into a batch."""

    processor: MediaProcessor | None = None
    """Of the model; None: it reads text only, and media columns are columns like any."""
    options: MediaOptions = MediaOptions()  # noqa: RUF009  frozen
    max_tokens: tuple[int | None, str] = (None, "max_tokens")
    """Longest row that can be used, and the setting that says so."""
    remedy: str = ""
    """What else helps where a text is longer."""

    def of_columns(self, row: Row, folder: Path | None, suffix: str = "") -> MediaRefs:
        """Return what the media columns of a row name; ``suffix`` as in `media_columns`.

        Raises:
            BadRow: A file lies where rows may not name one.
        """
        if self.processor is None:
            return MediaRefs()
        return self._refs(media_in(row, suffix), folder)

    def of_messages(
        self, messages: Sequence[Message], columns: MediaRefs, folder: Path | None
    ) -> tuple[tuple[Message, ...], MediaRefs]:
        """Take the media out of messages, leaving a bare part in the place of each.

        Parts without data stand for the media of the columns, in order. Where no message has any
        part for them, they go into the first turn of the user: in the place of ``<image>``,
        ``<video>`` and ``<audio>`` in its text, else in front of it.

        Raises:
            BadRow: Parts and columns do not fit together, a text model is shown something, or a
                file lies where rows may not name one.
        """
        placed = [kind for message in messages for kind in _kinds(message) if kind]
        if not columns and not placed:
            return tuple(messages), MediaRefs()
        if self.processor is None:
            raise BadRow(
                "media for a text model",
                f"a message has a part of type {placed[0]!r}, and the model reads text only",
                remedy="train a model that takes it, or leave these rows out",
            )
        if not placed:
            messages = _put_in(messages, columns)
        waiting = {
            "image": list(columns.images),
            "video": list(columns.videos),
            "audio": list(columns.audios),
        }
        found: dict[str, list[Any]] = {kind: [] for kind in KINDS}
        bare = tuple(_without_data(message, waiting, found) for message in messages)
        left = sum(map(len, waiting.values()))
        if left:
            raise BadRow(
                "placeholder count",
                f"{left} of the {len(columns)} images, videos and audios of the columns have no "
                "part in the messages",
            )
        return bare, self._refs(found, folder)

    def read(self, unread: Unread, short_ids: Tokens) -> tuple[Tokens, Media]:
        """Read the media of a text, whose ``short_ids`` have one placeholder each, and encode it.

        Raises:
            BadRow: Something is missing, broken, or does not fit.
        """
        assert self.processor is not None  # else there are no refs
        encoded = self.processor.read(
            unread.text.text,
            unread.refs,
            self.options,
            complete=unread.text.complete,
            prompt_ids=short_ids.tolist(),
        )
        names = ", ".join(unread.refs.names)
        remedy = ", or lower media.max_pixels or media.max_frames"
        self._check_length(encoded.input_ids, f"{names}:", "tokens with the text", remedy)
        return np.asarray(encoded.input_ids, dtype=np.int32), encoded.media

    @property
    def placeholders(self) -> tuple[int, ...]:
        """Token ids that stand for media in the model's input."""
        return () if self.processor is None else tuple(self.processor.placeholders.values())

    def __call__(self, row: ReadableT) -> ReadableT:
        """Return the row with its media read, or raise `BadRow`."""
        return row if self.processor is None else row.with_media(self)

    def check(self, rows: Sequence[ReadableT | BadRow]) -> list[ReadableT | BadRow]:
        """Put a `BadRow` in the place of every row that is too long or shows what is unusable."""
        good = [row for row in rows if not isinstance(row, BadRow)]
        showing = sum(any(text.unread for text in row.texts) for row in good)
        check = self.options.check
        whole = check == "all" or (check == "auto" and showing <= _ALL_ROWS)

        def looked_at(row: ReadableT | BadRow) -> ReadableT | BadRow:
            try:
                if not isinstance(row, BadRow):
                    self._look_at(row, whole=whole)
            except BadRow as problem:
                return problem
            return row

        if not showing:
            return [looked_at(row) for row in rows]
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(looked_at, rows))

    def _check_length(self, ids: Sized, before: str, after: str, remedy: str = "") -> None:
        limit, setting = self.max_tokens
        if limit is not None and len(ids) > limit:
            raise BadRow(
                "too long",
                f"{before} {len(ids)} {after}, {setting}={limit}",
                remedy=f"raise {setting}{remedy}",
            )

    def _look_at(self, row: Readable, *, whole: bool) -> None:
        for index, text in enumerate(row.texts):
            what = "it" if len(row.texts) == 1 else f"candidate {index} with its prompt"
            self._check_length(text.input_ids, f"{what} has", "tokens", self.remedy)
            if self.processor is None:
                continue
            if text.unread is None and np.isin(text.input_ids, self.placeholders).any():
                # the forward pass of a batch in which another row shows something would fail at it
                raise BadRow(
                    "placeholder count",
                    "the text has the model's mark of an image, video or audio, and shows none",
                    remedy="leave the mark out of the text",
                )
        if self.processor is None:
            return
        if whole:
            row.with_media(self)
        else:
            for unread in (text.unread for text in row.texts if text.unread is not None):
                self.processor.check(unread.text.text, unread.refs)

    def limited(self, max_tokens: int | None, setting: str, remedy: str = "") -> MediaReader:
        """Return a reader with another limit of tokens."""
        return replace(self, max_tokens=(max_tokens, setting), remedy=remedy)

    def _refs(self, found: Mapping[str, Sequence[Any]], folder: Path | None) -> MediaRefs:
        return MediaRefs(
            *(tuple(self._anchored(one, folder) for one in found[kind]) for kind in KINDS)
        )

    def _anchored(self, value: Any, folder: Path | None) -> Any:
        """Make the paths of a row absolute, and refuse those that lead out of its data."""
        if isinstance(value, list | tuple):
            return [self._anchored(entry, folder) for entry in value]
        if isinstance(value, Mapping):
            # what a row knows of a file beside its bytes is only its name
            path = value.get("path")
            known = path is None or any(value.get(key) is not None for key in ("bytes", "array"))
            return value if known else self._anchored(path, folder)
        if not isinstance(value, str) or value.startswith("data:"):
            return value
        if "://" in value and not value.startswith("file:"):
            return value
        # absolute: parts are anchored again when columns fill them
        root = None if self.options.root is None else Path(self.options.root)
        return local_path(value, folder, root=root)


def _listed(value: Any, *, several: bool) -> list[Any]:
    """Return what a cell holds: nothing, one value, or ``several`` in a list."""
    if several and isinstance(value, list | tuple):
        return list(value)
    return [] if is_empty(value) else [value]


def _kinds(message: Message) -> list[str | None]:
    """Return what each part of a message shows; None: it is text, or something else."""
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else ()
    return [_kind_of(part) for part in parts]


def _kind_of(part: Any) -> str | None:
    kind = str(part.get("type", "")).removesuffix("_url") if isinstance(part, Mapping) else ""
    kind = kind.removeprefix("input_")
    return kind if kind in KINDS else None


def _data_of(part: Mapping[str, Any], kind: str) -> Any:
    """Find what a part shows, in any of the ways that chat formats write it."""
    for key in (kind, "path", "url", f"{kind}_url", f"input_{kind}", "bytes"):
        value = part.get(key)
        if isinstance(value, Mapping) and "url" in value:
            value = value["url"]
        if isinstance(value, Mapping) and "data" in value:  # as OpenAI's input_audio
            value = f"data:{kind}/{value.get('format', 'wav')};base64,{value['data']}"
        if value is not None:
            return value
    return None


def _without_data(
    message: Message, waiting: Mapping[str, list[Any]], found: Mapping[str, list[Any]]
) -> Message:
    """Leave ``{"type": kind}`` of each media part, and collect what it shows."""
    kinds = _kinds(message)
    if not any(kinds):
        return message
    parts: list[Any] = []
    for part, kind in zip(message["content"], kinds, strict=True):
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
    """Return one message part per image, video and audio, without data."""
    return [{"type": kind} for kind, count in refs.counts.items() for _ in range(count)]


def text_parts(text: str, refs: MediaRefs) -> list[Mapping[str, Any]]:
    """Turn a text with ``<image>``, ``<video>`` and ``<audio>`` in it into the parts of a message.

    Raises:
        BadRow: It has some, but not as many as there are of each kind.
    """
    pieces = re.split(rf"<({'|'.join(KINDS)})>", text)
    marks = {kind: pieces[1::2].count(kind) for kind in KINDS}
    if not any(marks.values()):
        return [*bare_parts(refs), {"type": "text", "text": text}]
    if marks != refs.counts:
        told = [kind for kind in KINDS if marks[kind] or refs.counts[kind]]
        raise BadRow(
            "placeholder count",
            f"the text has {' and '.join(f'{marks[kind]} <{kind}>' for kind in told)}, the row "
            f"{' and '.join(f'{refs.counts[kind]} {kind}(s)' for kind in told)}: "
            f"{', '.join(refs.names)}",
        )
    parts: list[Mapping[str, Any]] = []
    for piece, kind in zip_longest(pieces[::2], pieces[1::2]):
        if piece:
            parts.append({"type": "text", "text": piece})
        if kind:
            parts.append({"type": kind})
    return parts
