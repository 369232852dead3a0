"""The life of one vLLM server: a process of this run's, or one that someone else started."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lrlhf.rollout.vllm.client import ServerClient
from lrlhf.rollout.vllm.process import ServerProcess, ServerStartError, root_cause
from lrlhf.rollout.vllm.support import (
    QUIET_ENVIRONMENT,
    check_installed,
    command_line,
    free_port,
    is_cpu,
)
from lrlhf.rollout.vllm.vllm_base import EngineStartError, VLLMBase
from lrlhf.threads import spin_not_at_all
from lrlhf.vllm_worker.extension import LORA_UPDATES
from lrlhf.vllm_worker.model_access import TOKEN_VARIABLE

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


TRANSPORTS = ("nccl", "ipc", "gloo")
_SERVER = "vllm.entrypoints.openai.api_server"
_GUARD = "lrlhf.vllm_worker.model_access.TokenGuard"
_PICKLES = "VLLM_ALLOW_INSECURE_SERIALIZATION"
_TRAINERS_OWN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class StartsServers(VLLMBase):
    """The part of `VLLMServerEngine` that starts servers, or finds them."""

    urls: list[str]
    replicas: int
    tensor_parallel_size: int
    transport: str
    visible_devices: str | None
    start_timeout: float
    log_file: str | None

    def _new_server(self, number: int) -> Server:
        """Return a server that is not started yet; where servers come from elsewhere, override it.

        Args:
            number: Of the server, counted from 0.
        """
        if self.urls:
            return FoundServer(
                self.urls[number], timeout=self.start_timeout, command=self._command_for_users
            )
        log_file = self.log_file
        if log_file is not None and self.replicas > 1:
            path = Path(log_file)
            log_file = str(path.with_name(f"{path.stem}.{number}{path.suffix}"))
        return StartedServer(
            command=self.command,
            environment=partial(self._environment, number=number),
            log_file=log_file,
            timeout=self.start_timeout,
            explain=self._start_error,
        )

    def command(self, port: int, python: str = sys.executable) -> list[str]:
        """Return the command that starts a server for this policy."""
        arguments = self._launch_arguments() | {
            "host": "127.0.0.1",
            "port": port,
            "tensor_parallel_size": self.tensor_parallel_size,
            "middleware": _GUARD,
            # the routes where token ids go in and come out
            "enable_scale_out": True,
            "weight_transfer_config": {"backend": f"lrlhf_{self._server_transport()}"},
        }
        # not the console script: the CPU build has none that works
        return [python, "-m", _SERVER, *command_line(arguments)]

    def _server_transport(self) -> str:
        """What a server is started for."""
        if self.transport != "auto":
            return self.transport
        if is_cpu():
            return "gloo"
        return "ipc" if not self.urls and self.visible_devices is None else "nccl"

    def _command_for_users(self) -> str:
        command = self.command(8000, "python")
        # the folder that is written for a server of one's own is gone by then
        command[command.index("--model") + 1] = "MODEL"
        variables = f"VLLM_SERVER_DEV_MODE=1 {LORA_UPDATES}=1 {TOKEN_VARIABLE}=TOKEN"
        if self._server_transport() == "ipc":
            variables += f" {_PICKLES}=1"
        return f"{variables} {shlex.join(command)}"

    def _check_descriptions(self, described: Sequence[dict[str, Any]]) -> None:
        first, *others = described
        for other in others:
            unlike = [name for name in first if name != "model" and first[name] != other[name]]
            if unlike:
                raise EngineStartError(
                    f"the vLLM servers differ in their {unlike[0]}: {first[unlike[0]]} and "
                    f"{other[unlike[0]]}; start all of them with the same options"
                )
        self._check_description(first)

    def _check_description(self, described: dict[str, Any]) -> None:
        super()._check_description(described)
        # of a server that runs already, "auto" is what that was started for
        wanted = [f"lrlhf_{name}" for name in TRANSPORTS if self.transport in ("auto", name)]
        if described["transfer"] not in wanted:
            raise EngineStartError(
                f"the vLLM server takes weights by {described['transfer']}, and engine.transport "
                f"is {self.transport}; start it with\n{self._command_for_users()}"
            )

    def _environment(self, token: str, number: int = 0) -> dict[str, str]:
        # its own limit of 4 is meant for strangers; inside the process there is none
        environment = QUIET_ENVIRONMENT | {"VLLM_MAX_STOP_STRINGS": "1000"}
        environment |= {
            name: value for name, value in os.environ.items() if name not in _TRAINERS_OWN
        }
        if is_cpu():
            # threads that spin while they wait would take the trainer's cores
            spin_not_at_all(environment)
        devices = self._devices(number)
        if devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = devices
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        if self._server_transport() == "ipc":
            # vLLM pickles the handles of shared memory; only the holder of the token is heard
            environment[_PICKLES] = "1"
        return environment | {"VLLM_SERVER_DEV_MODE": "1", LORA_UPDATES: "1", TOKEN_VARIABLE: token}

    def _devices(self, number: int) -> str | None:
        """Tell a server's GPUs, as in CUDA_VISIBLE_DEVICES; None: this process's."""
        if self.replicas == 1 or is_cpu():
            return self.visible_devices
        size, own = self.tensor_parallel_size, self.visible_devices
        own = own or os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = own.split(",") if own else list(map(str, range(torch.cuda.device_count())))
        if len(devices) < self.replicas * size:
            raise EngineStartError(
                f"engine.replicas is {self.replicas} and engine.tensor_parallel_size {size}, which "
                f"takes {self.replicas * size} GPUs, and there are {len(devices)}: lower one of "
                "them, or name more in engine.visible_devices"
            )
        return ",".join(devices[number * size : (number + 1) * size])
