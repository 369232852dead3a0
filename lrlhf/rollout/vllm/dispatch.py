"""Dispatch of requests to replicas: routing, open requests, and retries after failures."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
import torch

from lrlhf.background import in_background
from lrlhf.rollout.engines.synced_engine import EngineFailure
from lrlhf.rollout.responses import Response
from lrlhf.rollout.vllm.client import Address, ServerClient
from lrlhf.rollout.vllm.vllm_base import NO_NUMBER, read_response


class _TopLogprob(msgspec.Struct):
    token_id: int
    logprob: float


class _Logprob(msgspec.Struct):
    logprob: float
    top_logprobs: list[_TopLogprob] = []


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


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A request for one response to a prompt of token ids.

    Args:
        prompt_ids: The prompt as the policy reads it, which the server must return.
        sampling_params: Fields of vLLM's SamplingParams.
        short_ids: The prompt with one placeholder token for each of the ``parts``.
        parts: Images and audio, see `lrlhf.rollout.vllm.vllm_base.content_parts`.
        route: What caches know the prompt by: ``short_ids``, with a picture in the place of its
            placeholder.
    """

    prompt_ids: Sequence[int]
    sampling_params: dict[str, Any]
    short_ids: Sequence[int]
    route: tuple[Hashable, ...]
    parts: Sequence[dict[str, str]] = ()

    def body(self, model: str) -> dict[str, Any]:
        """Return the JSON of the request to a server with a model of this name."""
        return {
            "model": model,
            "token_ids": self.short_ids,
            "return_token_ids": True,
            "sampling_params": self.sampling_params,
            **({"content_parts": self.parts} if self.parts else {}),
        }


_DECODER = msgspec.json.Decoder(_GenerateResponse)


def decode_response(
    content: bytes, prompt: Sequence[int], versions: Mapping[str, int], *, num_logprobs: int = 0
) -> Response:
    """Decode the JSON of a response, with a sampling mask if ``num_logprobs`` were requested.

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
    logprobs = [math.nan if value <= NO_NUMBER else value for value in values]
    largest = None
    if num_logprobs:
        steps = [step.top_logprobs for step in choice.logprobs.content]
        largest = [{top.token_id: top.logprob for top in step} for step in steps]
    response = read_response(choice.token_ids, logprobs, choice.finish_reason, largest)
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


BLOCK = 64
"""Tokens of a block; prefixes count as cached in complete blocks."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The replica of a request, and the expected tokens to compute there."""

    replica: int
    tokens: int


class Router:
    """Prefix-aware routing: chooses the replica with the fewest tokens to compute.

    Requests with one prompt go together. Their cost at a replica is the tokens of the prompt that
    are not in its prefix cache, and they go where the sum of this cost and its load is the
    smallest. So the next turn of an episode goes where its history is cached, until the load there
    outweighs the cache. NVIDIA Dynamo's router adds the same two, blocks to prefill and blocks in
    use; those of SGLang and Ray Serve follow the prefix until the loads are too different.

    The contents of a cache are estimated: all prompts and responses since it was last cleared.
    Evicted blocks count as cached.

    Every rank has a router of its own, without other ranks' requests. Ties are broken in another
    order on each, so that ranks that start together choose different replicas.

    Args:
        replicas: Numbers of the replicas.
        first: Index of the replica that wins ties.
    """

    def __init__(self, replicas: Collection[int], *, first: int = 0) -> None:
        order = sorted(replicas)
        turn = first % len(order)
        self._order = order[turn:] + order[:turn]
        self._load = dict.fromkeys(order, 0)
        self._cached: dict[int, set[int]] = {number: set() for number in order}
        self._lock = threading.Lock()

    def place(
        self, prompt: Sequence[Hashable], most: Sequence[int], *, among: Collection[int]
    ) -> list[Placement]:
        """Choose a replica for requests with one prompt, of at most ``most`` new tokens each.

        Returns:
            One placement per request, for `finished`.
        """
        blocks = list(_blocks(prompt))
        with self._lock:
            missing = {each: len(prompt) - self._length(each, blocks) for each in among}
            chosen = min(
                (each for each in self._order if each in among),
                key=lambda each: self._load[each] + missing[each],
            )
            # the first computes the prompt for all
            tokens = [most[0] + missing[chosen], *most[1:]]
            self._load[chosen] += sum(tokens)
            self._cached[chosen].update(blocks)
        return [Placement(chosen, each) for each in tokens]

    def finished(self, placement: Placement, sequence: Sequence[Hashable] = ()) -> None:
        """Remove a request from the load; ``sequence``, prompt and response, is cached now."""
        blocks = list(_blocks(sequence))
        with self._lock:
            self._load[placement.replica] -= placement.tokens
            self._cached[placement.replica].update(blocks)

    def forget(self) -> None:
        """Record that all caches were cleared."""
        with self._lock:
            for cached in self._cached.values():
                cached.clear()

    def _length(self, replica: int, blocks: Sequence[int]) -> int:
        """Return the number of cached tokens of a prompt."""
        cached = self._cached[replica]
        for count, block in enumerate(blocks):
            if block not in cached:
                return count * BLOCK
        return len(blocks) * BLOCK


