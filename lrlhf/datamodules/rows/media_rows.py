"""Images, videos and audio of a data set: where its rows name them, and when they are read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from lrlhf.datamodules.loading.plain_rows import read_structure
from lrlhf.datamodules.loading.sources import Row
from lrlhf.datamodules.rows.bad_rows import BadRow
from lrlhf.datamodules.rows.chat import Text, Tokens
from lrlhf.datamodules.rows.columns import is_empty
from lrlhf.media import MediaOptions, MediaProcessor, MediaRefs
from lrlhf.media.decode import reading_of
from lrlhf.media.parts import KINDS, anchored, data_of, kind_of, options_of, parts_of
from lrlhf.media.refs import MediaPart, PartOptions
from lrlhf.types import Media, Message

_ALL_ROWS = 2_000
"""With ``media.check: auto``, so many rows are read before training."""
_THREADS = 8


@dataclass(frozen=True)
class DeferredMedia:
    """Media of a row, and the text that they belong to."""

    text: Text
    refs: MediaRefs
    prompt: DeferredMedia | None = None
    """What comes before the answer, where the answer shows something itself."""


@dataclass(frozen=True, kw_only=True)
class TokenizedText:
    """A text that may show something."""

    input_ids: Tokens
    deferred: DeferredMedia | None = None
    media: Media | None = None
    """What ``deferred`` names, once it is read."""
    ends: tuple[int, ...] = ()
    """Tokens that end what is learnt of it."""

    @property
    def texts(self) -> tuple[TokenizedText, ...]:
        """Itself, see `Readable`."""
        return (self,)


class Readable(Protocol):
    """A row whose texts may show something."""

    @property
    def texts(self) -> Sequence[TokenizedText]: ...

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
            _with_options(value, kind)
            for value in (
                # a list of images in ``video`` is one video
                *_listed(row.get(f"{kind}{suffix}"), several=kind == "image"),
                *_listed(row.get(f"{kind}s{suffix}"), several=True),
            )
        ]
        for kind in KINDS
    }


def media_text(
    messages: Sequence[Message], columns: Mapping[str, list[Any]]
) -> dict[str, list[Any]]:
    """Return what messages show, by kind: their parts, and the columns of the row.

    Raises:
        BadRow: They have more parts without data than the columns hold.
    """
    placed = _PlacedMedia(columns)
    marks = _Marks({})
    if _places(messages, marks) != {kind: len(columns[kind]) for kind in KINDS}:
        marks = _LETTERS  # a judge of texts may read them
    for message in messages:
        _without_data(message, placed, marks)
    return {kind: [*placed.shown[kind], *placed.waiting[kind]] for kind in KINDS}


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
        present = frozenset(
            kind for kind in KINDS if {f"{kind}{suffix}", f"{kind}s{suffix}"} & row.keys()
        )
        return replace(self._refs(media_in(row, suffix), folder), columns=present)

    def of_messages(
        self, messages: Sequence[Message], columns: MediaRefs, folder: Path | None
    ) -> tuple[tuple[Message, ...], MediaRefs]:
        """Take the media out of messages, leaving a bare part in the place of each.

        Parts without data, and the marks ``<image>``, ``<video>`` and ``<audio>`` (or those of the
        model itself) in the text of any turn, stand for the media of the columns, in the order of
        the conversation; parts with data show their own. Where the columns have media and nothing
        stands for any of them, they go in front of the first turn of the user. In a row that shows
        nothing, and has no column for it, the marks are letters like any.

        Raises:
            BadRow: Places and columns do not fit together, a text model is shown something, a part
                has an option that is not followed, or a file lies where rows may not name one.
        """
        parts = [part for message in messages for part in parts_of(message)]
        placed = [kind for kind in map(kind_of, parts) if kind]
        if not columns and not placed and not columns.columns:
            return tuple(messages), MediaRefs()
        if self.processor is None:
            raise BadRow(
                "media for a text model",
                f"a message has a part of type {placed[0]!r}, and the model reads text only",
                remedy="train a model that takes it, or leave these rows out",
            )
        marks = _Marks(self.processor.marks, KINDS if columns else (*columns.columns, *placed))
        counts = marks.count(text for message in messages for text in _texts(message))
        places = _places(messages, marks)
        if any(counts.values()):
            _check_marks(counts, places, columns)
        elif columns and not any(places.values()):
            messages = _put_in(messages, columns)
        columns_media = _PlacedMedia(
            {
                "image": list(columns.images),
                "video": list(columns.videos),
                "audio": list(columns.audios),
            },
            self.options,
        )
        bare_messages = tuple(_without_data(message, columns_media, marks) for message in messages)
        left = sum(map(len, columns_media.waiting.values()))
        if left:
            raise BadRow(
                "placeholder count",
                f"{left} of the {len(columns)} images, videos and audios of the columns have no "
                "part in the messages",
            )
        return bare_messages, self._refs(columns_media.shown, folder)

    def of_texts(self, texts: Sequence[str], refs: MediaRefs) -> tuple[str, ...]:
        """Write the model's own marks in the place of ``<image>`` and others in plain texts.

        Args:
            texts: That follow each other, such as a prompt and its answer.
            refs: What all of them show.

        Raises:
            BadRow: They have marks, but not as many as there are of each kind.
        """
        if self.processor is None or not (refs or refs.columns):
            return tuple(texts)
        marks = _Marks(self.processor.marks, KINDS if refs else refs.columns)
        counts = marks.count(texts)
        if any(counts.values()):
            _check_marks(counts, counts, refs)
        written = {f"<{kind}>": form for kind, form in self.processor.written.items()}
        return tuple(
            "".join(
                written.get(piece, piece) if kind else piece for piece, kind in marks.split(text)
            )
            for text in texts
        )

    def refs_within(self, texts: Sequence[str], refs: MediaRefs) -> MediaRefs:
        """Return the media of ``refs`` that marks in the first ``texts`` stand for."""
        if self.processor is None:
            return refs
        return refs.first(_Marks(self.processor.marks).count(texts))

    def read(self, deferred: DeferredMedia, short_ids: Tokens) -> tuple[Tokens, Media]:
        """Read the media of a text, whose ``short_ids`` have one placeholder each, and encode it.

        Raises:
            BadRow: Something is missing, broken, or does not fit.
        """
        assert self.processor is not None  # else there are no refs
        encoded = self.processor.read(
            deferred.text.text,
            deferred.refs,
            self.options,
            complete=deferred.text.complete,
            prompt_ids=short_ids.tolist(),
        )
        names = ", ".join(deferred.refs.names)
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
        showing = sum(any(text.deferred for text in row.texts) for row in good)
        check = self.options.check
        decode = check == "all" or (check == "auto" and showing <= _ALL_ROWS)

        def looked_at(row: ReadableT | BadRow) -> ReadableT | BadRow:
            try:
                if not isinstance(row, BadRow):
                    self._look_at(row, decode=decode)
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

    def _look_at(self, row: Readable, *, decode: bool) -> None:
        for index, text in enumerate(row.texts):
            what = "it" if len(row.texts) == 1 else f"candidate {index} with its prompt"
            self._check_length(text.input_ids, f"{what} has", "tokens", self.remedy)
            if self.processor is None:
                continue
            if text.deferred is None and np.isin(text.input_ids, self.placeholders).any():
                # the forward pass of a batch in which another row shows something would fail at it
                raise BadRow(
                    "placeholder count",
                    "the text has the model's mark of an image, video or audio, and shows none",
                    remedy="leave the mark out of the text",
                )
        if self.processor is None:
            return
        if decode:
            row.with_media(self)
        else:
            for deferred in (text.deferred for text in row.texts if text.deferred is not None):
                self.processor.check(deferred.text.text, deferred.refs)

    def limited(self, max_tokens: int | None, setting: str, remedy: str = "") -> MediaReader:
        return replace(self, max_tokens=(max_tokens, setting), remedy=remedy)

    def _refs(self, media: Mapping[str, Sequence[Any]], folder: Path | None) -> MediaRefs:
        return MediaRefs(
            *(tuple(anchored(each, folder, self.options) for each in media[kind]) for kind in KINDS)
        )


def _listed(value: Any, *, several: bool) -> list[Any]:
    """Return what a cell holds: nothing, one value, or ``several`` in a list."""
    if several and isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError):  # it is a path
            value = read_structure(value)  # as a .csv holds a list
    if several and isinstance(value, list | tuple):
        return [] if all(map(is_empty, value)) else list(value)
    return [] if is_empty(value) else [value]


def _with_options(value: Any, kind: str) -> Any:
    """Read a value of a column that is written as a part of a message, with options."""
    if not isinstance(value, Mapping) or value.get("array") is not None:
        return value
    if value.get(kind) is not None or value.get(f"{kind}_url") is not None:
        return data_of(value, kind)
    own = options_of(value, kind)
    return value if own == PartOptions() else MediaPart(value, own)


@dataclass(frozen=True)
class _PlacedMedia:
    """Media of columns that wait for a place, and those that have one, by kind."""

    waiting: Mapping[str, list[Any]]
    options: MediaOptions | None = None
    shown: dict[str, list[Any]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def __post_init__(self) -> None:
        object.__setattr__(self, "waiting", {kind: [*self.waiting[kind]] for kind in KINDS})

    def add(self, kind: str, value: Any) -> None:
        """Put a value, or the next of the columns, behind those of its kind."""
        if value is None:
            if not self.waiting[kind]:
                raise BadRow(
                    "placeholder count",
                    f"a message has more parts of type {kind!r} than the row has {kind}s",
                )
            value = self.waiting[kind].pop(0)
        if self.options is not None:
            reading_of(value, self.options)  # refuses what its part asks for in vain
        self.shown[kind].append(value)


def _places(messages: Sequence[Message], marks: _Marks) -> dict[str, int]:
    """Count what stands for media of the columns: marks, and parts without data."""
    counts = marks.count(text for message in messages for text in _texts(message))
    for message in messages:
        for part in parts_of(message):
            if (kind := kind_of(part)) and data_of(part, kind) is None:
                counts[kind] += 1
    return counts


def _texts(message: Message) -> Iterator[str]:
    """Yield the texts of a message, of all its parts."""
    if isinstance(content := message.get("content"), str):
        yield content
    for part in parts_of(message):
        if isinstance(part, str):
            yield part
        elif not kind_of(part) and isinstance(part, Mapping) and isinstance(part.get("text"), str):
            yield part["text"]


class _Marks:
    """Finds in texts what stands for media.

    Args:
        own: Kinds of the model's own marks.
        kinds: Whose ``<kind>`` is a mark, and not letters like any.
    """

    def __init__(self, own: Mapping[str, str], kinds: Iterable[str] = KINDS) -> None:
        self._kinds = {f"<{kind}>": kind for kind in kinds} | dict(own)
        longest = sorted(self._kinds, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest)) or r"(?!)")

    def split(self, text: str) -> Iterator[tuple[str, str | None]]:
        """Cut a text at its marks; yields a piece of text and None, or a mark and its kind."""
        end = 0
        for match in self._pattern.finditer(text):
            if match.start() > end:
                yield text[end : match.start()], None
            yield match[0], self._kinds[match[0]]
            end = match.end()
        if end < len(text):
            yield text[end:], None

    def count(self, texts: Iterable[str]) -> dict[str, int]:
        """Count the marks of each kind."""
        kinds = [kind for text in texts for _, kind in self.split(text)]
        return {kind: kinds.count(kind) for kind in KINDS}


_LETTERS = _Marks({}, ())
"""Marks that are letters like any."""


def _without_data(message: Message, placed: _PlacedMedia, marks: _Marks) -> Message:
    """Leave ``{"type": kind}`` of each media part and mark, and collect what it shows."""
    content = message.get("content")
    marked = any(marks.count(_texts(message)).values())
    if not marked and not any(map(kind_of, parts_of(message))):
        return message
    parts: list[Any] = []
    for part in [content] if isinstance(content, str) else parts_of(message):
        kind = kind_of(part)
        if kind is not None and isinstance(part, Mapping):
            placed.add(kind, data_of(part, kind))
            parts.append({"type": kind})
            continue
        text = part.get("text") if isinstance(part, Mapping) else part
        if not marked or not isinstance(text, str):
            parts.append(part)
            continue
        rest = part if isinstance(part, Mapping) else {"type": "text"}
        for piece, mark in marks.split(text):
            if mark is not None:
                placed.add(mark, None)
            parts.append({**rest, "text": piece} if mark is None else {"type": mark})
    return {**message, "content": parts}


def _put_in(messages: Sequence[Message], refs: MediaRefs) -> tuple[Message, ...]:
    """Put a part for each image, video and audio in front of the first turn of the user."""
    turn = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
    if turn is None:
        raise BadRow("placeholder count", "the row has media, and no turn of a user to show them")
    own = [
        part for message in messages if message["role"] != "assistant" for part in parts_of(message)
    ]
    if any(map(kind_of, own)):
        raise BadRow(
            "placeholder count",
            f"{len(refs)} of the {len(refs)} images, videos and audios of the columns have no "
            "part in the messages",
        )
    content = messages[turn].get("content", "")
    rest = content if isinstance(content, list | tuple) else [{"type": "text", "text": content}]
    changed = {**messages[turn], "content": [*bare_parts(refs), *rest]}
    return (*messages[:turn], changed, *messages[turn + 1 :])


def _check_marks(marks: Mapping[str, int], places: Mapping[str, int], refs: MediaRefs) -> None:
    """Compare the media of columns with what stands for them: marks, and parts without data."""
    if places == refs.counts:
        return
    kinds = [kind for kind in KINDS if places[kind] or refs.counts[kind]]
    bare = sum(places.values()) - sum(marks.values())
    addition = f" beside {bare} part(s) without data" if bare else ""
    raise BadRow(
        "placeholder count",
        f"the text has {' and '.join(f'{marks[kind]} <{kind}>' for kind in kinds)}{addition}, the "
        f"row {' and '.join(f'{refs.counts[kind]} {kind}(s)' for kind in kinds)}"
        + (f": {', '.join(refs.names)}" if refs else ""),
        remedy="give each image, video and audio of the columns one mark; what a part of a message "
        "holds itself needs none",
    )


def parts_in(messages: Sequence[Message]) -> dict[str, int]:
    """Count the media parts of messages by kind."""
    kinds = [kind_of(part) for message in messages for part in parts_of(message)]
    return {kind: kinds.count(kind) for kind in KINDS}


def bare_parts(refs: MediaRefs) -> list[Mapping[str, Any]]:
    """Return one message part per image, video and audio, without data."""
    return [{"type": kind} for kind, count in refs.counts.items() for _ in range(count)]
