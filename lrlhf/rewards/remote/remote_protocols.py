"""What reward services are sent, and how their replies are read."""

from __future__ import annotations

import base64
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import httpx
import numpy as np
from jinja2 import TemplateError
from PIL import Image
from torch import Tensor

from lrlhf.bounded_templates import render_jinja_template
from lrlhf.media import Video
from lrlhf.rewards.function import (
    Completion,
    RewardError,
    completion_segments,
    completion_text,
)
from lrlhf.rewards.remote.remote_http import ServiceError
from lrlhf.rewards.reward_values import finite_number, shorten
from lrlhf.types import Prompt


class Responses(NamedTuple):
    """What is to be scored, one entry per response in each."""

    prompts: Sequence[Prompt]
    completions: Sequence[Completion]
    images: Sequence[Sequence[Any]]
    videos: Sequence[Sequence[Any]]
    columns: Mapping[str, Sequence[Any]]

    def part(self, rows: slice) -> Responses:
        """Return some of the responses."""
        return Responses(
            prompts=self.prompts[rows],
            completions=self.completions[rows],
            images=self.images[rows],
            videos=self.videos[rows],
            columns={name: values[rows] for name, values in self.columns.items()},
        )


class Protocol(ABC):
    """How one kind of service is spoken to."""

    tells_version: ClassVar[bool]
    scores_key: ClassVar[str]
    """Where a reply has its scores."""

    @abstractmethod
    def address(self, url: str) -> str:
        """Return where the responses are sent, given what the user wrote."""

    @abstractmethod
    def body(self, responses: Responses) -> dict[str, Any]:
        """Return the request.

        Raises:
            RewardError: It cannot be said in this protocol.
        """

    def encoded(self, responses: Responses) -> bytes:
        """Return the request as JSON.

        Raises:
            RewardError: See `body`; or a column holds what JSON cannot.
        """
        body = self.body(responses)
        try:
            return _json(body)
        except (TypeError, ValueError, RecursionError) as error:
            raise RewardError(f"{_culprit(body)} cannot be sent as JSON: {error}") from error

    def scores(self, reply: Mapping[str, Any], count: int) -> list[float | None]:
        """Return the scores of a reply, None where the service could not score a response.

        Raises:
            ServiceError: They are not one finite number or null per response.
        """
        key, values = self.scores_key, reply.get(self.scores_key)
        if not isinstance(values, list):
            raise ServiceError(f"the reply has no list {key!r}")
        if len(values) != count:
            raise ServiceError(f"the reply has {len(values)} {key} for {count} responses")
        scores = [None if isinstance(value, bool) else finite_number(value) for value in values]
        for row, (value, score) in enumerate(zip(values, scores, strict=True)):
            if score is None and value is not None:
                raise ServiceError(
                    f"{key}[{row}] of the reply is {shorten(value)}, no finite float32 number"
                )
        return scores


class LrlhfProtocol(Protocol):
    """What ``lrlhf serve-reward`` speaks; images and videos travel without loss."""

    tells_version = True
    scores_key = "scores"

    def address(self, url: str) -> str:
        return f"{url}/v1/score"

    def body(self, responses: Responses) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompts": responses.prompts,
            "completions": responses.completions,
        }
        if any(responses.images):
            body["images"] = in_base64(responses.images, png_file)
        if any(responses.videos):
            body["videos"] = in_base64(responses.videos, _animated_png)
        if responses.columns:
            body["columns"] = responses.columns
        segments = [
            None if len(parts) < 2 else parts for parts in map(_segments, responses.completions)
        ]
        if any(segments):
            body["segments"] = segments
        return body


def _segments(completion: Completion) -> list[list[Any]]:
    return [[segment.text, segment.sampled] for segment in completion_segments(completion)]


LIGHTRFT_KEYS = frozenset({"queries", "prompts", "images"})
"""What a request in LightRFT's protocol has of its own, beside the columns."""