def _blocks(tokens: Sequence[Hashable]) -> Iterator[int]:
    """Yield the hash of every complete block with all blocks before it."""
    chain = 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        chain = hash((chain, *tokens[start : start + BLOCK]))
        yield chain


@dataclass
class _OpenRequests:
    count: int = 0
    last_response: float = 0.0


class Traffic:
    """Shares the slots of servers between calls, first come, first served.

    It has one clock per server for all calls: a request may wait for those of another call, whose
    responses show that the server works.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: WeakKeyDictionary[ServerClient, _OpenRequests] = WeakKeyDictionary()
        self._waiting: dict[int, Callable[[], object]] = {}
        self._calls = 0

    def enter(self) -> int:
        """Return the number of a new call."""
        with self._lock:
            self._calls += 1
            return self._calls

    def may_place(self, call: int, wake: Callable[[], object]) -> bool:
        """Whether a call may take slots now.

        Args:
            call: Its number.
            wake: Called from any thread when slots may be free, until `placed`.
        """
        with self._lock:
            self._waiting[call] = wake
            return call == min(self._waiting)

    def placed(self, call: int) -> None:
        """Record that a call needs no slot at present."""
        with self._lock:
            if self._waiting.pop(call, None) is not None:
                self._wake_first()

    def has_slot(self, server: ServerClient, most: int) -> bool:
        """Whether a server with ``most`` slots has a free one."""
        with self._lock:
            return self._of(server).count < most

    def opened(self, server: ServerClient, count: int) -> None:
        """Record requests to a server."""
        with self._lock:
            requests = self._of(server)
            if not requests.count:
                requests.last_response = time.monotonic()
            requests.count += count

    def closed(self, server: ServerClient, *, answered: bool) -> None:
        """Record the end of a request, and whether there was a response."""
        with self._lock:
            requests = self._of(server)
            requests.count -= 1
            if answered:
                requests.last_response = time.monotonic()
            self._wake_first()

    def silence(self, server: ServerClient) -> float:
        """Return the seconds without a response of a server with open requests."""
        with self._lock:
            return time.monotonic() - self._of(server).last_response

    def _of(self, server: ServerClient) -> _OpenRequests:
        return self._open.setdefault(server, _OpenRequests())

    def _wake_first(self) -> None:
        if self._waiting:
            self._waiting[min(self._waiting)]()


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
    requests: Sequence[TokenRequest], targets: Targets, *, concurrency: int, stall: float
) -> list[Response]:
    """Return one response per request, in order.

    Requests with one prompt stay together, see `Router`. Unfinished requests of a replica that
    fails, aborts a response or hangs are repeated by others.

    Args:
        requests: The requests.
        targets: The servers.
        concurrency: Open requests of a replica, of all calls; those of one prompt may exceed it.
        stall: Seconds without a response to any call after which a replica counts as hung.

    Raises:
        EngineFailure: No replica is left.
        ValueError: A replica refuses a request.
    """
    call = _RequestBatch(requests, targets, concurrency, stall)
    return in_background(lambda: asyncio.run(call.run()), name="vllm-requests").result()


class _RequestBatch:
    """One call of `respond`."""

    def __init__(
        self,
        requests: Sequence[TokenRequest],
        targets: Targets,
        concurrency: int,
        stall: float,
    ) -> None:
        self._requests = requests
        self._targets = targets
        self._most = concurrency
        self._stall = stall
        self._waiting = deque(self._by_prompt(range(len(requests))))
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
        return [self._responses[index] for index in range(len(self._requests))]

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
            most = [self._requests[index].sampling_params["max_tokens"] for index in group]
            prompt = self._requests[group[0]].route
            placed = self._targets.router.place(prompt, most, among=free)
            chosen = placed[0].replica
            self._traffic.opened(clients[chosen], len(group))
            for index, placement in zip(group, placed, strict=True):
                task = asyncio.create_task(self._generate(self._requests[index], chosen))
                self._running[task] = index, placement
        self._traffic.placed(self._number)

    async def _generate(self, request: TokenRequest, number: int) -> Response:
        body = request.body(self._targets.models[number])
        content = await self._targets.clients[number].generate(self._sessions[number], body)
        return decode_response(
            content,
            request.prompt_ids,
            self._targets.versions,
            num_logprobs=request.sampling_params.get("logprobs", 0),
        )

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
        sequence = [*self._requests[index].route, *response.token_ids.tolist()]
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
        groups: dict[tuple[Hashable, ...], list[int]] = {}
        for index in indices:
            groups.setdefault(self._requests[index].route, []).append(index)
        return list(groups.values())

    async def _cancel(self, task: asyncio.Task[Response]) -> None:
        _, placement = self._running.pop(task)
        self._targets.router.finished(placement)
        self._traffic.closed(self._targets.clients[placement.replica], answered=False)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
