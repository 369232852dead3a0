"""Rewards that services compute, in the protocol of ``lrlhf serve-reward`` or of LightRFT."""

from __future__ import annotations

import base64
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import httpx
import numpy as np
from jinja2 import TemplateError
from PIL import Image
from torch import Tensor

from lrlhf.bounded_templates import render_jinja_template
from lrlhf.media import Video
from lrlhf.rewards.function import (
    Completion,
    LogMetric,
    RewardError,
    check_positive,
    column_of,
    completion_segments,
    completion_text,
)
from lrlhf.rewards.remote.service_client import (
    Calls,
    Exchange,
    Service,
    ServiceError,
    ServiceReward,
)
from lrlhf.rewards.reward_values import finite_number, shorten
from lrlhf.types import Prompt


class RemoteReward(ServiceReward):
    """The scores of one or several reward services, see ``lrlhf serve-reward``.

    Responses are sent in batches, several at a time, each to the least busy service. A request
    that fails on one service is sent to the next, and again after a growing pause. A service that
    fails several times in a row is left alone for a while. Where no service answers in time, the
    responses get no value, and the failure is reported, which as a rule ends the run; with
    ``max_wait`` the run waits for the services to come back instead. A request that a service
    refuses (a wrong token, an unknown address, too large, malformed) stops the run.

    All services must have the same model: the scores must not depend on who answers.

    Args:
        urls: Address of the service, or a list of addresses, such as ``http://127.0.0.1:8100``.
        protocol: ``lrlhf``, or ``lightrft`` for services with LightRFT's.
        batch_size: Responses per request.
        columns: Data columns that are sent along; a mapping has the names under which they are
            sent, such as ``{references: answer}`` for a service with LightRFT's protocol.
        chat_template: Jinja text that turns chats into the text that LightRFT's protocol needs.
        service: Options of the requests, see `ServiceReward`.
    """

    _not_copied = ("_client", "_ready")

    @classmethod
    def columns_read(cls, options: Mapping[str, Any]) -> Iterable[str]:
        columns: Mapping[str, str] | Sequence[str] = options.get("columns") or ()
        return columns.values() if isinstance(columns, Mapping) else columns

    def __init__(
        self,
        urls: str | list[str],
        protocol: Literal["lrlhf", "lightrft"] = "lrlhf",
        batch_size: int = 32,
        columns: list[str] | dict[str, str] | None = None,
        chat_template: str | None = None,
        **service: Any,
    ) -> None:
        super().__init__(urls, **service)
        if chat_template and protocol != "lightrft":
            raise ValueError("chat_template is for protocol: lightrft; others are sent the turns")
        check_positive(batch_size=batch_size)
        self._batch_size = batch_size
        self._columns = (
            columns if isinstance(columns, dict) else {key: key for key in columns or ()}
        )
        if protocol == "lightrft" and (reserved := _LIGHTRFT_KEYS & {*self._columns.values()}):
            raise ValueError(
                f"columns: {', '.join(sorted(reserved))} would replace what LightRFT's protocol "
                "sends under that name; choose another, as in {prompts: question}"
            )
        self._protocol: Protocol = (
            LightrftProtocol(chat_template) if protocol == "lightrft" else LrlhfProtocol()
        )
        self._start_afresh()

    def _start_afresh(self) -> None:
        super()._start_afresh()
        self._ready = False

    def prepare(self) -> None:
        """Wait until a service answers; once one did, do nothing.

        Raises:
            RewardError: None does within ``startup_timeout``, one refuses to report its version,
                they have different models, or the token cannot be read.
        """
        if not self._ready:
            self._client.wait_until_ready(self._probe)
            self._ready = True

    async def _probe(self, exchange: Exchange, service: Service) -> str:
        """Return what is wrong with a service; empty: nothing."""
        protocol = self._protocol
        try:
            if protocol.reports_version:
                await exchange.send(f"{service.url}/health")
                service.note_version(await exchange.send(f"{service.url}/version"))
            else:
                await exchange.send(protocol.address(service.url))
        except ServiceError as error:
            # services of LightRFT need not accept GET, and have answered
            ready = error.answered and not protocol.reports_version
            return "" if ready else f"{service.url}: {error}"
        except RewardError:
            if protocol.reports_version:
                raise
        return ""

    async def __call__(
        self,
        *,
        prompts: Sequence[Prompt],
        completions: Sequence[Completion],
        log_metric: LogMetric,
        images: Sequence[Sequence[Any]] | None = None,
        videos: Sequence[Sequence[Any]] | None = None,
        audios: Sequence[Sequence[Any]] | None = None,
        **columns: Any,
    ) -> list[float | None]:
        if any(audios or ()):
            raise RewardError("a remote reward cannot be sent audio; use LearnedReward")
        nothing: list[Sequence[Any]] = [()] * len(completions)
        responses = Responses(
            prompts=prompts,
            completions=completions,
            images=images or nothing,
            videos=videos or nothing,
            columns={
                key: column_of(columns, name, setting="columns")
                for key, name in self._columns.items()
            },
        )
        starts = range(0, len(completions), self._batch_size)
        parts = [responses.part(slice(start, start + self._batch_size)) for start in starts]
        protocol = self._protocol

        async def score(calls: Calls, part: Responses) -> list[float | None] | None:
            return await calls.send(
                protocol.address,
                partial(protocol.encoded, part),
                partial(protocol.scores, count=len(part.completions)),
            )

        sized = [(part, len(part.completions)) for part in parts]
        return await self._client.scores(sized, score, log_metric, name="remote")


