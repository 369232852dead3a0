"""Servers that are kept running: one that fails is started again beside the others."""

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
    """The servers of an engine, on the rank that leads them.

    A server that failed is ended and started again in the background, and is among those that run
    once it answers and somebody asks for them. With no other left nothing is started: that is for
    the engine to do, with all of them.

    Args:
        servers: Not started yet.
        max_restarts: How often in a row one of them may be started again before it is left out.
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
        """Start all of them at once and wait for them.

        Raises:
            EngineStartError: One of them does not answer.
        """
        self._starts = {
            number: in_background(server.start, name=f"vllm-server-{number}")
            for number, server in enumerate(self._servers)
        }
        wait(self._starts.values())
        self._clients = {number: start.result() for number, start in self._starts.items()}
        self._starts = {}

    def stop(self) -> None:
        """End all of them, also those that are just starting."""
        with self._lock:
            starts, self._starts = list(self._starts.values()), {}
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()
        while True:
            for server in self._servers:
                server.stop()
            # one may have been about to start a process when it was ended
            if not wait(starts, _END_SECONDS).not_done:
                break
        for start in starts:
            if start.exception() is None:
                start.result().close()
        for server in self._servers:
            server.stop()

    def running(self) -> dict[int, ServerClient]:
        """Return those that run, with all that have been started again meanwhile.

        Raises:
            EngineFailure: None is left.
        """
        # which may take a server on another machine a while
        gone = [number for number in self._present() if not self._servers[number].alive()]
        with self._lock:
            for number in gone:
                self._take_out(number, "has ended")
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
        """Take a server out and start it again beside the others; the last one stays.

        Args:
            address: Where it was; one that has been started again since is another.
            reason: What it did.
        """
        with self._lock:
            for number, client in self._present().items():
                if client.address == address and len(self._clients) > 1:
                    self._take_out(number, reason)

    def drop_broken(self, members: Collection[int], failed: Collection[int] = ()) -> list[int]:
        """Take out those that something went wrong with.

        Args:
            members: Servers that were to do it; one that was taken out meanwhile is broken too.
            failed: Those that are known not to have done it.

        Returns:
            Numbers of all that are broken; empty also where no others are left.
        """
        deadline = time.monotonic() + _NOTICE_SECONDS
        while True:  # that a process of theirs has ended, servers notice a moment later
            present = self._present()
            silent = [
                number
                for number, client in present.items()
                if not (self._servers[number].alive() and client.is_healthy())
            ]
            broken = sorted({*silent, *failed, *(set(members) - present.keys())})
            if broken or time.monotonic() > deadline:
                break
            time.sleep(_END_SECONDS)
        with self._lock:
            for number in broken:
                silence = "does not answer any more"
                self._take_out(number, silence if number in silent else "failed in a push")
            return broken if self._clients else []

    def succeeded(self) -> None:
        """Hear that those that run were given weights."""
        for number in self._present():
            self._failures[number] = 0

    def _present(self) -> dict[int, ServerClient]:
        with self._lock:
            return dict(self._clients)

    def _take_out(self, number: int, reason: str) -> None:
        client = self._clients.pop(number, None)
        if client is not None:
            client.close()
            self._start_again(number, reason)

    def _start_again(self, number: int, reason: str) -> None:
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
        """Take those in that have been started."""
        with self._lock:
            done = {number: one for number, one in self._starts.items() if one.done()}
            for number, start in done.items():
                del self._starts[number]
                error = start.exception()
                if error is None:
                    self._clients[number] = start.result()
                    logger.warning("vLLM server %d runs again", number)
                elif isinstance(error, Exception):
                    self._start_again(number, f"did not start ({error})")


BLOCK = 64
"""Tokens that are looked up together; a prefix counts as cached by whole blocks."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request went, and what was expected of it there."""

    replica: int
    tokens: int


