"""The servers of an engine: restarts in the background, and common steps of a push."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

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