class Responses(NamedTuple):
    """Responses to score, one entry per response in each field."""

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
    """The requests and replies of one kind of service."""

    reports_version: ClassVar[bool]
    scores_key: ClassVar[str]
    """Key of the scores in a reply."""

    @abstractmethod
    def address(self, url: str) -> str:
        """Return where the responses are sent, from the configured address."""

    @abstractmethod
    def body(self, responses: Responses) -> dict[str, Any]:
        """Return the request.

        Raises:
            RewardError: This protocol has no form for the responses.
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
            raise RewardError(f"{_not_json(body)} cannot be sent as JSON: {error}") from error

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
    """The protocol of ``lrlhf serve-reward``; images and videos are sent without loss."""

    reports_version = True
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
            [*map(list, completion_segments(completion))] for completion in responses.completions
        ]
        if any(len(own) > 1 for own in segments):
            body["segments"] = [own if len(own) > 1 else None for own in segments]
        return body


_LIGHTRFT_KEYS = frozenset({"queries", "prompts", "images"})
"""Keys of a request in LightRFT's protocol that no column may have."""


class LightrftProtocol(Protocol):
    """The protocol of LightRFT's reward services: one text per response, images as JPEG.

    Args:
        chat_template: Jinja text that turns a chat prompt into text.
    """

    reports_version = False
    scores_key = "rewards"

    def __init__(self, chat_template: str | None) -> None:
        self._chat_template = chat_template

    def address(self, url: str) -> str:
        return url if httpx.URL(url).path.strip("/") else f"{url}/get_reward"

    def body(self, responses: Responses) -> dict[str, Any]:
        if any(responses.videos):
            raise RewardError("the protocol of LightRFT has no form for videos")
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
        """Return the complete dialogue, up to the last turn of the policy."""
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
                "the prompts are chats, and the protocol of LightRFT has only text: give "
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
    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, Tensor | np.ndarray | np.generic):
            return value.tolist()
        raise TypeError(f"{shorten(value)} is a {type(value).__name__}")

    return json.dumps(value, default=plain, allow_nan=False).encode()


def _not_json(body: Mapping[str, Any]) -> str:
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
    """Encode each image or video once, however many rows share it; None: the row has none."""
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
