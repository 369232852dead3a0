"""Requests on their way to replicas, and what becomes of them when a replica fails."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import torch

from lrlhf.background import in_background
from lrlhf.rollout.engines.synced_engine import EngineFailure
from lrlhf.rollout.responses import Response
from lrlhf.rollout.vllm.client import Address, ServerClient
from lrlhf.rollout.vllm.fleet import Placement, Router, Traffic
from lrlhf.rollout.vllm.vllm_base import read_response

_NO_NUMBER = -9999.0
"""What vLLM writes for a log-probability that is NaN or infinite, as JSON has neither."""


class Logprob(msgspec.Struct):
    """Of one token."""

    logprob: float


class Logprobs(msgspec.Struct):
    """Of all tokens."""

    content: list[Logprob]


class Span(msgspec.Struct):
    """Tokens that weights of one version sampled."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct):
    """One response."""

    token_ids: list[int]
    logprobs: Logprobs
    finish_reason: str | None
    weight_versions: list[Span] | None = None


class Answer(msgspec.Struct):
    """The fields that are read; all others are skipped without being built."""

    choices: list[Choice]
    prompt_token_ids: list[int]


_DECODER = msgspec.json.Decoder(Answer)


def read_answer(content: bytes, prompt: Sequence[int]) -> tuple[Response, list[Span]]:
    """Read a response, and which weights sampled it.

    Args:
        content: JSON.
        prompt: What the server was asked to go on from.

    Raises:
        EngineFailure: The answer is broken, or one to something else.
    """
    try:
        answer = _DECODER.decode(content)
    except msgspec.MsgspecError as error:
        raise EngineFailure(f"the vLLM server's answer cannot be read ({error})") from error
    if answer.prompt_token_ids != list(prompt):
        raise EngineFailure("vLLM answered another prompt than the one it was given")
    (choice,) = answer.choices
    found = [one.logprob for one in choice.logprobs.content]
    logprobs = [math.nan if one <= _NO_NUMBER else one for one in found]
    response = read_response(choice.token_ids, logprobs, choice.finish_reason)
    if not choice.token_ids:
        raise EngineFailure("vLLM answered without a token")
    spans, end = choice.weight_versions or [], 0
    for span in spans:
        if span.start != end:
            break
        end = span.end
    if end != len(choice.token_ids):
        raise EngineFailure("vLLM does not say of every token which weights sampled it")
    return response, spans


def with_versions(response: Response, spans: Sequence[Span], known: Mapping[str, int]) -> Response:
    """Say of a response which weights sampled it.

    Args:
        response: Of one turn.
        spans: By the server's names of versions.
        known: Training iterations behind the weights of each name.

    Raises:
        EngineFailure: The weights of a version did not come from here.
    """
    versions = []
    for span in spans:
        if span.version not in known:
            raise EngineFailure("the vLLM server has other weights than it was given here")
        versions += [known[span.version]] * (span.end - span.start)
    if len(set(versions)) > 1:
        (whole,) = response.segments
        mixed = replace(whole, versions=torch.tensor(versions, dtype=torch.long))
        response = replace(response, segments=(mixed,))
    return replace(response, weight_version=min(versions))


_LOOK_SECONDS = 1.0
"""How often it is looked whether a replica hangs."""


@dataclass(frozen=True)
class Targets:
    """Where requests can go: servers with the same weights. Never changed, only replaced."""

    clients: Mapping[int, ServerClient]
    models: Mapping[int, str]
    """What a replica calls the model."""
    router: Router
    on_failure: Callable[[int, EngineFailure], None]
    """Told of a replica that failed; nothing more is sent there."""
    versions: Mapping[str, int]
    """Training iterations behind the weights that a response may come from, by their names."""
    failed: Mapping[Address, str] = field(default_factory=dict)
    """Replicas that failed meanwhile, here or in another call, and why."""
    traffic: Traffic = field(default_factory=Traffic)
    """Of all calls."""


def respond(
    bodies: Sequence[dict[str, Any]], targets: Targets, *, concurrency: int, stall: float
) -> list[Response]:
    """Ask for one response per body, and return them in that order.

    Requests with one prompt stay together, see `Router`. What a replica leaves unfinished that
    fails, breaks a response off or hangs, the others are asked for again.

    Args:
        bodies: Requests for tokens, without the model's name.
        targets: Where they can go.
        concurrency: Requests that a replica has at the same time, of all calls; those of one
            prompt may be more.
        stall: Seconds without a response to any call after which a replica counts as hung.

    Raises:
        EngineFailure: No replica is left.
        ValueError: One of them refuses a request.
    """
    call = _Call(bodies, targets, concurrency, stall)
    return in_background(lambda: asyncio.run(call.run()), name="vllm-requests").result()


