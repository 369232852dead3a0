"""``POST /v1/score``: from the JSON of a request to what a reward function reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lrlhf.apps.serve.base64_media import MediaFile, MediaFiles, kind_of
from lrlhf.apps.serve.limits import RequestLimits
from lrlhf.rewards.function import (
    RESERVED,
    Completion,
    with_segments,
)
from lrlhf.types import Message, Prompt
from lrlhf.web.body import RefusedRequestError, malformed

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
    prompts = [_prompt(*given) for given in _placed(body["prompts"], "prompts", count)]
    completions = [_completion(*given) for given in _placed(completions, "completions")]
    check_sizes(prompts, completions, limits)
    if body.get("segments") is not None:
        told = [_segments(*given) for given in _placed(body["segments"], "segments", count)]
        completions = [*map(with_segments, completions, told)]
        check_sizes(prompts, [one or [] for one in told], limits)
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


def entries(values: Any, place: str, count: int | None = None) -> list[Any]:
    """Return a list, one entry per response if their count is given."""
    if not isinstance(values, list):
        raise malformed(place, f"expected a list, found {kind_of(values)}")
    if count is not None and len(values) != count:
        raise malformed(place, f"{len(values)} entries for {count} responses; give one for each")
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
        [files.add(kind, *given) for given in _placed([] if row is None else row, place)]
        for row, place in _placed(body[f"{kind}s"], f"{kind}s", count)
    ]
    return rows if any(rows) else None


def _placed(values: Any, place: str, count: int | None = None) -> Iterator[tuple[Any, str]]:
    """Yield the entries of a list, each with its place in the body."""
    for number, value in enumerate(entries(values, place, count)):
        yield value, f"{place}[{number}]"


def _columns(columns: Any, count: int) -> dict[str, list[Any]]:
    if columns is None:
        return {}
    if not isinstance(columns, dict):
        raise malformed("columns", f"expected an object, found {kind_of(columns)}")
    for name, values in columns.items():
        place = f"columns.{ascii(name)[1:-1][:60]}"
        if name in _TAKEN:
            raise malformed(place, "no name for a column: it is an argument of reward functions")
        entries(values, place, count)
    return columns


def _prompt(value: Any, place: str) -> Prompt:
    if isinstance(value, str):
        return value
    if not (turns := _turns(value, place)):
        raise malformed(place, "a chat needs a message")
    return tuple(turns)


def _completion(value: Any, place: str) -> Completion:
    if isinstance(value, str):
        return value
    turns = _turns(value, place)
    return [_only_text(turn, f"{place}[{at}]") for at, turn in enumerate(turns)]


def _segments(value: Any, place: str) -> list[Any] | None:
    """Read which parts of a response the policy wrote, and which it was given."""
    if value is None:
        return None
    for part, where in _placed(value, place):
        if not isinstance(part, list) or [type(one) for one in part] != [str, bool]:
            raise malformed(where, "expected a text, and whether the policy wrote it")
    return list(value)


def _turns(value: Any, place: str) -> list[Message]:
    if not isinstance(value, list):
        raise malformed(place, f"expected text or a list of messages, found {kind_of(value)}")
    return [_message(*given) for given in _placed(value, place)]


def _message(turn: Any, place: str) -> Message:
    if not isinstance(turn, dict):
        raise malformed(place, f"expected a message, an object, found {kind_of(turn)}")
    if not isinstance(turn.get("role"), str):
        raise malformed(f"{place}.role", "expected text, such as user")
    content = turn.get("content")
    if isinstance(content, list):
        for part, where in _placed(content, f"{place}.content"):
            _check_part(part, where)
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
    for part, where in _placed(content, f"{place}.content"):
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
