"""A vLLM server: a child process, or one that the user started."""

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
from lrlhf.rollout.vllm.vllm_base import (
    EngineStartError,
    check_installed,
    free_port,
)
from lrlhf.vllm_worker.model_access import TOKEN_VARIABLE

_LOOK_SECONDS = 1.0


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
