"""vLLM in a process of its own, started here or by the user."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from torch import distributed

from lrlhf.background import in_background
from lrlhf.rollout.engines.engine import Capabilities
from lrlhf.rollout.engines.synced_engine import EngineFailure, Request
from lrlhf.rollout.responses import Response
from lrlhf.rollout.sampling import Sampling
from lrlhf.rollout.vllm.client import ServerClient
from lrlhf.rollout.vllm.leading import check_gpus, leads, led
from lrlhf.rollout.vllm.server import FoundServer, Server, StartedServer
from lrlhf.rollout.vllm.support import (
    QUIET_ENVIRONMENT,
    command_line,
    import_transfer,
    is_cpu,
    sampling_arguments,
)
from lrlhf.rollout.vllm.vllm_base import EngineStartError, VLLMBase, check_transport
from lrlhf.threads import spin_not_at_all
from lrlhf.vllm_worker.access import TOKEN_VARIABLE
from lrlhf.vllm_worker.extension import LORA_UPDATES
from lrlhf.vllm_worker.fingerprint import Fingerprinted

_RESET_SECONDS = 10.0
_SENDS = ("nccl", "ipc", "gloo")
_SERVER = "vllm.entrypoints.openai.api_server"
_GUARD = "lrlhf.vllm_worker.access.TokenGuard"
_PICKLES = "VLLM_ALLOW_INSECURE_SERIALIZATION"
_SHARE_BESIDE_TRAINER = 0.3
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


class VLLMServerEngine(VLLMBase):
    """A vLLM server, shared by all ranks: on GPUs of its own, on the trainer's, or on a CPU.

    Without ``url`` the server is started on the first push and ends with the run, however that
    ends. It listens on this machine only and asks for a token that no one else knows. Weights go
    to it through vLLM's own weight transfer, see ``transport``.

    Args:
        url: A server that runs already; its token is the environment's ``VLLM_API_KEY``. None:
            start one. ``docs/rollouts.md`` has the command.
        sync_host: Address of this machine that the server's workers can reach.
        tensor_parallel_size: GPUs that the model is split over.
        transport: How weights get there: ``nccl`` from GPU to GPU, ``ipc`` where both are on the
            same GPUs, ``gloo`` through main memory. "auto": what a server that runs already was
            started for; else gloo on a CPU, ipc without ``visible_devices``, and nccl with them.
        visible_devices: GPUs of the server, as in CUDA_VISIBLE_DEVICES; None: the trainer's.
        start_timeout: Seconds until a started server, or one that went away, answers.
        stall_timeout: Seconds without a finished response after which the server counts as hung.
        sync_timeout: Seconds that each step of a push may take.
        log_file: Where a started server writes; None: into a temporary folder.
        engine: The other arguments of `VLLMBase`.
    """

    default_gpu_memory_utilization = 0.9

    def __init__(  # noqa: PLR0913  each is an option of the config
        self,
        *,
        url: str | None = None,
        sync_host: str = "127.0.0.1",
        tensor_parallel_size: int = 1,
        transport: Literal["auto", "nccl", "ipc", "gloo"] = "auto",
        visible_devices: str | None = None,
        start_timeout: float = 900.0,
        stall_timeout: float = 600.0,
        sync_timeout: float = 300.0,
        log_file: str | None = None,
        **engine: Any,
    ) -> None:
        super().__init__(**engine)
        check_transport(type(self).__name__, transport, ("auto", *_SENDS))
        for name, value in (
            ("tensor_parallel_size", tensor_parallel_size),
            ("start_timeout", start_timeout),
            ("stall_timeout", stall_timeout),
            ("sync_timeout", sync_timeout),
        ):
            if not value > 0:
                raise ValueError(f"engine.{name} is {value}; it must be above 0")
        if int(self.options.get("data_parallel_size") or 1) > 1:
            raise ValueError(
                "engine.options.data_parallel_size is above 1, and weights reach one replica only: "
                "drop it, or split the model with engine.tensor_parallel_size"
            )
        self.url = url
        self.sync_host = sync_host
        self.tensor_parallel_size = tensor_parallel_size
        self.transport = transport
        self.visible_devices = visible_devices
        self.start_timeout = start_timeout
        self.stall_timeout = stall_timeout
        self.sync_timeout = sync_timeout
        self.log_file = log_file
        if engine.get("gpu_memory_utilization") is None and self._server_transport() == "ipc":
            self.gpu_memory_utilization = _SHARE_BESIDE_TRAINER
        self._server: Server | None = None
        self._client: ServerClient | None = None
        self._last_push = ""
        self._transfer: Any = None

    @property
    def capabilities(self) -> Capabilities:
        """A process of its own; with images or videos its server would tokenise the text again."""
        return Capabilities(holds_copy=True, concurrent=True, tells_kept_mass=False, media=False)

    # ------------------------------------------------------------------ life of the server

    def _start(self) -> None:
        self._last_push = ""
        # which takes seconds, as long as a server starts anyway
        loading = None if self.url else in_background(import_transfer, name="vllm-import")
        url, token = led(self._start_server)
        if not leads():
            self._client = ServerClient(url, token)
        self._check_description(led(self._describe))
        transport = str(self._described["transfer"]).removeprefix("lrlhf_")
        await_trainer = partial(self._connected.call_workers, "lrlhf_await_trainer", timeout=60.0)
        check_gpus(transport, led(await_trainer))

        def connect() -> None:
            transfer = loading.result() if loading else import_transfer()
            self._transfer = transfer.WeightTransfer(
                transport,
                self._connected,
                self._weights,
                self.dtype,
                host=self.sync_host,
                workers=int(self._described["workers"]),
                timeout=self.sync_timeout,
                adapter=self._adapter_apart,
            )

        led(connect)
        if not leads():
            connect()

    def _stop(self) -> None:
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._server is not None:
            self._server.stop()
        self._remove_folder()

    def _new_server(self, number: int) -> Server:
        """Return a server that is not started yet; where servers come from elsewhere, override it.

        Args:
            number: Of the server, counted from 0.
        """
        if self.url is not None:
            return FoundServer(
                self.url, timeout=self.start_timeout, command=self._command_for_users
            )
        return StartedServer(
            command=self.command,
            environment=self._environment,
            log_file=self.log_file,
            timeout=self.start_timeout,
            explain=self._start_error,
        )

    def _start_server(self) -> tuple[str, str]:
        self._server = self._server or self._new_server(0)
        self._client = self._server.start()
        return self._client.url, self._client.token

    def _check_description(self, described: dict[str, Any]) -> None:
        super()._check_description(described)
        # of a server that runs already, "auto" is what that was started for
        wanted = [f"lrlhf_{name}" for name in _SENDS if self.transport in ("auto", name)]
        if described["transfer"] not in wanted:
            raise EngineStartError(
                f"the vLLM server takes weights by {described['transfer']}, and engine.transport "
                f"is {self.transport}; start it with\n{self._command_for_users()}"
            )

    def _describe(self) -> dict[str, Any]:
        try:
            described = self._connected.call_workers("lrlhf_describe", timeout=60.0)
        except EngineFailure as error:
            raise EngineStartError(
                f"the vLLM server cannot take weights ({error}); start it with\n"
                f"{self._command_for_users()}"
            ) from error
        return dict(described[0])

    def command(self, port: int, python: str = sys.executable) -> list[str]:
        """Return the command that starts a server for this policy."""
        arguments = self._launch_arguments() | {
            "host": "127.0.0.1",
            "port": port,
            "tensor_parallel_size": self.tensor_parallel_size,
            "middleware": _GUARD,
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
        return "ipc" if self.url is None and self.visible_devices is None else "nccl"

    def _command_for_users(self) -> str:
        command = self.command(8000, "python")
        # the folder that is written for a server of one's own is gone by then
        command[command.index("--model") + 1] = "MODEL"
        variables = f"VLLM_SERVER_DEV_MODE=1 {LORA_UPDATES}=1 {TOKEN_VARIABLE}=TOKEN"
        if self._server_transport() == "ipc":
            variables += f" {_PICKLES}=1"
        return f"{variables} {shlex.join(command)}"

    def _environment(self, token: str) -> dict[str, str]:
        # its own limit of 4 is meant for strangers; inside the process there is none
        environment = QUIET_ENVIRONMENT | {"VLLM_MAX_STOP_STRINGS": "1000"}
        environment |= {
            name: value for name, value in os.environ.items() if name not in _TRAINERS_OWN
        }
        if is_cpu():
            # threads that spin while they wait would take the trainer's cores
            spin_not_at_all(environment)
        if self.visible_devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.visible_devices
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        if self._server_transport() == "ipc":
            # vLLM pickles the handles of shared memory; only the holder of the token is heard
            environment[_PICKLES] = "1"
        return environment | {"VLLM_SERVER_DEV_MODE": "1", LORA_UPDATES: "1", TOKEN_VARIABLE: token}

    # ------------------------------------------------------------------ weights and responses

    def _send(self, tensors: Fingerprinted) -> list[dict[str, str]]:
        error: Exception | None = None
        if not leads():
            try:
                self._transfer.push(tensors, whole=not self._has_base)
            except Exception as raised:  # noqa: BLE001  raised again once rank 0 is through
                error = raised
                # which rank 0 puts together meanwhile, whatever became of this rank
                self._bring_parts(tensors)

        def push() -> tuple[str, list[dict[str, str]]]:
            try:
                version: str = self._transfer.push(tensors, whole=not self._has_base)
            finally:
                # before the other ranks hear how it went: until then they bring their parts
                self._bring_parts(tensors)
            client = self._connected
            arrived = client.call_workers("lrlhf_arrived", timeout=self.sync_timeout)
            if self._adapter_apart is not None:
                self._load_adapter(version, self._adapter_apart.settings)
            self._reset_server_caches()
            client.post("/resume", timeout=self.sync_timeout)
            return version, arrived

        self._last_push, arrived = led(push)
        if error is not None:
            raise error
        return arrived

    def _load_adapter(self, version: str, settings: str) -> None:
        """Have the server compute with what was sent, for requests that name this version."""
        client, seconds = self._connected, self.sync_timeout
        folder, *_ = client.call_workers("lrlhf_write_adapter", version, settings, timeout=seconds)
        # under a new name, as one that is replaced under its old would be read at every step
        body = {"lora_name": version, "lora_path": folder}
        client.post("/v1/load_lora_adapter", body, timeout=seconds)
        client.call_workers("lrlhf_remove_adapter", version, timeout=seconds)
        if self._last_push:
            body = {"lora_name": self._last_push}
            client.post("/v1/unload_lora_adapter", body, timeout=seconds)

    def _reset_caches(self) -> None:
        led(self._reset_server_caches)

    def _reset_server_caches(self) -> None:
        deadline = time.monotonic() + _RESET_SECONDS
        while not self._connected.post("/reset_prefix_cache", timeout=self.sync_timeout)["success"]:
            # the blocks of a response that was just answered are given back a moment later
            if time.monotonic() > deadline:
                raise EngineFailure("vLLM did not reset its prefix cache: requests still run")
            time.sleep(0.1)
        for path in ("/reset_mm_cache", "/reset_encoder_cache"):
            self._connected.post(path, timeout=self.sync_timeout)

    def _respond(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        shared = sampling_arguments(sampling, self._weights.model, self._tokenizer)
        shared |= {"return_token_ids": True, "model": self._described["model"]}
        if self._adapter_apart is not None:
            shared["model"] = self._last_push
        bodies = [
            {
                **shared,
                "prompt": request.prompt_ids,
                "seed": request.seed,
                "max_tokens": request.max_tokens,
                "min_tokens": min(sampling.min_new_tokens, request.max_tokens),
            }
            for request in requests
        ]
        self._check_last_push()
        responses = self._connected.complete(
            bodies, stall=self.stall_timeout, concurrency=self.max_num_seqs
        )
        self._check_last_push()
        return responses

    def _check_last_push(self) -> None:
        """Make sure that the server was not started anew, or given weights by someone else."""
        if not leads():
            return
        found = self._connected.get("/weight_info", timeout=self.sync_timeout)["weight_version"]
        if found != self._last_push:
            raise EngineFailure("the vLLM server has other weights than it was given here")

    @property
    def _connected(self) -> ServerClient:
        assert self._client is not None
        return self._client

    # ------------------------------------------------------------------ ranks

    @property
    def _acts_with_ranks(self) -> bool:
        """All of them share the server."""
        return distributed.is_initialized()
