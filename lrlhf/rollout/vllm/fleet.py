"""The servers of an engine: restarts in the background, routing of requests, open requests."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from lrlhf.background import in_background
from lrlhf.rollout.engines.synced_engine import EngineFailure
from lrlhf.rollout.vllm.client import Address, ServerClient
from lrlhf.rollout.vllm.server import Server

logger = logging.getLogger(__name__)

_END_SECONDS = 0.2
_NOTICE_SECONDS = 5.0


class Fleet:
    """The servers of an engine, on rank 0.

    A server that failed is restarted in the background, and is in `running` once it is ready. When
    all have failed none is restarted: the engine restarts the whole fleet.

    Args:
        servers: Servers that are not started.
        max_restarts: Consecutive restarts of a server before it is left out.
    """

    def __init__(self, servers: Sequence[Server], *, max_restarts: int) -> None:
        self._servers = list(servers)
        self._max_restarts = max_restarts
        self._clients: dict[int, ServerClient] = {}
        self._starts: dict[int, Future[ServerClient]] = {}
        self._failures = [0] * len(self._servers)
        self._lock = threading.RLock()
        self._last = ""
        self.restarts = 0

    def start(self) -> None:
        """Start all servers in parallel and wait for them.

        Raises:
            EngineStartError: A server did not become ready.
        """
        self._starts = {
            number: in_background(server.start, name=f"vllm-server-{number}")
            for number, server in enumerate(self._servers)
        }
        wait(self._starts.values())
        self._clients = {number: start.result() for number, start in self._starts.items()}
        self._starts = {}

    def stop(self) -> None:
        """End all servers, also those that are starting."""
        with self._lock:
            starts, self._starts = list(self._starts.values()), {}
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()
        while True:
            for server in self._servers:
                server.stop()
            # a server may have been about to start a process
            if not wait(starts, _END_SECONDS).not_done:
                break
        for start in starts:
            if start.exception() is None:
                start.result().close()
        for server in self._servers:
            server.stop()

    def running(self) -> dict[int, ServerClient]:
        """Return the clients of running servers, restarted ones included.

        Raises:
            EngineFailure: None is left.
        """
        # outside of the lock, as it may take a server on another machine a while
        dead = [number for number in self._current() if not self._servers[number].alive()]
        with self._lock:
            for number in dead:
                self._remove(number, "has ended")
        self._join()
        while True:
            with self._lock:
                running, starts = dict(self._clients), list(self._starts.values())
            if running:
                return running
            if not starts:
                raise EngineFailure(f"no vLLM server is left: {self._last}")
            wait(starts, return_when=FIRST_COMPLETED)
            self._join()

    def fail(self, address: Address, reason: str) -> None:
        """Remove and restart a server, unless it is the last; its address changes by a restart."""
        with self._lock:
            for number, client in self._current().items():
                if client.address == address and len(self._clients) > 1:
                    self._remove(number, reason)

    def drop_broken(self, members: Collection[int], failed: Collection[int] = ()) -> list[int]:
        """Remove the servers that broke a common step.

        Args:
            members: Servers of the step; those that were removed meanwhile are broken too.
            failed: Servers that are known to have failed.

        Returns:
            Numbers of all broken servers; empty also if no others are left.
        """
        deadline = time.monotonic() + _NOTICE_SECONDS
        while True:  # servers notice the end of one of their processes with a delay
            current = self._current()
            silent = [
                number
                for number, client in current.items()
                if not (self._servers[number].alive() and client.is_healthy())
            ]
            broken = sorted({*silent, *failed, *(set(members) - current.keys())})
            if broken or time.monotonic() > deadline:
                break
            time.sleep(_END_SECONDS)
        with self._lock:
            for number in broken:
                silence = "does not answer any more"
                self._remove(number, silence if number in silent else "failed in a push")
            return broken if self._clients else []

    def succeeded(self) -> None:
        """Reset the restart counts of running servers, after a push."""
        for number in self._current():
            self._failures[number] = 0

    def _current(self) -> dict[int, ServerClient]:
        with self._lock:
            return dict(self._clients)

    def _remove(self, number: int, reason: str) -> None:
        client = self._clients.pop(number, None)
        if client is not None:
            client.close()
            self._restart(number, reason)

    def _restart(self, number: int, reason: str) -> None:
        self._last = name = f"vLLM server {number} {reason}"
        if not self._clients and not self._starts:
            return
        self._failures[number] += 1
        if self._failures[number] > self._max_restarts:
            logger.warning(
                "%s; it is left out, after %d restarts in a row (engine.max_restarts)",
                name,
                self._max_restarts,
            )
            in_background(self._servers[number].stop, name=f"vllm-server-{number}")
            return
        logger.warning("%s; it is started again while the others go on", name)
        self.restarts += 1
        self._starts[number] = in_background(
            self._servers[number].start, name=f"vllm-server-{number}"
        )

    def _join(self) -> None:
        """Add the clients of servers that have started."""
        with self._lock:
            done = {number: start for number, start in self._starts.items() if start.done()}
            for number, start in done.items():
                del self._starts[number]
                error = start.exception()
                if error is None:
                    self._clients[number] = start.result()
                    logger.warning("vLLM server %d runs again", number)
                elif isinstance(error, Exception):
                    self._restart(number, f"did not start ({error})")


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
        self, prompt: Sequence[int], most: Sequence[int], *, among: Collection[int]
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

    def finished(self, placement: Placement, sequence: Sequence[int] = ()) -> None:
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


def _blocks(tokens: Sequence[int]) -> Iterator[int]:
    """Yield the hash of every complete block with all blocks before it."""
    chain = 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        chain = hash((chain, *tokens[start : start + BLOCK]))
        yield chain


ResultT = TypeVar("ResultT")

_RESET_SECONDS = 10.0


@dataclass
class SyncedServer:
    """A server that takes part in pushes, on one rank."""

    number: int
    client: ServerClient
    described: dict[str, Any] = field(default_factory=dict)
    """Description by its workers, see `WeightReceiver.lrlhf_describe`."""
    failed: bool = False
    """Whether it failed in a common step."""
    _adapter: str = ""

    def load_adapter(self, version: str, settings: str, seconds: float) -> None:
        """Load the adapter that was sent, for requests with ``version`` as model."""
        call = partial(self.client.call_workers, timeout=seconds)
        folder, *_ = call("lrlhf_write_adapter", version, settings)
        # under a new name, as one with the old name would be loaded at every step
        body = {"lora_name": version, "lora_path": folder}
        self.client.post("/v1/load_lora_adapter", body, timeout=seconds)
        call("lrlhf_remove_adapter", version)
        if self._adapter:
            body = {"lora_name": self._adapter}
            self.client.post("/v1/unload_lora_adapter", body, timeout=seconds)
        self._adapter = version

    def reset_caches(self, seconds: float) -> None:
        """Clear keys, values and image features, with a time limit for each step."""
        deadline = time.monotonic() + _RESET_SECONDS
        while not self.client.post("/reset_prefix_cache", timeout=seconds)["success"]:
            # the blocks of a finished response are released with a delay
            if time.monotonic() > deadline:
                raise EngineFailure("vLLM did not reset its prefix cache: requests still run")
            time.sleep(0.1)
        for path in ("/reset_mm_cache", "/reset_encoder_cache"):
            self.client.post(path, timeout=seconds)


def on_all(
    servers: Sequence[SyncedServer], act: Callable[[SyncedServer], ResultT]
) -> list[ResultT]:
    """Act on all servers in parallel; errors are raised once all have finished."""

    def run(server: SyncedServer) -> ResultT:
        try:
            return act(server)
        except EngineFailure:
            server.failed = True
            raise

    futures = [in_background(partial(run, server), name="vllm-replica") for server in servers]
    wait(futures)
    return [future.result() for future in futures]


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
