"""Rewards from a service over HTTP."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Any
from urllib.error import HTTPError

from lrlhf.rewards.function import (
    Completion,
    RewardFunction,
    column_of,
    completion_text,
    content_text,
)
from lrlhf.types import Prompt

_RETRIED_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_PASSING = (OSError, http.client.HTTPException)
_MAX_SHOWN = 200


class RemoteReward(RewardFunction):
    """What a service returns for the responses.

    One POST per batch of ``{"queries": [...], "prompts": [...], "references": [...]}``: prompt and
    response, the prompt alone, and the reference where ``reference_column`` is set. A chat prompt
    is sent as the contents of its turns, joined by newlines. The service returns
    ``{"rewards": [...]}``, a number or null per query. A request that fails for a passing reason
    is repeated, within the timeout of the rewards.

    Args:
        url: Where to, ``http://`` or ``https://``.
        reference_column: Data column that is sent as ``references``.
        token_variable: Environment variable with a token, sent as ``Authorization: Bearer``.
        batch_size: Responses per request; null: all in one.
        retries: Further tries after the first.
        wait: Seconds before the first of them, doubled each time.
        request_timeout: Seconds that one try may take.

    Reference:
        The protocol of LightRFT's and OpenRLHF's ``remote_rm_url``.
    """

    def __init__(
        self,
        url: str,
        reference_column: str | None = None,
        token_variable: str | None = None,
        batch_size: int | None = None,
        retries: int = 4,
        wait: float = 1.0,
        request_timeout: float = 30.0,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"url {url!r} must begin with http:// or https:// and name a host")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be 1 or more, or null")
        if retries < 0:
            raise ValueError(f"retries is {retries}; it must be 0 or more")
        self._url = url
        self._reference_column = reference_column
        self._token_variable = token_variable
        self._batch_size = batch_size
        self._retries = retries
        self._wait = wait
        self._request_timeout = request_timeout

    def prepare(self) -> None:
        """Check that the token is there.

        Raises:
            ValueError: ``token_variable`` is not set in the environment.
        """
        if self._token_variable is not None and not os.environ.get(self._token_variable):
            raise ValueError(
                f"token_variable: the environment variable {self._token_variable} is not set"
            )

    def __call__(
        self, *, prompts: Sequence[Prompt], completions: Sequence[Completion], **columns: Any
    ) -> list[float | None]:
        texts = [_prompt_text(prompt) for prompt in prompts]
        queries = [
            text + completion_text(completion)
            for text, completion in zip(texts, completions, strict=True)
        ]
        body: dict[str, Sequence[Any]] = {"queries": queries, "prompts": texts}
        if self._reference_column is not None:
            body["references"] = column_of(
                columns, self._reference_column, setting="reference_column"
            )
        size = self._batch_size or max(1, len(queries))
        scores: list[float | None] = []
        for start in range(0, len(queries), size):
            part = {name: values[start : start + size] for name, values in body.items()}
            scores += self._rewards(part)
        return scores

    def _rewards(self, body: dict[str, Sequence[Any]]) -> list[float | None]:
        reply = self._post(json.dumps(body).encode())
        try:
            rewards = json.loads(reply)["rewards"]
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f'{self._url} returned {_shown(reply)}, not {{"rewards": [...]}}'
            ) from error
        count = len(body["queries"])
        if not isinstance(rewards, list) or len(rewards) != count:
            raise ValueError(f"{self._url} returned {_shown(reply)} for {count} queries")
        return rewards

    def _post(self, data: bytes) -> bytes:
        """Send until the service answers.

        Raises:
            OSError: The last try failed, or the service refuses the request as such.
        """
        tries = self._retries + 1
        for attempt in range(tries):
            try:
                return self._post_once(data)
            except _PASSING as error:
                if isinstance(error, HTTPError) and error.code not in _RETRIED_STATUS:
                    raise ConnectionError(f"{self._url} refuses the request: {error}") from error
                if attempt + 1 == tries:
                    raise ConnectionError(
                        f"{self._url} did not answer in {tries} tries; the last: {error}"
                    ) from error
            time.sleep(self._wait * 2**attempt)
        raise AssertionError("every try returns or raises")

    def _post_once(self, data: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self._token_variable is not None:
            headers["Authorization"] = f"Bearer {os.environ[self._token_variable]}"
        request = urllib.request.Request(self._url, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=self._request_timeout) as reply:
                return bytes(reply.read())
        except HTTPError as error:
            error.close()  # it holds the connection
            raise


def _prompt_text(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    return "".join(f"{content_text(message.get('content'))}\n" for message in prompt)


def _shown(reply: bytes) -> str:
    text = reply.decode("utf-8", "replace")
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")
