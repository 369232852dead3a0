"""The life of one vLLM server: a process of this run's, or one that someone else started."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from lrlhf.rollout.vllm.client import ServerClient
from lrlhf.rollout.vllm.process import ServerProcess, ServerStartError, root_cause
from lrlhf.rollout.vllm.support import check_installed, free_port
from lrlhf.rollout.vllm.vllm_base import EngineStartError
from lrlhf.vllm_worker.access import TOKEN_VARIABLE

_LOOK_SECONDS = 1.0


class Server(ABC):
    """One server, as rank 0 knows it; see `VLLMServerEngine._new_server`."""

    @abstractmethod
    def start(self) -> ServerClient:
        """Start it, also after it failed, and return once it answers.

        Returns:
            What talks to it.

        Raises:
            EngineStartError: It does not answer; says what to change.
        """

    @abstractmethod
    def stop(self) -> None:
        """End it, whatever state it is in; one of someone else's is left alone."""

    @abstractmethod
    def alive(self) -> bool:
        """Whether it runs, hung or not."""


class StartedServer(Server):
    """A process on this machine that ends with this one.

    Args:
        command: Of a server that listens on a port.
        environment: Of a server that asks for a token.
        log_file: Where it writes; None: into a temporary folder.
        timeout: Seconds until it answers.
        explain: Turns what a server complained about into what to change.
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
        """Start it on a free port, with a token that no one else knows."""
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
        """End its processes; what a server that failed wrote stays."""
        if self.process is None:
            return
        if self.process.stop() and self._log_folder is not None:
            shutil.rmtree(self._log_folder, ignore_errors=True)
            self._log_folder = None
        self.process = None

    def alive(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.is_running


class FoundServer(Server):
    """A server that someone else started.

    Args:
        url: Of the server; its token is the environment's ``VLLM_API_KEY``.
        timeout: Seconds until it answers.
        command: What a user would start it with.
    """

    def __init__(self, url: str, *, timeout: float, command: Callable[[], str]) -> None:
        self._url = url
        self._timeout = timeout
        self._command = command
        self._stopped = threading.Event()

    def start(self) -> ServerClient:
        """Wait until it answers, or nobody waits for it any more."""
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
        """Leave it alone, and wait for it no more."""
        self._stopped.set()

    def alive(self) -> bool:
        """Whether it may run: from here that cannot be told."""
        return True
