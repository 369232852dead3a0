"""Where questions to a judge are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from statistics import fmean

from lrlhf.rewards.judge.chat_endpoint import Reply, completions_address, read_reply
from lrlhf.rewards.judge.reply_cache import ReplyCache
from lrlhf.rewards.remote.remote_http import RequestRefusedError
from lrlhf.rewards.remote.service_client import Calls, all_of

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