class LightrftProtocol(Protocol):
    """What LightRFT's reward services speak: one text per response, images as JPEG.

    Args:
        chat_template: Jinja text that turns a chat prompt into text.
    """

    tells_version = False
    scores_key = "rewards"

    def __init__(self, chat_template: str | None) -> None:
        self._chat_template = chat_template

    def address(self, url: str) -> str:
        return url if httpx.URL(url).path.strip("/") else f"{url}/get_reward"

    def body(self, responses: Responses) -> dict[str, Any]:
        if any(responses.videos):
            raise RewardError("the protocol of LightRFT has no place for videos")
        body: dict[str, Any] = {
            "queries": [
                self._query(prompt, completion)
                for prompt, completion in zip(responses.prompts, responses.completions, strict=True)
            ],
            "prompts": [self._text(prompt) for prompt in responses.prompts],
            **responses.columns,
        }
        if any(responses.images):
            body["images"] = in_base64(responses.images, _jpeg)
        return body

    def _query(self, prompt: Prompt, completion: Completion) -> str:
        """Return all that was said, up to the last words of the policy's."""
        if isinstance(completion, str):
            return self._text(prompt) + completion
        if isinstance(prompt, str) or len(completion) < 2:
            return self._text(prompt) + completion_text(completion)
        *earlier, last = completion
        return self._text((*prompt, *earlier)) + completion_text([last])

    def _text(self, prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        if self._chat_template is None:
            raise RewardError(
                "the prompts are chats, and the protocol of LightRFT knows only text: give "
                "chat_template"
            )
        try:
            rendered = render_jinja_template(
                [[dict(message) for message in prompt]],
                chat_template=self._chat_template,
                add_generation_prompt=True,
            )
        except TemplateError as error:
            raise RewardError(f"chat_template refuses the messages: {error}") from error
        return str(rendered[0][0])


def _json(value: Any) -> bytes:
    return json.dumps(value, default=_plain, allow_nan=False).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{shorten(value)} is a {type(value).__name__}")


def _culprit(body: Mapping[str, Any]) -> str:
    """Return which part of a request is no JSON."""
    columns = body.get("columns", {})
    for name, values in {**body, **columns}.items():
        if name == "columns":
            continue
        try:
            _json(values)
        except (TypeError, ValueError, RecursionError):
            return f"the column {name!r}" if name in columns else name
    return "the request"


def in_base64(
    rows: Sequence[Sequence[Any]], encode: Callable[[Any], bytes]
) -> list[list[str] | None]:
    """Encode each image or video once, however many rows share it; None: the row shows nothing."""
    objects = {id(entry): entry for row in rows for entry in row}
    texts = {key: base64.b64encode(encode(entry)).decode() for key, entry in objects.items()}
    return [[texts[id(entry)] for entry in row] if row else None for row in rows]


def png_file(image: Any) -> bytes:
    """Return an image as a PNG file."""
    return _saved(image, "PNG", compress_level=1)


def _jpeg(image: Any) -> bytes:
    return _saved(image, "JPEG", quality=95)


def _animated_png(video: Any) -> bytes:
    """Return the frames of a video as an animated PNG file, without loss."""
    if not isinstance(video, Video):
        raise RewardError(f"a video is a lrlhf.media.Video, not a {type(video).__name__}")
    first, *others = (Image.fromarray(frame) for frame in video.frames)
    # Pillow leaves out a frame that is like the one before it, unless they are laid down
    # differently; on frames without transparency both ways look the same
    blend = [index % 2 for index in range(len(video.frames))]
    return _saved(
        first,
        "PNG",
        save_all=True,
        append_images=others,
        duration=1000 / video.fps,
        blend=blend,
        compress_level=1,
    )


def _saved(image: Any, kind: str, **options: Any) -> bytes:
    if not isinstance(image, Image.Image):
        raise RewardError(f"an image is a PIL.Image, not a {type(image).__name__}")
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()
