"""vLLM servers: the life of one, a fleet with restarts in the background, and common steps.

A server is a child process, or one that the user started.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from lrlhf.background import in_background
from lrlhf.process_guard import end_guarded, guarded
from lrlhf.rollout.engines.synced_engine import EngineFailure
from lrlhf.rollout.vllm.client import Address, ServerClient
from lrlhf.rollout.vllm.vllm_base import EngineStartError, check_installed, free_port
from lrlhf.vllm_worker.model_access import TOKEN_VARIABLE

GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL.

``_CHILDREN_S`` of `lrlhf.run.supervision.watch` must be at least a second longer: a run that
ends at its deadline would else kill the guard before this has ended its children.
"""
_TAIL_LINES = 30
_TAIL_BYTES = 256 * 1024
_SECRET_NAME = re.compile(r"(key|token|secret|password)$", re.IGNORECASE)


class ServerStartError(RuntimeError):
    """A server exited or timed out before it was ready."""


class ServerProcess:
    """A server as a child process, which ends with this process, killed or not.

    The guard process (`lrlhf.process_guard`) ends the server and all its children.

    Args:
        command: Program and arguments of the server.
        env: The complete environment of the server. Values of variables and options whose names
            end in key, token, secret or password are hidden in `log_tail` and errors.
        log_file: File that the server's output is appended to.
    """

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], log_file: Path) -> None:
        self._command = list(command)
        self._env = dict(env)
        self._log_file = log_file
        self._log_start = 0
        self._guard: subprocess.Popen[bytes] | None = None
        self._trainer = 0

    def start(self) -> None:
        """Start the server and return at once."""
        self._trainer = os.getpid()
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        with self._log_file.open("ab") as log:
            self._log_start = log.tell()
            self._guard = subprocess.Popen(
                guarded(self._command, grace=GRACE),
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        atexit.register(self.stop)

    @property
    def is_running(self) -> bool:
        """Whether the server was started and has not exited."""
        return self._guard is not None and self._guard.poll() is None

    def wait_until(self, ready: Callable[[], bool], *, timeout: float, poll: float = 0.2) -> None:
        """Poll until the server is ready; stop it if it is not in time. Times are in seconds.

        Raises:
            ServerStartError: The server exited or timed out; with the end of the log.
        """
        guard = self._guard  # another thread may stop the server meanwhile
        assert guard is not None
        deadline = time.monotonic() + timeout
        what = f"was not ready after {timeout:g} s"
        while time.monotonic() < deadline:
            if (code := guard.poll()) is not None:
                what = f"ended with code {code} before it was ready"
                break
            if ready():
                return
            time.sleep(poll)
        self.stop()
        tail = self.log_tail(_TAIL_LINES) or "(nothing)"
        raise ServerStartError(f"the server {what}. The end of {self._log_file}:\n{tail}")

    def log_tail(self, lines: int) -> str:
        """Return the last lines of the log since the last start."""
        with self._log_file.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(min(self._log_start, size), size - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
        words = [word for argument in self._command for word in argument.split("=", 1)]
        named = [*self._env.items(), *pairwise(words)]
        # shorter values are words such as "false", not secrets
        secrets = {value for name, value in named if _SECRET_NAME.search(name) and len(value) >= 8}
        for secret in sorted(secrets, key=len, reverse=True):  # one may contain another
            text = text.replace(secret, "***")
        return "\n".join(deque(text.splitlines(), maxlen=lines))

    def stop(self) -> bool:
        """End the server and all its processes, and wait for them.

        Returns:
            Whether it was running.

        Raises:
            RuntimeError: The guard was killed, and its children do not end on SIGKILL.
        """
        # not in a forked child, such as a worker of a data loader
        if self._guard is None or os.getpid() != self._trainer:
            return False
        ran = self.is_running
        code = end_guarded(self._guard, grace=GRACE)
        self._guard = None
        atexit.unregister(self.stop)
        return ran and code == 128 + signal.SIGTERM


def root_cause(log: str) -> str | None:
    """Return the error in a server's log that caused the others, if any."""
    raised = re.findall(r"\b([A-Z]\w*(?:Error|Exception): .+)$", log, re.MULTILINE)
    # other processes refer to the one that failed
    causes = [line for line in raised if "root cause" not in line]
    return causes[-1] if causes else None


logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_END_SECONDS = 0.2
_NOTICE_SECONDS = 5.0


class Server(ABC):
    """A server on rank 0; see `VLLMServerEngine._new_server`."""

    @abstractmethod
    def start(self) -> ServerClient:
        """Start it, also after a failure, and wait until it is ready.

        Returns:
            Its client.

        Raises:
            EngineStartError: It did not become ready; the message names a remedy.
        """

    @abstractmethod
    def stop(self) -> None:
        """End it, in any state, unless the user started it."""

    @abstractmethod
    def alive(self) -> bool:
        """Whether its process runs, hung or not."""


class StartedServer(Server):
    """A child process on this machine.

    Args:
        command: Command of a server on a port.
        environment: Environment of a server with a token.
        log_file: Path of the log; None: in a temporary folder.
        timeout: Seconds until it is ready.
        explain: Converts an error of the server to one with a remedy.
    """

    def __init__(
        self,
        *,
        command: Callable[[int], list[str]],
        environment: Callable[[str], dict[str, str]],
        log_file: str | None,
        timeout: float,
        explain: Callable[[str], EngineStartError],
    ) -> None:
        self._command = command
        self._environment = environment
        self._log_file = log_file
        self._timeout = timeout
        self._explain = explain
        self._log_folder: Path | None = None
        self.process: ServerProcess | None = None

    def start(self) -> ServerClient:
        self.stop()
        check_installed()
        token, port = secrets.token_hex(32), free_port("127.0.0.1")
        if self._log_file is None and self._log_folder is None:
            self._log_folder = Path(tempfile.mkdtemp(prefix="lrlhf-vllm-log-"))
        log_file = Path(self._log_file or f"{self._log_folder}/vllm.log")
        self.process = ServerProcess(
            self._command(port), env=self._environment(token), log_file=log_file
        )
        client = ServerClient(f"http://127.0.0.1:{port}", token)
        self.process.start()
        try:
            self.process.wait_until(client.is_healthy, timeout=self._timeout)
        except ServerStartError as error:
            client.close()
            cause = root_cause(self.process.log_tail(1000))
            reason = f"{cause} (all of it is in {log_file})" if cause else str(error)
            raise self._explain(reason) from error
        return client

    def stop(self) -> None:
        if self.process is None:
            return
        if self.process.stop() and self._log_folder is not None:
            # the log of a server that failed stays
            shutil.rmtree(self._log_folder, ignore_errors=True)
            self._log_folder = None
        self.process = None

    def alive(self) -> bool:
        return self.process is not None and self.process.is_running


class ExternalServer(Server):
    """A server that the user started.

    Args:
        url: URL of the server; its token is the environment's ``VLLM_API_KEY``.
        timeout: Seconds until it is ready.
        command: The command that starts such a server.
    """

    def __init__(self, url: str, *, timeout: float, command: Callable[[], str]) -> None:
        self._url = url
        self._timeout = timeout
        self._command = command
        self._stopped = threading.Event()

    def start(self) -> ServerClient:
        self._stopped.clear()
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            raise EngineStartError(
                f"engine.url is set, but not the environment variable {TOKEN_VARIABLE}: set it to "
                "the token that the server was started with"
            )
        client = ServerClient(self._url, token)
        deadline = time.monotonic() + self._timeout
        while not client.is_healthy():
            if time.monotonic() > deadline:
                client.close()
                raise EngineStartError(
                    f"no vLLM server answered at {self._url} for {self._timeout:g} s "
                    f"(engine.start_timeout); start it with\n{self._command()}"
                )
            if self._stopped.wait(_LOOK_SECONDS):
                client.close()
                raise EngineStartError(f"the vLLM server at {self._url} is not waited for any more")
        return client

    def stop(self) -> None:
        self._stopped.set()

    def alive(self) -> bool:
        """True, as its process cannot be observed."""
        return True


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
        # not what the processor made of images: no weights are in it, and a request that arrives
        # meanwhile may rely on it
        self.client.post("/reset_encoder_cache", timeout=seconds)


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
