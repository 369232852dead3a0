"""Where questions to a judge are answered."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from lrlhf.rewards.function import RewardError
from lrlhf.rewards.remote.remote_http import RequestRefusedError, ServiceError
from lrlhf.rewards.remote.service_client import Calls, all_of


@dataclass(frozen=True)
class Reply:
    """What the judge has written, and what it took."""

    text: str
    finished: bool
    """Whether it came to its end by itself."""
    prompt_tokens: int = 0
    completion_tokens: int = 0


def completions_address(url: str) -> str:
    """Return where questions are sent."""
    return f"{url}/chat/completions"


def encode_request(
    model: str, system: str, text: str, images: Sequence[str], options: Mapping[str, Any]
) -> bytes:
    """Return a request as JSON, the same bytes for the same question.

    Args:
        model: Its name at the endpoint.
        system: System prompt; empty: none.
        text: The question.
        images: PNG files in base64, that are shown before it.
        options: Other fields of the request.
    """
    pictures = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
        for image in images
    ]
    content: Any = [*pictures, {"type": "text", "text": text}] if pictures else text
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": content})
    body = {"model": model, "messages": messages, **options}
    return json.dumps(body, sort_keys=True, allow_nan=False).encode()


def read_reply(reply: Mapping[str, Any]) -> Reply:
    """Return what came back.

    Raises:
        ServiceError: It is no chat completion.
    """
    try:
        choice = reply["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    except (LookupError, TypeError) as error:
        raise ServiceError("the reply is no chat completion") from error
    if text is not None and not isinstance(text, str):
        raise ServiceError(f"the content of the reply is a JSON {type(text).__name__}, no text")
    usage = reply.get("usage")
    tokens = usage if isinstance(usage, Mapping) else {}
    return Reply(
        text or "",
        finished=reason == "stop",
        prompt_tokens=_count(tokens.get("prompt_tokens")),
        completion_tokens=_count(tokens.get("completion_tokens")),
    )


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


_PATIENCE_S = 60.0
"""For other processes that write."""


class ReplyCache:
    """A file of replies by the request that they answer, which several processes may share.

    Args:
        path: An SQLite database; it is made where there is none. None: nothing is kept.
        judge: Who replies; replies of others are not found.
    """

    def __init__(self, path: str | None, judge: str) -> None:
        self._path = None if path is None else Path(path).expanduser()
        self._judge = judge

    def find(self, requests: Sequence[bytes]) -> dict[bytes, Reply]:
        """Return the replies that are known."""
        if self._path is None:
            return {}
        query = "SELECT text, finished FROM replies WHERE request = ?"
        with self._open(self._path) as database:
            rows = (
                (one, database.execute(query, (self._key(one),)).fetchone()) for one in requests
            )
            return {one: Reply(row[0], finished=bool(row[1])) for one, row in rows if row}

    def keep(self, replies: Mapping[bytes, Reply]) -> None:
        """Add replies."""
        if self._path is None or not replies:
            return
        with self._open(self._path) as database:
            database.executemany(
                "INSERT OR REPLACE INTO replies VALUES (?, ?, ?)",
                [(self._key(one), reply.text, reply.finished) for one, reply in replies.items()],
            )

    @contextmanager
    def _open(self, path: Path) -> Iterator[sqlite3.Connection]:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(path, timeout=_PATIENCE_S)) as database, database:
                database.execute(
                    "CREATE TABLE IF NOT EXISTS replies "
                    "(request BLOB PRIMARY KEY, text TEXT NOT NULL, finished INTEGER NOT NULL)"
                )
                yield database
        except (sqlite3.Error, OSError) as error:
            raise RewardError(f"cache: {path} cannot be used: {error}") from error

    def _key(self, request: bytes) -> bytes:
        return hashlib.sha256(self._judge.encode() + b"\n" + request).digest()


_ABOUT_THE_REQUEST = (400, 413, 422)
"""Refusals that other requests need not meet, such as of a text that is too long."""


class Desk:
    """Has questions answered during one call, by the cache or by the endpoint.

    Args:
        calls: To the endpoint.
        cache: Of replies.
    """

    def __init__(self, calls: Calls, cache: ReplyCache) -> None:
        self._calls, self._cache = calls, cache
        self.asked = self.known = self.unanswered = 0
        self.prompt_tokens = self.completion_tokens = 0
        self.refusal = ""
        self._unsaved: dict[bytes, Reply] = {}
        self._saving = asyncio.Lock()

    async def ask(self, requests: Iterable[bytes]) -> dict[bytes, Reply]:
        """Return the replies; a request that comes twice is sent once."""
        wanted = list(dict.fromkeys(requests))
        known = await asyncio.to_thread(self._cache.find, wanted)
        open_ones = [one for one in wanted if one not in known]
        try:
            answers = await all_of([self._send(one) for one in open_ones])
        finally:
            await asyncio.to_thread(self._cache.keep, self._unsaved)
        new = {
            one: reply for one, reply in zip(open_ones, answers, strict=True) if reply is not None
        }
        self.known += len(known)
        self.asked += len(open_ones)
        self.unanswered += len(open_ones) - len(new)
        self.prompt_tokens += sum(reply.prompt_tokens for reply in new.values())
        self.completion_tokens += sum(reply.completion_tokens for reply in new.values())
        return known | new

    async def _send(self, request: bytes) -> Reply | None:
        try:
            reply = await self._calls.ask(completions_address, lambda: request, read_reply)
        except RequestRefusedError as error:
            if error.status not in _ABOUT_THE_REQUEST:
                raise
            self.refusal = str(error)
            return None
        if reply is not None:
            await self._keep(request, reply)
        return reply

    async def _keep(self, request: bytes, reply: Reply) -> None:
        """Put a reply into the cache at once, as it is paid for: what follows may fail."""
        self._unsaved[request] = reply
        async with self._saving:  # with those that came while others were written
            waiting = dict(self._unsaved)
            await asyncio.to_thread(self._cache.keep, waiting)
            for one in waiting:
                del self._unsaved[one]

    def counts(self) -> dict[str, float]:
        """Return what is logged of the requests."""
        counts: dict[str, float] = {
            "requests": self.asked,
            "cached": self.known,
            "failures": self.unanswered,
            "retries": self._calls.retries,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
        }
        if self._calls.latencies:
            counts["latency_s"] = fmean(self._calls.latencies)
        return counts
