"""Dispatch of requests to replicas, with retries on others when a replica fails."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
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
"""Value of vLLM for a log-probability that is NaN or infinite, as JSON has neither."""


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class VersionSpan(msgspec.Struct):
    """Tokens that were sampled by weights of one version."""

    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs
    finish_reason: str | None
    weight_versions: list[VersionSpan] | None = None


class _GenerateResponse(msgspec.Struct):
    """The fields that are read; others are skipped."""

    choices: list[_Choice]
    prompt_token_ids: list[int]


_DECODER = msgspec.json.Decoder(_GenerateResponse)


def decode_response(content: bytes, prompt: Sequence[int], versions: Mapping[str, int]) -> Response:
    """Decode the JSON of a response.

    Raises:
        EngineFailure: It is invalid, answers another prompt, or has a token of other weights than
            those of ``versions``.
    """
    try:
        answer = _DECODER.decode(content)
    except msgspec.MsgspecError as error:
        raise EngineFailure(f"the vLLM server's answer cannot be read ({error})") from error
    if answer.prompt_token_ids != list(prompt):
        raise EngineFailure("vLLM answered another prompt than the one it was given")
    (choice,) = answer.choices
    values = [token.logprob for token in choice.logprobs.content]
    logprobs = [math.nan if value <= _NO_NUMBER else value for value in values]
    response = read_response(choice.token_ids, logprobs, choice.finish_reason)
    if not choice.token_ids:
        raise EngineFailure("vLLM answered without a token")
    spans, end = choice.weight_versions or [], 0
    for span in spans:
        if span.start != end:
            break
        end = span.end
    if end != len(choice.token_ids):
        raise EngineFailure("vLLM does not return the weight version of every token")
    if any(span.version not in versions for span in spans):
        raise EngineFailure("the vLLM server has other weights than it was given here")
    tokens = [versions[span.version] for span in spans for _ in range(span.start, span.end)]
    if len(set(tokens)) > 1:
        (segment,) = response.segments
        segment = replace(segment, versions=torch.tensor(tokens, dtype=torch.long))
        response = replace(response, segments=(segment,))
    return replace(response, weight_version=min(tokens))


_LOOK_SECONDS = 1.0
"""Seconds between checks for replicas that hang."""


@dataclass(frozen=True)
class Targets:
    """Servers with the same weights. Never changed, only replaced."""

    clients: Mapping[int, ServerClient]
    models: Mapping[int, str]
    """Name of the model at each replica."""
    router: Router
    on_failure: Callable[[int, EngineFailure], None]
    """Called with a replica that failed, which gets no further requests."""
    versions: Mapping[str, int]
    """Training iterations behind the accepted weights, by name."""
    failed: Mapping[Address, str] = field(default_factory=dict)
    """Reasons of replicas that failed meanwhile, in any call."""
    traffic: Traffic = field(default_factory=Traffic)
    """Traffic of all calls."""


def respond(
    bodies: Sequence[dict[str, Any]], targets: Targets, *, concurrency: int, stall: float
) -> list[Response]:
    """Return one response per body, in order.

    Requests with one prompt stay together, see `Router`. Unfinished requests of a replica that
    fails, aborts a response or hangs are repeated by others.

    Args:
        bodies: Requests, without the model's name.
        targets: The servers.
        concurrency: Open requests of a replica, of all calls; those of one prompt may exceed it.
        stall: Seconds without a response to any call after which a replica counts as hung.

    Raises:
        EngineFailure: No replica is left.
        ValueError: A replica refuses a request.
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
        self._waiting = deque(self._by_prompt(range(len(bodies))))
        self._running: dict[asyncio.Task[Response], tuple[int, Placement]] = {}
        self._remaining = set(targets.clients)
        """Replicas that have not failed in this call."""
        self._traffic = targets.traffic
        self._number = self._traffic.enter()
        self._responses: dict[int, Response] = {}
        self._failure: EngineFailure | None = None

    async def run(self) -> list[Response]:
        """Run until all responses are complete."""
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
                    # responses before a failure count
                    for task in sorted(done, key=lambda each: each.exception() is not None):
                        await self._finish(task)
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
        """Send waiting requests to replicas with free slots."""
        clients, failed = self._targets.clients, self._targets.failed
        while self._waiting:
            remaining = [each for each in self._remaining if clients[each].address not in failed]
            if not remaining:
                (*_, last) = failed.values() or ["none has weights"]
                raise self._failure or EngineFailure(f"no vLLM server is left: {last}")
            if not self._traffic.may_place(self._number, wake):
                return
            free = [each for each in remaining if self._traffic.has_slot(clients[each], self._most)]
            if not free:
                return
            group = self._waiting.popleft()
            most = [self._bodies[index]["sampling_params"]["max_tokens"] for index in group]
            prompt = self._bodies[group[0]]["token_ids"]
            placed = self._targets.router.place(prompt, most, among=free)
            chosen = placed[0].replica
            self._traffic.opened(clients[chosen], len(group))
            for index, placement in zip(group, placed, strict=True):
                task = asyncio.create_task(self._generate(self._bodies[index], chosen))
                self._running[task] = index, placement
        self._traffic.placed(self._number)

    async def _generate(self, body: dict[str, Any], number: int) -> Response:
        body = {**body, "model": self._targets.models[number]}
        content = await self._targets.clients[number].generate(self._sessions[number], body)
        return decode_response(content, body["token_ids"], self._targets.versions)

    async def _finish(self, task: asyncio.Task[Response]) -> None:
        """Store the response of a task, or drop its replica."""
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
        """Move unfinished requests of a replica to the front of the queue."""
        self._remaining.discard(number)
        self._failure = failure
        self._targets.on_failure(number, failure)
        unfinished = []
        for task, (index, placement) in list(self._running.items()):
            if placement.replica == number:
                await self._cancel(task)
                unfinished.append(index)
        self._waiting.extendleft(reversed(self._by_prompt(unfinished)))

    def _by_prompt(self, indices: Iterable[int]) -> list[list[int]]:
        groups: dict[tuple[int, ...], list[int]] = {}
        for index in indices:
            groups.setdefault(tuple(self._bodies[index]["token_ids"]), []).append(index)
        return list(groups.values())

    async def _cancel(self, task: asyncio.Task[Response]) -> None:
        _, placement = self._running.pop(task)
        self._targets.router.finished(placement)
        self._traffic.closed(self._targets.clients[placement.replica], answered=False)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
