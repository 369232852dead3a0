"""What reward services are sent, and how their replies are read."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError
from torch import Tensor
from transformers.utils.chat_template_utils import render_jinja_template

from lrlhf.rewards.function import Completion, RewardError, completion_text
from lrlhf.rewards.remote.remote_http import ServiceError, checked_url, object_of
from lrlhf.rewards.remote.remote_media import MediaTexts, animated_png, jpeg, png
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

    tells_version = True

    @abstractmethod
    def address(self, url: str) -> str:
        """Return where the responses are sent, given what the user wrote."""

    @abstractmethod
    def body(self, responses: Responses) -> dict[str, Any]:
        """Return the request.

        Raises:
            RewardError: It cannot be said in this protocol.
        """

    @abstractmethod
    def scores(self, reply: Mapping[str, Any], count: int) -> list[float | None]:
        """Return the scores of a reply, None where the service could not score a response.

        Raises:
            ServiceError: They are not one finite number or null per response.
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


class LrlhfProtocol(Protocol):
    """What ``lrlhf serve-reward`` speaks; images and videos travel without loss."""

    def __init__(self) -> None:
        self._images, self._videos = MediaTexts(png), MediaTexts(animated_png)

    def address(self, url: str) -> str:
        return f"{url}/v1/score"

    def body(self, responses: Responses) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompts": responses.prompts,
            "completions": responses.completions,
        }
        if any(responses.images):
            body["images"] = self._images(responses.images)
        if any(responses.videos):
            body["videos"] = self._videos(responses.videos)
        if responses.columns:
            body["columns"] = responses.columns
        return body

    def scores(self, reply: Mapping[str, Any], count: int) -> list[float | None]:
        return _numbers(reply, "scores", count)


class LightrftProtocol(Protocol):
    """What LightRFT's reward services speak: one text per response, images as JPEG.

    Args:
        chat_template: Jinja text that turns a chat prompt into text.
    """

    tells_version = False

    def __init__(self, chat_template: str | None) -> None:
        self._chat_template = chat_template
        self._images = MediaTexts(jpeg)

    def address(self, url: str) -> str:
        has_path = checked_url(url).count("/") > 2
        return url if has_path else f"{url}/get_reward"

    def body(self, responses: Responses) -> dict[str, Any]:
        if any(responses.videos):
            raise RewardError("the protocol of LightRFT has no place for videos")
        prompts = [self._text(prompt) for prompt in responses.prompts]
        body: dict[str, Any] = {
            "queries": [
                prompt + completion_text(completion)
                for prompt, completion in zip(prompts, responses.completions, strict=True)
            ],
            "prompts": prompts,
            **responses.columns,
        }
        if any(responses.images):
            body["images"] = self._images(responses.images)
        return body

    def scores(self, reply: Mapping[str, Any], count: int) -> list[float | None]:
        return _numbers(reply, "rewards", count)

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


def _numbers(reply: Mapping[str, Any], key: str, count: int) -> list[float | None]:
    values = object_of(reply).get(key)
    if not isinstance(values, list):
        raise ServiceError(f"the reply has no list {key!r}")
    if len(values) != count:
        raise ServiceError(f"the reply has {len(values)} {key} for {count} responses")
    numbers = [_number(value) for value in values]
    for row, (value, number) in enumerate(zip(values, numbers, strict=True)):
        if number is None and value is not None:
            raise ServiceError(
                f"{key}[{row}] of the reply is {shorten(value)}, no finite float32 number"
            )
    return numbers


def _number(value: Any) -> float | None:
    return None if isinstance(value, bool) else finite_number(value)


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
