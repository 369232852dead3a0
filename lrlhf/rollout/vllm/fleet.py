"""Servers that are kept running: one that fails is started again beside the others."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

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