class Router:
    """Sends requests to the replica that has the least to do with them.

    Requests with one prompt go together. They cost a replica the tokens of the prompt that it has
    no keys and values of yet, and they go where that and the tokens that it still has to compute
    for others are the least in sum. So the next turn of an episode goes where its history is, until
    other work there outweighs what the history saves. NVIDIA Dynamo's router adds up the same two,
    blocks to prefill and blocks in use; routers such as those of SGLang and Ray Serve instead
    follow the prefix until the loads are too far apart.

    What a replica has keys and values of is not asked of it, but remembered: what was sent there,
    and what it answered, since its cache was last emptied. What it has thrown away since then, for
    lack of room, counts as there.

    Every rank has a router of its own and knows of no other rank's requests. Between equals each
    begins with another replica, so that ranks which all begin at once do not meet.

    Args:
        replicas: Their numbers.
        first: Which of them comes first between equals, by its place in the order.
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
        """Choose a replica for requests with one prompt.

        Args:
            prompt: Token ids.
            most: How many tokens each request may get.
            among: Replicas that may be chosen.

        Returns:
            One placement per request, which `finished` takes back.
        """
        blocks = list(_blocks(prompt))
        with self._lock:
            missing = {one: len(prompt) - self._length(one, blocks) for one in among}
            chosen = min(
                (one for one in self._order if one in among),
                key=lambda one: self._load[one] + missing[one],
            )
            # the first of them computes the prompt, and the others find it
            tokens = [most[0] + missing[chosen], *most[1:]]
            self._load[chosen] += sum(tokens)
            self._cached[chosen].update(blocks)
        return [Placement(chosen, each) for each in tokens]

    def finished(self, placement: Placement, sequence: Sequence[int] = ()) -> None:
        """Take a request off a replica's load.

        Args:
            placement: Of the request.
            sequence: Prompt and response, which the replica has keys and values of now.
        """
        blocks = list(_blocks(sequence))
        with self._lock:
            self._load[placement.replica] -= placement.tokens
            self._cached[placement.replica].update(blocks)

    def forget(self) -> None:
        """Hear that all caches were emptied."""
        with self._lock:
            for cached in self._cached.values():
                cached.clear()

    def _length(self, replica: int, blocks: Sequence[int]) -> int:
        """Tokens of a prompt that a replica has keys and values of."""
        cached = self._cached[replica]
        for count, block in enumerate(blocks):
            if block not in cached:
                return count * BLOCK
        return len(blocks) * BLOCK


def _blocks(tokens: Sequence[int]) -> Iterator[int]:
    """Name every whole block by what is in it and in all before it."""
    chain = 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        chain = hash((chain, *tokens[start : start + BLOCK]))
        yield chain


ResultT = TypeVar("ResultT")

_RESET_SECONDS = 10.0


@dataclass
class Replica:
    """A server that takes part in pushes, as one rank talks to it."""

    number: int
    client: ServerClient
    described: dict[str, Any] = field(default_factory=dict)
    """What its workers tell of it."""
    failed: bool = False
    """Whether it did not do something that all were asked for."""
    _adapter: str = ""

    def load_adapter(self, version: str, settings: str, seconds: float) -> None:
        """Have the server compute with what was sent, for requests that name this version.

        Args:
            version: Name of the adapter.
            settings: What ``adapter_config.json`` says.
            seconds: How long each step may take.
        """
        call = partial(self.client.call_workers, timeout=seconds)
        folder, *_ = call("lrlhf_write_adapter", version, settings)
        # under a new name, as one that is replaced under its old would be read at every step
        body = {"lora_name": version, "lora_path": folder}
        self.client.post("/v1/load_lora_adapter", body, timeout=seconds)
        call("lrlhf_remove_adapter", version)
        if self._adapter:
            body = {"lora_name": self._adapter}
            self.client.post("/v1/unload_lora_adapter", body, timeout=seconds)
        self._adapter = version

    def reset_caches(self, seconds: float) -> None:
        """Have the server forget keys, values and image features.

        Args:
            seconds: How long each step may take.
        """
        deadline = time.monotonic() + _RESET_SECONDS
        while not self.client.post("/reset_prefix_cache", timeout=seconds)["success"]:
            # the blocks of a response that was just answered are given back a moment later
            if time.monotonic() > deadline:
                raise EngineFailure("vLLM did not reset its prefix cache: requests still run")
            time.sleep(0.1)
        for path in ("/reset_mm_cache", "/reset_encoder_cache"):
            self.client.post(path, timeout=seconds)


def on_all(replicas: Sequence[Replica], act: Callable[[Replica], ResultT]) -> list[ResultT]:
    """Act on all replicas at once; raises what went wrong, once all are through."""

    def acted(one: Replica) -> ResultT:
        try:
            return act(one)
        except EngineFailure:
            one.failed = True
            raise

    futures = [in_background(partial(acted, one), name="vllm-replica") for one in replicas]
    wait(futures)
    return [future.result() for future in futures]


@dataclass
class _Server:
    open: int = 0
    heard: float = 0.0


class Traffic:
    """Shares the places at servers between calls, first come, first served.

    It also has one clock per server: a request may wait there for those of another call, and what
    that one hears shows that the server gets on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._servers: WeakKeyDictionary[ServerClient, _Server] = WeakKeyDictionary()
        self._waiting: dict[int, Callable[[], object]] = {}
        self._calls = 0

    def enter(self) -> int:
        """Return the number of a call that begins."""
        with self._lock:
            self._calls += 1
            return self._calls

    def may_place(self, call: int, wake: Callable[[], object]) -> bool:
        """Whether it is a call's turn to take places.

        Args:
            call: Its number.
            wake: Called, from any thread, whenever it is worthwhile to ask again, until `placed`.
        """
        with self._lock:
            self._waiting[call] = wake
            return call == min(self._waiting)

    def placed(self, call: int) -> None:
        """Hear that a call needs no place at present."""
        with self._lock:
            if self._waiting.pop(call, None) is not None:
                self._wake_first()

    def has_place(self, server: ServerClient, most: int) -> bool:
        """Whether a server with ``most`` places has one free."""
        with self._lock:
            return self._of(server).open < most

    def opened(self, server: ServerClient, count: int) -> None:
        """Hear of requests that a server is sent."""
        with self._lock:
            found = self._of(server)
            if not found.open:
                found.heard = time.monotonic()
            found.open += count

    def closed(self, server: ServerClient, *, answered: bool) -> None:
        """Hear that a request is over, and whether that tells that the server gets on."""
        with self._lock:
            found = self._of(server)
            found.open -= 1
            if answered:
                found.heard = time.monotonic()
            self._wake_first()

    def silence(self, server: ServerClient) -> float:
        """Return for how many seconds a server with open requests has answered none."""
        with self._lock:
            return time.monotonic() - self._of(server).heard

    def _of(self, server: ServerClient) -> _Server:
        return self._servers.setdefault(server, _Server())

    def _wake_first(self) -> None:
        if self._waiting:
            self._waiting[min(self._waiting)]()