class _Call:
    """One call of `respond`."""

    def __init__(
        self,
        bodies: Sequence[dict[str, Any]],
        targets: Targets,
        concurrency: int,
        stall: float,
    ) -> None:
        self._bodies = bodies
        self._targets = targets
        self._most = concurrency
        self._stall = stall
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, body in enumerate(bodies):
            groups.setdefault(tuple(body["token_ids"]), []).append(index)
        self._waiting = deque(groups.values())
        self._running: dict[asyncio.Task[Response], tuple[int, Placement]] = {}
        self._left = set(targets.clients)
        """Replicas that this call has not given up."""
        self._traffic = targets.traffic
        self._number = self._traffic.enter()
        self._responses: dict[int, Response] = {}
        self._failure: EngineFailure | None = None

    async def run(self) -> list[Response]:
        """Go on until all responses are there."""
        loop = asyncio.get_running_loop()
        self._woken = loop.create_future()
        wake = partial(loop.call_soon_threadsafe, self._wake)
        async with AsyncExitStack() as stack:
            self._sessions = {
                number: await stack.enter_async_context(client.session())
                for number, client in self._targets.clients.items()
            }
            try:
                while self._waiting or self._running:
                    self._place(wake)
                    awaited: set[asyncio.Future[Any]] = {*self._running, self._woken}
                    await asyncio.wait(
                        awaited,
                        timeout=min(self._stall, _LOOK_SECONDS),
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                    if self._woken.done():
                        self._woken = loop.create_future()
                    done = [task for task in self._running if task.done()]
                    # what a replica answered before it failed counts
                    for task in sorted(done, key=lambda one: one.exception() is not None):
                        await self._take(task)
                    await self._drop_hung()
            finally:
                self._traffic.placed(self._number)
                for task in list(self._running):
                    await self._cancel(task)
        return [self._responses[index] for index in range(len(self._bodies))]

    def _wake(self) -> None:
        if not self._woken.done():
            self._woken.set_result(None)

    def _place(self, wake: Callable[[], object]) -> None:
        """Send what waits to replicas that have a place free."""
        clients, failed = self._targets.clients, self._targets.failed
        while self._waiting:
            left = [number for number in self._left if clients[number].address not in failed]
            if not left:
                raise self._told(failed)
            if not self._traffic.may_place(self._number, wake):
                return
            free = [one for one in left if self._traffic.has_place(clients[one], self._most)]
            if not free:
                return
            group = self._waiting.popleft()
            most = [self._bodies[index]["sampling_params"]["max_tokens"] for index in group]
            prompt = self._bodies[group[0]]["token_ids"]
            placed = self._targets.router.place(prompt, most, among=free)
            chosen = placed[0].replica
            self._traffic.opened(clients[chosen], len(group))
            for index, placement in zip(group, placed, strict=True):
                task = asyncio.create_task(self._ask(self._bodies[index], chosen))
                self._running[task] = index, placement
        self._traffic.placed(self._number)

    def _told(self, failed: Mapping[Address, str]) -> EngineFailure:
        """Return why no replica is left."""
        if self._failure is None:
            (*_, last) = failed.values() or ["none has weights"]
            self._failure = EngineFailure(f"no vLLM server is left: {last}")
        return self._failure

    async def _ask(self, body: dict[str, Any], number: int) -> Response:
        asked = {**body, "model": self._targets.models[number]}
        content = await self._targets.clients[number].generate(self._sessions[number], asked)
        response, spans = read_answer(content, body["token_ids"])
        return with_versions(response, spans, self._targets.versions)

    async def _take(self, task: asyncio.Task[Response]) -> None:
        """Keep a response; without one, the replica failed."""
        if task not in self._running:
            return  # its replica was dropped meanwhile
        index, placement = self._running[task]
        try:
            response = task.result()
        except EngineFailure as failure:
            await self._drop(placement.replica, failure)
            return
        del self._running[task]
        self._traffic.closed(self._targets.clients[placement.replica], answered=True)
        self._responses[index] = response
        sequence = [*self._bodies[index]["token_ids"], *response.token_ids.tolist()]
        self._targets.router.finished(placement, sequence)

    async def _drop_hung(self) -> None:
        for number in {placement.replica for _, placement in self._running.values()}:
            if self._traffic.silence(self._targets.clients[number]) > self._stall:
                message = (
                    f"the vLLM server finished no response in {self._stall:g} s "
                    "(engine.stall_timeout)"
                )
                await self._drop(number, EngineFailure(message))

    async def _drop(self, number: int, failure: EngineFailure) -> None:
        """Give what a replica has not finished to the others."""
        self._left.discard(number)
        self._failure = failure
        self._targets.on_failure(number, failure)
        groups: dict[tuple[int, ...], list[int]] = {}
        for task, (index, placement) in list(self._running.items()):
            if placement.replica == number:
                await self._cancel(task)
                groups.setdefault(tuple(self._bodies[index]["token_ids"]), []).append(index)
        self._waiting.extendleft(reversed(groups.values()))

    async def _cancel(self, task: asyncio.Task[Response]) -> None:
        _, placement = self._running.pop(task)
        self._targets.router.finished(placement)
        self._traffic.closed(self._targets.clients[placement.replica], answered=False)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
