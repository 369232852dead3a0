"""``POST /v1/score``: from the JSON of a request to what a reward function reads."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from PIL import Image

from lrlhf.media import MediaError, MediaOptions, Video, read_image, read_video
from lrlhf.media.decode import ANIMATIONS, animation_of, explained, open_image
from lrlhf.rewards.function import RESERVED, Completion, with_segments
from lrlhf.types import Message, Prompt
from lrlhf.web import RefusedRequestError, malformed


def _check_positive(options: RequestLimits | QueueOptions) -> None:
    for option in fields(options):
        value = getattr(options, option.name)
        if value is None and option.default is None:
            continue
        if not value > 0:
            raise ValueError(f"{option.name} is {value}; it must be above 0")
        if not math.isfinite(value):
            raise ValueError(f"{option.name} is {value}; it must be a finite number")


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """Limits of one request; larger requests are rejected, never truncated.

    Args:
        max_request_mb: Size of the body in millions of bytes.
        max_values: Objects, lists, texts, numbers and so on in the body, roughly: its commas and
            opening brackets are counted before anything is made of them.
        max_items: Responses in one request.
        max_chars: Characters of one response and its prompt.
        max_images: Images in one request, and videos; one that is repeated counts once.
        max_megapixels: Millions of pixels in all images and video frames of one request, counted
            before anything is decoded. Media wait as files: a quarter of these pixels is held
            decoded at a time, for all requests together, or one request alone that has more.
        max_frames: Frames of one video.
        max_pixels: Images and frames with more pixels are scaled down to this many; null: only
            the model's own processor scales. As ``media.max_pixels`` in training.
    """

    max_request_mb: float = 32.0
    max_values: int = 200_000
    max_items: int = 512
    max_chars: int = 200_000
    max_images: int = 512
    max_megapixels: float = 256.0
    max_frames: int = 64
    max_pixels: int | None = None

    def __post_init__(self) -> None:
        _check_positive(self)


@dataclass(frozen=True, kw_only=True)
class QueueOptions:
    """How requests wait for the model and for each other.

    Args:
        max_batch_size: Responses of several requests that are scored together at most; a larger
            request is scored by itself. 1: every request by itself. A request is split only where a
            learned reward gets very long ones, so that others are served in between.
        max_queue: Requests that wait or are scored at once; others are refused with status 429. A
            request waits from when all of its body has arrived.
        max_queue_mb: Size of all bodies in the service, in millions of bytes, of which those count
            that have more than 0.25, as far as they have arrived. Those that come more slowly than
            100 kB/s give way to others.
        timeout_s: Seconds after which a request is given up.
    """

    max_batch_size: int = 64
    max_queue: int = 64
    max_queue_mb: float = 512.0
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        _check_positive(self)


_FORMATS = {"image": ("PNG", "JPEG", "WEBP"), "video": ANIMATIONS}
_ALL = 1e9
"""Frames per second of which no video has more: all are taken."""
_LEAST_PIXELS = 2**14
"""What a frame of an animation counts at least: a million of one pixel take memory too."""


class MediaFile(NamedTuple):
    """A file as it was sent."""

    kind: str
    """``image`` or ``video``."""
    content: bytes
    location: str
    """Where in the body it stood first."""


class MediaFiles:
    """The media of one request, each file once: collected, then measured, then decoded.

    No path and no address is ever opened: a text is base64 of a file's content or refused, and
    only formats that cannot refer to other files are read. Images are PNG, JPEG or WebP, and
    videos animated PNG, GIF or WebP.

    Args:
        limits: Of the request.
    """

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        # completions of one prompt show the same: the model then looks once
        self._known: dict[tuple[str, bytes], MediaFile] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, kind: str, text: Any, location: str) -> MediaFile:
        """Take an ``image`` or ``video`` as base64, unless it is none or there are too many."""
        if not isinstance(text, str):
            raise malformed(location, f"expected base64 of a file, found {kind_of(text)}")
        key = (kind, hashlib.sha256(text.encode()).digest())  # not the text, which is longer
        if key not in self._known:
            if len(self._known) >= self._limits.max_images:
                raise _refused(
                    location,
                    f"the request has more than {self._limits.max_images} images and videos",
                )
            self._known[key] = MediaFile(kind, decoded(text, location), location)
        return self._known[key]

    def pixels(self) -> int:
        """Count the pixels of all files by their heads, unless there are too many to decode."""
        total = 0
        for file in self._known.values():
            total += _pixels(file)
            if total > self._limits.max_megapixels * 1e6:
                raise _refused(
                    file.location,
                    f"the media of the request have more than {self._limits.max_megapixels:g} "
                    "million pixels: send fewer or smaller ones, or raise the service's "
                    "max_megapixels",
                )
        return total

    def decoded(self) -> dict[MediaFile, Any]:
        """Decode all files: to a ``PIL.Image`` or `lrlhf.media.Video` each."""
        return {file: self._decoded(file) for file in self._known.values()}

    def _decoded(self, file: MediaFile) -> Image.Image | Video:
        most = self._limits.max_frames
        options = MediaOptions(
            max_pixels=self._limits.max_pixels,
            fps=_ALL,
            max_frames=most + 1,  # one more tells that there are too many
        )
        with _answered(file.location):
            if file.kind == "image":
                return read_image(file.content, options)
            video = read_video(file.content, options)
        if len(video.frames) > most:
            raise _refused(
                file.location,
                f"a video of more than {most} frames: send fewer, or raise the service's "
                "max_frames",
            )
        return video


class PixelRoom:
    """Room for decoded media, which may take ten thousand times as much as their files.

    Args:
        most: Pixels at a time; a request that has more is alone.
    """

    def __init__(self, most: int) -> None:
        self._most = self._free = most
        self._turn = threading.Lock()
        self._changed = threading.Condition()
        self._closed = False

    def take(self, pixels: int) -> None:
        """Wait until there is room, first come first served, or the service ends."""
        needed = min(pixels, self._most)
        # one after the other: a large request would wait for ever behind small ones
        with self._turn, self._changed:
            self._changed.wait_for(lambda: self._closed or needed <= self._free)
            if self._closed:
                raise RefusedRequestError(
                    "the service ends", status=503, reason="closing", retry_after=5
                )
            self._free -= needed

    def release(self, pixels: int) -> None:
        """Give back what was taken."""
        with self._changed:
            self._free += min(pixels, self._most)
            self._changed.notify_all()

    def close(self) -> None:
        """Send away whoever waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def decoded(text: str, location: str) -> bytes:
    """Decode base64, and refuse what is none, or nothing."""
    try:
        content = base64.b64decode(text, validate=True)
    except ValueError as error:  # also what is not ASCII
        raise malformed(
            location, "this is no base64; files are sent by content, not by path or address"
        ) from error
    if not content:
        raise malformed(location, "an empty file")
    return content


