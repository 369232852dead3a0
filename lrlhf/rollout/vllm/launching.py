"""What a vLLM server for the policy is started with."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lrlhf.rollout.vllm.server import FoundServer, Server, StartedServer
from lrlhf.rollout.vllm.support import QUIET_ENVIRONMENT, command_line, is_cpu
from lrlhf.rollout.vllm.vllm_base import EngineStartError, VLLMBase
from lrlhf.threads import spin_not_at_all
from lrlhf.vllm_worker.access import TOKEN_VARIABLE
from lrlhf.vllm_worker.extension import LORA_UPDATES

TRANSPORTS = ("nccl", "ipc", "gloo")
_SERVER = "vllm.entrypoints.openai.api_server"
_GUARD = "lrlhf.vllm_worker.access.TokenGuard"
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
