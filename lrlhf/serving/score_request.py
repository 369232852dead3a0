"""``POST /v1/score``: from the JSON of a request to what a reward function reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lrlhf.rewards.function import RESERVED, Completion
from lrlhf.serving.base64_media import MediaFiles, kind_of
from lrlhf.serving.limits import RequestLimits
from lrlhf.serving.refused import RefusedRequestError, malformed
from lrlhf.types import Message, Prompt

_KEYS = ("prompts", "completions", "images", "videos", "columns")
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
        """Return the request with images and videos in the place of files.

        Raises:
            RefusedRequestError: One of them is broken.
        """
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
        chars = _chars(self.prompts[row]) + _chars(self.completions[row])
        return chars + pixels // _PIXELS_PER_LETTER


def read_score_request(body: Any, limits: RequestLimits) -> ScoreRequest:
    """Read the body of ``POST /v1/score``.

    Args:
        body: As parsed.
        limits: What it may hold.

    Raises:
        RefusedRequestError: It is not as the protocol has it, or holds too much.
    """
    check_keys(body, required=_KEYS[:2], optional=_KEYS[2:])
    completions = entries(body, "completions")
    count = len(completions)
    check_count(count, limits)
    prompts = [
        _prompt(value, f"prompts[{row}]")
        for row, value in enumerate(entries(body, "prompts", count))
    ]
    completions = [
        _completion(value, f"completions[{row}]") for row, value in enumerate(completions)
    ]
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        check_chars(row, prompt, completion, limits)
    files = MediaFiles(limits)
    return ScoreRequest(
        prompts=prompts,
        completions=completions,
        images=shown(body, "images", count, files.image),
        videos=shown(body, "videos", count, files.video),
        columns=_columns(body.get("columns"), count),
        files=files or None,
    )


def check_keys(body: Any, *, required: Sequence[str], optional: Sequence[str]) -> None:
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


def entries(body: Mapping[str, Any], key: str, count: int | None = None) -> list[Any]:
    """Return the list under a key, one entry per response."""
    values = body[key]
    if not isinstance(values, list):
        raise malformed(key, f"expected a list, found {kind_of(values)}")
    if count is not None and len(values) != count:
        raise malformed(key, f"{len(values)} entries for {count} responses; give one for each")
    return values


def check_count(count: int, limits: RequestLimits) -> None:
    """Refuse more responses than may be in one request."""
    if count > limits.max_items:
        raise RefusedRequestError(
            f"{count} responses in one request, and {limits.max_items} are allowed: send them in "
            "several, or raise the service's max_items",
            status=413,
            reason="too many items",
        )


def check_chars(row: int, prompt: Prompt, completion: Completion, limits: RequestLimits) -> None:
    """Refuse a response that is too long together with its prompt."""
    chars = _chars(prompt) + _chars(completion)
    if chars > limits.max_chars:
        raise RefusedRequestError(
            f"completions[{row}]: {chars} characters with the prompt, and {limits.max_chars} are "
            "allowed: raise the service's max_chars",
            status=413,
            reason="too long",
        )


def shown(
    body: Mapping[str, Any], key: str, count: int, read: Callable[[Any, str], Any]
) -> list[list[Any]] | None:
    """Read the images or videos of every row, None where the request has none.

    Args:
        body: Of the request.
        key: Under which they stand: null, or per row null or a list.
        count: Rows.
        read: Makes a file of an entry and its place.
    """
    if body.get(key) is None:
        return None
    rows: list[list[Any]] = []
    for row, values in enumerate(entries(body, key, count)):
        if values is not None and not isinstance(values, list):
            raise malformed(f"{key}[{row}]", f"expected null or a list, found {kind_of(values)}")
        rows.append(
            [
                read(value, f"{key}[{row}][{position}]")
                for position, value in enumerate(values or ())
            ]
        )
    return rows if any(rows) else None


def _columns(columns: Any, count: int) -> dict[str, list[Any]]:
    if columns is None:
        return {}
    if not isinstance(columns, dict):
        raise malformed("columns", f"expected an object, found {kind_of(columns)}")
    for name, values in columns.items():
        place = f"columns.{ascii(name)[1:-1][:60]}"
        if name in _TAKEN:
            raise malformed(place, "no name for a column: it is an argument of reward functions")
        if not isinstance(values, list) or len(values) != count:
            raise malformed(place, f"expected a list of {count} values, one per response")
    return columns


def _prompt(value: Any, place: str) -> Prompt:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise malformed(place, f"expected text or a list of messages, found {kind_of(value)}")
    if not value:
        raise malformed(place, "a chat needs a message")
    return tuple(_message(turn, f"{place}[{at}]") for at, turn in enumerate(value))


def _completion(value: Any, place: str) -> Completion:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise malformed(place, f"expected text or a list of messages, found {kind_of(value)}")
    turns = [_message(turn, f"{place}[{at}]") for at, turn in enumerate(value)]
    return [_only_text(turn, f"{place}[{at}]") for at, turn in enumerate(turns)]


def _message(turn: Any, place: str) -> Message:
    if not isinstance(turn, dict):
        raise malformed(place, f"expected a message, an object, found {kind_of(turn)}")
    if not isinstance(turn.get("role"), str):
        raise malformed(f"{place}.role", "expected text, such as user")
    content = turn.get("content")
    if isinstance(content, list):
        for at, part in enumerate(content):
            _check_part(part, f"{place}.content[{at}]")
    elif not isinstance(content, str) and not (content is None and "tool_calls" in turn):
        raise malformed(f"{place}.content", f"expected text or parts, found {kind_of(content)}")
    return turn


def _check_part(part: Any, place: str) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise malformed(f"{place}.text", "expected text")
    elif kind not in ("image", "video"):
        raise malformed(place, "expected a part of the type text, image or video")
    elif set(part) != {"type"}:
        raise malformed(
            place, f'expected {{"type": "{kind}"}} alone; the file itself is sent under {kind}s'
        )


def _only_text(turn: Message, place: str) -> Message:
    content = turn.get("content")
    if not isinstance(content, list):
        return turn
    for at, part in enumerate(content):
        if part["type"] != "text":
            raise malformed(f"{place}.content[{at}]", "a response consists of text")
    return {**turn, "content": "".join(part["text"] for part in content)}


def _chars(value: Any) -> int:
    """Count the characters of a text, or of all texts in the turns of a chat."""
    total, rest = 0, [value]
    while rest:
        entry = rest.pop()
        if isinstance(entry, str):
            total += len(entry)
        elif isinstance(entry, Mapping):
            rest.extend(entry.values())
        elif isinstance(entry, list | tuple):
            rest.extend(entry)
    return total