def kind_of(value: Any) -> str:
    """Return what JSON calls a value."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")


def _pixels(file: MediaFile) -> int:
    formats = _FORMATS[file.kind]
    what = f"it cannot be read; expected one of {', '.join(formats)}"
    # others may be read by programs of the system, or name further files
    with (
        _answered(file.location, what),
        explained("broken file", file.location),
        open_image(file.content, formats) as opened,
    ):
        if file.kind == "image":
            return opened.width * opened.height
        frames: int = opened.n_frames  # type: ignore[attr-defined]  # of the three formats
        animation = animation_of(io.BytesIO(file.content))
        assert animation is not None  # it is of one of them
        width, height = map(max, opened.size, animation.extent)
        return max(width * height, _LEAST_PIXELS) * frames


@contextlib.contextmanager
def _answered(location: str, what: str | None = None) -> Iterator[None]:
    """Have a file that cannot be read answered, with ``what`` or what its reader says."""
    try:
        yield
    except MediaError as error:
        raise _refused(location, what or str(error)) from error
    except MemoryError as error:
        raise RefusedRequestError(
            "out of memory: send fewer or smaller images and videos at once",
            status=503,
            reason="out of memory",
            retry_after=5,
        ) from error


def _refused(location: str, what: str) -> RefusedRequestError:
    return RefusedRequestError(f"{location}: {what}", reason="media")


_TAKEN = (*RESERVED, "images", "videos")
_PIXELS_PER_LETTER = 200
"""How many pixels take a model as long as a letter: a token is about 4, or 28 x 28 pixels."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ScoreRequest:
    """Responses that are to be scored, with their prompts.

    Args:
        prompts: Text, or the turns of a chat.
        completions: Text, or the turns that the policy added.
        images: Of each row; None: no row has any. A `MediaFile` each, and ``PIL.Image`` when they
            are decoded.
        videos: Of each row; None: no row has any. A `MediaFile` each, and `lrlhf.media.Video` when
            they are decoded.
        columns: Further values of each row, by name.
        files: Of the images and videos; None: there are none, or they are decoded.
    """

    prompts: Sequence[Prompt]
    completions: Sequence[Completion]
    images: Sequence[Sequence[Any]] | None = None
    videos: Sequence[Sequence[Any]] | None = None
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    files: MediaFiles | None = None

    def __len__(self) -> int:
        return len(self.completions)

    def decoded(self) -> ScoreRequest:
        """Return the request with images and videos in the place of files."""
        if self.files is None:
            return self
        seen = self.files.decoded()
        images, videos = (
            kind and [[seen[file] for file in row] for row in kind]
            for kind in (self.images, self.videos)
        )
        return replace(self, images=images, videos=videos, files=None)

    def rows(self, start: int, end: int) -> ScoreRequest:
        """Return a request with some of the rows, whose media are decoded."""
        return ScoreRequest(
            prompts=self.prompts[start:end],
            completions=self.completions[start:end],
            images=self.images and self.images[start:end],
            videos=self.videos and self.videos[start:end],
            columns={name: values[start:end] for name, values in self.columns.items()},
        )

    def cost(self, row: int) -> int:
        """Return the letters of a row, with so many for its media as take a model as long."""
        pixels = sum(image.width * image.height for image in self.images[row]) if self.images else 0
        if self.videos:
            pixels += sum(video.frames.size // 3 for video in self.videos[row])
        return _chars((self.prompts[row], self.completions[row])) + pixels // _PIXELS_PER_LETTER


def read_score_request(body: Any, limits: RequestLimits) -> ScoreRequest:
    """Read the body of ``POST /v1/score``, unless it breaks the protocol or holds too much."""
    check_keys(body, ("prompts", "completions"), ("images", "videos", "columns", "segments"))
    completions = entries(body["completions"], "completions")
    count = len(completions)
    prompts = [_prompt(*entry) for entry in _placed(body["prompts"], "prompts", count)]
    completions = [_completion(*entry) for entry in _placed(completions, "completions")]
    check_sizes(prompts, completions, limits)
    if body.get("segments") is not None:
        segments = [_segments(*entry) for entry in _placed(body["segments"], "segments", count)]
        completions = [*map(with_segments, completions, segments)]
        check_sizes(prompts, [segment or [] for segment in segments], limits)
    files = MediaFiles(limits)
    return ScoreRequest(
        prompts=prompts,
        completions=completions,
        images=add_media(files, body, "image", count),
        videos=add_media(files, body, "video", count),
        columns=_columns(body.get("columns"), count),
        files=files or None,
    )


def check_keys(body: Any, required: Sequence[str], optional: Sequence[str]) -> None:
    """Refuse a body that lacks a key or has one that means nothing."""
    if not isinstance(body, dict):
        raise malformed("body", f"expected an object with {', '.join(required)}")
    for key in required:
        if key not in body:
            raise malformed(key, "is missing")
    for key in body:
        if key not in (*required, *optional):
            # it may be anything, and of any length
            known = ", ".join((*required, *optional))
            raise malformed(ascii(key)[:60], f"no such key; there are {known}")


def entries(values: Any, location: str, count: int | None = None) -> list[Any]:
    """Return a list, one entry per response if their count is given."""
    if not isinstance(values, list):
        raise malformed(location, f"expected a list, found {kind_of(values)}")
    if count is not None and len(values) != count:
        raise malformed(location, f"{len(values)} entries for {count} responses; give one for each")
    return values


def check_sizes(
    prompts: Sequence[Prompt], completions: Sequence[Completion], limits: RequestLimits
) -> None:
    """Refuse too many responses, and one that is too long together with its prompt."""
    if len(completions) > limits.max_items:
        raise RefusedRequestError(
            f"{len(completions)} responses in one request, and {limits.max_items} are allowed: "
            "send them in several, or raise the service's max_items",
            status=413,
            reason="too many items",
        )
    for row, pair in enumerate(zip(prompts, completions, strict=True)):
        if (chars := _chars(pair)) > limits.max_chars:
            raise RefusedRequestError(
                f"completions[{row}]: {chars} characters with the prompt, and {limits.max_chars} "
                "are allowed: raise the service's max_chars",
                status=413,
                reason="too long",
            )


def add_media(
    files: MediaFiles, body: Mapping[str, Any], kind: str, count: int
) -> list[list[MediaFile]] | None:
    """Read the images or videos of every row, each null or a list; None: no row has any."""
    if body.get(f"{kind}s") is None:
        return None
    rows = [
        [files.add(kind, *entry) for entry in _placed([] if row is None else row, location)]
        for row, location in _placed(body[f"{kind}s"], f"{kind}s", count)
    ]
    return rows if any(rows) else None


def _placed(values: Any, location: str, count: int | None = None) -> Iterator[tuple[Any, str]]:
    """Yield the entries of a list, each with its place in the body."""
    for number, value in enumerate(entries(values, location, count)):
        yield value, f"{location}[{number}]"


def _columns(columns: Any, count: int) -> dict[str, list[Any]]:
    if columns is None:
        return {}
    if not isinstance(columns, dict):
        raise malformed("columns", f"expected an object, found {kind_of(columns)}")
    for name, values in columns.items():
        location = f"columns.{ascii(name)[1:-1][:60]}"
        if name in _TAKEN:
            raise malformed(location, "no name for a column: it is an argument of reward functions")
        entries(values, location, count)
    return columns


def _prompt(value: Any, location: str) -> Prompt:
    if isinstance(value, str):
        return value
    if not (turns := _turns(value, location)):
        raise malformed(location, "a chat needs a message")
    return tuple(turns)


def _completion(value: Any, location: str) -> Completion:
    if isinstance(value, str):
        return value
    turns = _turns(value, location)
    return [_only_text(turn, f"{location}[{at}]") for at, turn in enumerate(turns)]


def _segments(value: Any, location: str) -> list[Any] | None:
    """Read which parts of a response the policy wrote, and which it was given."""
    if value is None:
        return None
    for part, where in _placed(value, location):
        if not isinstance(part, list) or [type(each) for each in part] != [str, bool]:
            raise malformed(where, "expected a text, and whether the policy wrote it")
    return list(value)


def _turns(value: Any, location: str) -> list[Message]:
    if not isinstance(value, list):
        raise malformed(location, f"expected text or a list of messages, found {kind_of(value)}")
    return [_message(*entry) for entry in _placed(value, location)]


def _message(turn: Any, location: str) -> Message:
    if not isinstance(turn, dict):
        raise malformed(location, f"expected a message, an object, found {kind_of(turn)}")
    if not isinstance(turn.get("role"), str):
        raise malformed(f"{location}.role", "expected text, such as user")
    content = turn.get("content")
    if isinstance(content, list):
        for part, where in _placed(content, f"{location}.content"):
            _check_part(part, where)
    elif not isinstance(content, str) and not (content is None and "tool_calls" in turn):
        raise malformed(f"{location}.content", f"expected text or parts, found {kind_of(content)}")
    return turn


def _check_part(part: Any, location: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise malformed(f"{location}.text", "expected text")
    elif kind not in ("image", "video"):
        raise malformed(location, "expected a part of the type text, image or video")
    elif set(part) != {"type"}:
        raise malformed(
            location, f'expected {{"type": "{kind}"}} alone; the file itself is sent under {kind}s'
        )


def _only_text(turn: Message, location: str) -> Message:
    content = turn.get("content")
    if not isinstance(content, list):
        return turn
    for part, where in _placed(content, f"{location}.content"):
        if part["type"] != "text" and turn["role"] in ("user", "tool"):
            return turn  # of an episode, in which a tool shows images
        if part["type"] != "text":
            raise malformed(where, "a response consists of text")
    return {**turn, "content": "".join(part["text"] for part in content)}


def _chars(value: Any) -> int:
    """Count the characters of a text, or of all texts in the turns of a chat."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return 0
    return sum(map(_chars, value))
