"""Rollouts with vLLM servers, started here or by the user."""

from __future__ import annotations

import os
import resource
import secrets
import shlex
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import torch
from torch import distributed

from lrlhf.background import in_background
from lrlhf.models import placeholder_ids
from lrlhf.rollout.engines.engine import Capabilities, gather_ranks
from lrlhf.rollout.engines.synced_engine import EngineFailure, Request
from lrlhf.rollout.responses import Response
from lrlhf.rollout.sampling import Sampling
from lrlhf.rollout.vllm.client import Address, ServerClient, ServerResponseError
from lrlhf.rollout.vllm.dispatch import Router, Targets, TokenRequest, Traffic, respond
from lrlhf.rollout.vllm.servers import (
    ExternalServer,
    Fleet,
    Server,
    StartedServer,
    SyncedServer,
    on_all,
)
from lrlhf.rollout.vllm.vllm_base import (
    QUIET_ENVIRONMENT,
    EngineStartError,
    VLLMBase,
    check_positive,
    check_transport,
    command_line,
    content_parts,
    import_transfer,
    is_cpu,
    response_arguments,
    sampling_arguments,
)
from lrlhf.threads import spin_not_at_all
from lrlhf.vllm_worker.extension import LORA_UPDATES
from lrlhf.vllm_worker.fingerprint import Fingerprinted
from lrlhf.vllm_worker.model_access import TOKEN_VARIABLE

ResultT = TypeVar("ResultT")


def is_main_rank() -> bool:
    """Whether this process is rank 0, which controls the servers."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


def on_main_rank(act: Callable[[], ResultT]) -> ResultT:
    """Run on rank 0 only, and broadcast the result, or the error, to every rank."""
    outcome: list[Any] = [None, None]
    error: Exception | None = None
    if is_main_rank():
        try:
            outcome[0] = act()
        except Exception as raised:  # noqa: BLE001  raised after the broadcast
            error = raised
            # not itself, as it may not be picklable
            fails = isinstance(error, EngineFailure)
            outcome[1] = (EngineFailure if fails else EngineStartError)(str(error))
    if distributed.is_initialized():
        distributed.broadcast_object_list(outcome, src=0)
    value, other = outcome
    if other is not None:
        raise error or other
    result: ResultT = value
    return result


def check_gpus(transport: str, listed: list[str | None]) -> None:
    """Check a transport against the GPUs of workers and ranks; all ranks call it.

    Args:
        transport: ``gloo``, ``nccl`` or ``ipc``.
        listed: GPU of each worker of the servers; None: none.

    Raises:
        EngineStartError: The transport cannot connect them.
    """
    own: str | None = None
    if torch.cuda.is_available():
        own = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    ranks = gather_ranks(own)
    if transport == "ipc" and not set(listed) <= set(ranks):
        raise EngineStartError(
            "engine.transport is ipc, and the server computes on a GPU that no rank of the trainer "
            "has: set engine.visible_devices to GPUs of the server's own, for nccl, or "
            "CUDA_VISIBLE_DEVICES of the run to the trainer's"
        )
    if transport == "nccl" and ranks[0] in listed:
        raise EngineStartError(
            "engine.transport is nccl, which cannot connect a GPU with itself, and the server "
            "computes on that of rank 0: set engine.visible_devices to other GPUs, or "
            "engine.transport: ipc"
        )


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
_SHARE_NEXT_TO_TRAINER = 0.3
_VERSIONS = 1000
"""Most pushes between start and end of a response."""


class VLLMServerEngine(VLLMBase):
    """vLLM servers, shared by all ranks: on GPUs of their own, on the trainer's, or on a CPU.

    Without ``url`` they are started on the first push and end with the run, however that ends. They
    listen on this machine only and require a random token. Weights go to all of them at once
    through vLLM's own weight transfer, see ``transport``; requests are routed by cached prefixes
    and load. A server that fails is restarted while the others go on.

    Args:
        url: URL of a running server, or several; their token is the environment's
            ``VLLM_API_KEY``. None: start them. ``docs/rollouts.md`` has the command.
        replicas: Number of servers to start, each with a complete model.
        sync_host: Address of this machine for the server's workers.
        tensor_parallel_size: GPUs of each server, which the model is split over.
        transport: Transport of weights: ``nccl`` from GPU to GPU, ``ipc`` where both are on the
            same GPUs, ``gloo`` through main memory. "auto": that of a running server; else gloo on
            a CPU, ipc without ``visible_devices``, and nccl with them.
        visible_devices: GPUs of all servers, as in CUDA_VISIBLE_DEVICES; None: the trainer's.
        start_timeout: Seconds until a server is ready.
        stall_timeout: Seconds without a finished response after which a server counts as hung.
        sync_timeout: Seconds for each step of a push.
        delta: Whether pushes send only the words that changed since the last, for slow networks. It
            takes main memory for a copy of the weights on rank 0 and in each worker of the servers.
        log_file: Log of a started server, of several ``name.0.log`` and so on; None: in a temporary
            folder.
        engine: The other arguments of `VLLMBase`.
    """

    default_gpu_memory_utilization = 0.9

    def __init__(  # noqa: PLR0913  each is an option of the config
        self,
        *,
        url: str | list[str] | None = None,
        replicas: int = 1,
        sync_host: str = "127.0.0.1",
        tensor_parallel_size: int = 1,
        transport: Literal["auto", "nccl", "ipc", "gloo"] = "auto",
        visible_devices: str | None = None,
        start_timeout: float = 900.0,
        stall_timeout: float = 600.0,
        sync_timeout: float = 300.0,
        delta: bool = False,
        log_file: str | None = None,
        **engine: Any,
    ) -> None:
        super().__init__(**engine)
        check_transport(transport)
        self.urls = [url] if isinstance(url, str) else list(url or ())
        if self.urls and replicas not in (1, len(self.urls)):
            raise ValueError(
                f"engine.replicas is {replicas}, and engine.url names {len(self.urls)} servers: "
                "drop engine.replicas, or name as many"
            )
        check_positive(
            replicas=replicas,
            tensor_parallel_size=tensor_parallel_size,
            start_timeout=start_timeout,
            stall_timeout=stall_timeout,
            sync_timeout=sync_timeout,
        )
        if int(self.options.get("data_parallel_size") or 1) > 1:
            raise ValueError(
                "engine.options.data_parallel_size is above 1: a call to a server reaches all its "
                "own replicas, but only the first one's answer comes back, so what weights the "
                "others have could not be checked. Drop it, and set engine.replicas instead"
            )
        self.replicas = len(self.urls) or replicas
        self.sync_host = sync_host
        self.tensor_parallel_size = tensor_parallel_size
        self.transport = transport
        self.visible_devices = visible_devices
        self.start_timeout = start_timeout
        self.stall_timeout = stall_timeout
        self.sync_timeout = sync_timeout
        self.delta = delta
        self._check_delta(self._server_transport())
        self.log_file = log_file
        if engine.get("gpu_memory_utilization") is None and self._server_transport() == "ipc":
            self.gpu_memory_utilization = _SHARE_NEXT_TO_TRAINER
        self._fleet: Fleet | None = None
        """On rank 0."""
        self._replicas: list[SyncedServer] = []
        """Servers of pushes."""
        self._targets: Targets | None = None
        """Servers with the weights of the last push, for requests from any thread."""
        self._failed: dict[Address, str] = {}
        """Reasons of those of them that failed on this rank since then."""
        self._counted_restarts = 0
        self._pushed_version = 0
        self._name = ""
        self._version_names: dict[str, int] = {}
        """Training iterations behind the weights of each push, by version at the servers."""
        self._transfer: Any = None
        self._confirmed = False
        """Whether the servers are known to have what the last push sent."""
        self._pushed_bytes: tuple[int, int] | None = None

    @property
    def pushed_bytes(self) -> tuple[int, int] | None:
        return self._pushed_bytes

    @property
    def capabilities(self) -> Capabilities:
        """Concurrent, with updates in flight unless vLLM adds an adapter."""
        return replace(
            super().capabilities,
            concurrent=True,
            # an adapter is loaded under a new name, and open requests have the old one
            updates_in_flight=self._adapter is None,
            structured=True,
        )

    # ------------------------------------------------------------------ start of servers

    def _new_server(self, number: int) -> Server:
        """Return server ``number``, counted from 0, not started; override it for other servers."""
        if self.urls:
            return ExternalServer(
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
            # routes with token ids as input and output
            "enable_scale_out": True,
            "weight_transfer_config": {"backend": f"lrlhf_{self._server_transport()}"},
        }
        # the console script of the CPU build does not work
        return [python, "-m", _SERVER, *command_line(arguments)]

    def _server_transport(self) -> str:
        """Transport of weights that a server is started with."""
        if self.transport != "auto":
            return self.transport
        if is_cpu():
            return "gloo"
        return "ipc" if not self.urls and self.visible_devices is None else "nccl"

    def _command_for_users(self) -> str:
        command = self.command(8000, "python")
        # the temporary folder of the model will be gone
        command[command.index("--model") + 1] = "MODEL"
        variables = f"VLLM_SERVER_DEV_MODE=1 {LORA_UPDATES}=1 {TOKEN_VARIABLE}=TOKEN"
        if self._server_transport() == "ipc":
            variables += f" {_PICKLES}=1"
        return f"{variables} {shlex.join(command)}"

    def _check_descriptions(self, described: Sequence[dict[str, Any]]) -> None:
        first, *others = described
        for other in others:
            for name in first:
                if name != "model" and first[name] != other[name]:
                    raise EngineStartError(
                        f"the vLLM servers differ in their {name}: {first[name]} and "
                        f"{other[name]}; start all of them with the same options"
                    )
        self._check_description(first)

    def _check_description(self, described: dict[str, Any]) -> None:
        super()._check_description(described)
        # "auto" accepts the transport of a server that runs already
        accepted = [f"lrlhf_{name}" for name in TRANSPORTS if self.transport in ("auto", name)]
        if described["transfer"] not in accepted:
            raise EngineStartError(
                f"the vLLM server takes weights by {described['transfer']}, and engine.transport "
                f"is {self.transport}; start it with\n{self._command_for_users()}"
            )
        self._check_delta(described["transfer"].removeprefix("lrlhf_"))

    def _check_delta(self, transport: str) -> None:
        """Raise ``ValueError`` for a combination in which changes alone cannot be sent."""
        if self.delta and (transport == "ipc" or self.lora == "adapter"):
            raise ValueError(
                f"engine.delta is on, engine.transport {transport} and engine.lora {self.lora}: "
                "ipc sends nothing, as it shares memory, and adapters are sent alone already. Drop "
                "engine.delta, or set engine.lora: merged and engine.transport: gloo, or nccl with "
                "engine.visible_devices"
            )

    def _environment(self, token: str, number: int = 0) -> dict[str, str]:
        # vLLM's own limit of 4 is for public servers
        environment = QUIET_ENVIRONMENT | {"VLLM_MAX_STOP_STRINGS": "1000"}
        environment |= {
            name: value for name, value in os.environ.items() if name not in _TRAINERS_OWN
        }
        if is_cpu():
            # spinning threads would take the trainer's cores
            spin_not_at_all(environment)
        devices = self._devices(number)
        if devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = devices
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        if self._server_transport() == "ipc":
            # vLLM pickles the handles of shared memory; requests need the token
            environment[_PICKLES] = "1"
        return environment | {"VLLM_SERVER_DEV_MODE": "1", LORA_UPDATES: "1", TOKEN_VARIABLE: token}

    def _devices(self, number: int) -> str | None:
        """Return a server's GPUs, as in CUDA_VISIBLE_DEVICES; None: this process's."""
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

    # ------------------------------------------------------------------ members of pushes

    def _start(self) -> None:
        # takes seconds, in which the servers start
        loading = None if self.urls else in_background(import_transfer, name="vllm-import")
        self._model_folder()  # here, before several threads use it
        _allow_connections()  # one for each open response
        # new objects, as open calls record failures in those they started with
        self._failed, self._traffic, self._counted_restarts = {}, Traffic(), 0
        self._name = on_main_rank(lambda: secrets.token_hex(12))
        if is_main_rank():
            servers = [self._new_server(number) for number in range(self.replicas)]
            self._fleet = Fleet(servers, max_restarts=self.max_restarts)
        on_main_rank(lambda: self._main_fleet.start())
        self._transfer_module = loading.result() if loading else import_transfer()
        self._update_members()

    def _start_together(self) -> None:
        ran = self._running
        super()._start_together()
        if not ran:
            return
        try:
            self._update_members()
        except Exception as error:
            self._worst_of_ranks(1 if isinstance(error, EngineFailure) else 2)
            raise
        if self._worst_of_ranks(0) > 0:
            raise EngineFailure("another rank did not connect to the servers")

    def _update_members(self) -> None:
        """Agree on the servers of the next push, and connect to them if they changed."""
        own = dict(self._failed)
        failed = {key: reason for each in gather_ranks(own) for key, reason in each.items()}

        def running() -> tuple[dict[int, Address], int]:
            for address, reason in failed.items():
                self._main_fleet.fail(address, reason)
            clients = sorted(self._main_fleet.running().items())
            return {number: each.address for number, each in clients}, self._main_fleet.restarts

        addresses, restarts = on_main_rank(running)
        for address in own:
            del self._failed[address]
        self.restarts += restarts - self._counted_restarts
        self._counted_restarts = restarts
        # a server at the address of a failed one is new
        known = {
            each.client.address: each
            for each in self._replicas
            if each.client.address not in failed
        }
        if self._transfer is None or {*addresses.values()} != known.keys():
            self._disconnect()
            self._join(addresses, known)

    def _join(
        self, addresses: Mapping[int, Address], known: Mapping[Address, SyncedServer]
    ) -> None:
        """Connect to servers, with the state of known ones."""
        before = self._replicas
        self._replicas = [
            known.get(address) or SyncedServer(number, ServerClient(*address))
            for number, address in addresses.items()
        ]
        for each in before:
            if each not in self._replicas:
                each.client.close()
        for replica, described in zip(self._replicas, on_main_rank(self._describe), strict=True):
            replica.described = described
        self._check_descriptions([replica.described for replica in self._replicas])
        self._router = Router(
            addresses, first=distributed.get_rank() if self._acts_with_ranks else 0
        )
        transport = str(self._described["transfer"]).removeprefix("lrlhf_")
        check_gpus(transport, on_main_rank(self._await_trainer))
        on_main_rank(partial(self._connect, transport))
        if not is_main_rank():
            self._connect(transport)

    def _connect(self, transport: str) -> None:
        members = [
            self._transfer_module.Member(replica.client, int(replica.described["workers"]))
            for replica in self._replicas
        ]
        self._transfer = self._transfer_module.WeightTransfer(
            transport,
            members,
            self._weights,
            self.dtype,
            host=self.sync_host,
            timeout=self.sync_timeout,
            adapter=self._adapter_apart,
            delta=self.delta and self._adapter_apart is None,
        )

    def _disconnect(self) -> None:
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None

    def _stop(self) -> None:
        self._targets = None
        self._disconnect()
        for replica in self._replicas:
            replica.client.close()
        self._replicas = []
        if self._fleet is not None:
            self._fleet.stop()
            self._fleet = None
        self._remove_folder()

    def _describe(self) -> list[dict[str, Any]]:
        def describe(replica: SyncedServer) -> dict[str, Any]:
            try:
                return dict(replica.client.call_workers("lrlhf_describe", timeout=60.0)[0])
            except (
                ServerResponseError
            ) as error:  # not without an answer, which a new server may give
                if error.busy or not replica.client.is_healthy():
                    raise
                raise EngineStartError(
                    f"the vLLM server cannot take weights ({error}); start it with\n"
                    f"{self._command_for_users()}"
                ) from error

        return on_all(self._replicas, describe)

    def _await_trainer(self) -> list[str | None]:
        """Prepare all workers for this trainer, and return their GPUs."""
        method = "lrlhf_await_trainer"
        call = on_all(self._replicas, lambda each: each.client.call_workers(method, timeout=60.0))
        return list(chain(*call))

    # ------------------------------------------------------------------ weights and responses

    def _push_once(self, version: int) -> None:
        """Push; if servers fail meanwhile, push again to the others."""
        self._pushed_version = version
        self._confirmed = self._version is not None
        while True:
            error: Exception | None = None
            try:
                super()._push_once(version)
            except Exception as raised:  # noqa: BLE001  raised below unless others can go on
                error = raised
            fails = isinstance(error, EngineFailure) and self._running
            worst = self._worst_of_ranks(0 if error is None else 1 if fails else 2)
            if worst == 0:
                break
            if worst == 2 or not on_main_rank(self._drop_broken):
                raise error or EngineFailure("the push failed on another rank")
            self._disconnect()
        while len(self._version_names) > _VERSIONS:  # in place, as open calls use it
            del self._version_names[next(iter(self._version_names))]
        if is_main_rank():
            self._main_fleet.succeeded()

    def _send(self, tensors: Fingerprinted) -> list[dict[str, str]]:
        version, options = f"{self._name}{tensors.turn:08x}", {"in_flight": self._in_flight}
        options |= {"full": not self._has_base, "afresh": not self._confirmed}
        # before the push, as responses may come from these weights before it returns
        self._version_names[version] = self._pushed_version
        error: Exception | None = None
        if not is_main_rank():
            try:
                self._pushed_bytes = self._transfer.push(tensors, version, **options)
            except Exception as raised:  # noqa: BLE001  raised after rank 0 has finished
                error = raised
                # rank 0 still gathers the weights
                self._exhaust(tensors)

        def push() -> list[dict[str, str]]:
            try:
                self._pushed_bytes = self._transfer.push(tensors, version, **options)
            finally:
                # before the broadcast of the result: until then other ranks gather, too
                self._exhaust(tensors)
            return list(chain(*on_all(self._replicas, partial(self._finish, version=version))))

        arrived = on_main_rank(push)
        if error is not None:
            raise error
        self._router.forget()
        self._set_targets(version)
        return arrived

    def _set_targets(self, version: str) -> None:
        """Direct further requests to the servers with this version."""
        clients = {each.number: each.client for each in self._replicas}
        apart = self._adapter_apart is not None
        models = {
            each.number: version if apart else each.described["model"] for each in self._replicas
        }
        fleet, failed = self._fleet, self._failed

        def note(number: int, failure: EngineFailure) -> None:
            """Record the failure of a server; rank 0 restarts it at once."""
            address = clients[number].address
            failed[address] = str(failure)
            if fleet is not None:
                fleet.fail(address, str(failure))

        known = {version: self._pushed_version}
        self._targets = Targets(clients, models, self._router, note, known, failed, self._traffic)

    def _drop_broken(self) -> list[int]:
        """Remove servers that broke a step, on rank 0."""
        culprits = self._transfer.failed if self._transfer is not None else ()
        failed = [each.number for each in self._replicas if each.failed or each.client in culprits]
        return self._main_fleet.drop_broken([each.number for each in self._replicas], failed)

    def _finish(self, replica: SyncedServer, version: str) -> list[dict[str, str]]:
        """Resume a server with new weights, and return the fingerprints of what it received."""
        client, seconds = replica.client, self.sync_timeout
        arrived = client.call_workers("lrlhf_arrived", timeout=seconds)
        if self._adapter_apart is not None:
            replica.load_adapter(version, self._adapter_apart.settings, seconds)
        replica.reset_caches(seconds)
        client.post("/resume", timeout=seconds)
        return arrived

    def _reset_caches(self) -> None:
        def reset() -> None:
            try:
                on_all(self._replicas, lambda each: each.reset_caches(self.sync_timeout))
            except EngineFailure as failure:
                broken = self._drop_broken()
                if not broken:
                    raise
                lost = [each.client.address for each in self._replicas if each.number in broken]
                self._failed |= dict.fromkeys(lost, str(failure))

        on_main_rank(reset)
        self._router.forget()

    def _respond(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        shared = sampling_arguments(sampling, self._weights.model, self._tokenizer)
        if (targets := self._targets) is None:
            raise EngineFailure("no vLLM server has the policy's weights")
        if self._in_flight:
            targets = replace(targets, versions=self._version_names)
        return respond(
            self._token_requests(requests, shared),
            targets,
            concurrency=self.max_num_seqs,
            stall=self.stall_timeout,
        )

    def _token_requests(
        self, requests: Sequence[Request], shared: dict[str, Any]
    ) -> list[TokenRequest]:
        """Return what servers are sent; images that prompts share are encoded once."""
        placeholders = placeholder_ids(self._weights.model.config)
        encoded: dict[tuple[int, ...], list[dict[str, str]]] = {}
        token_requests = []
        for request in requests:
            route, parts = tuple[Hashable, ...](request.short_ids), list[dict[str, str]]()
            if (media := request.media) is not None:
                key = tuple(map(id, (*media.images, *media.audios)))
                if key not in encoded:
                    encoded[key] = content_parts(media)
                parts = encoded[key]
                urls = {
                    token: iter([each["url"] for each in parts if each["type"] == f"{kind}_url"])
                    for kind, token in placeholders.items()
                }
                route = tuple(next(urls.get(token, iter(())), token) for token in request.short_ids)
            parameters = response_arguments(request, shared)
            if media is not None and self._in_flight:
                # workers are not sent images whose keys and values are cached, and vLLM 0.32 fails
                # when an update has these computed again
                parameters["skip_reading_prefix_cache"] = True
            token_requests.append(
                TokenRequest(request.prompt_ids, parameters, request.short_ids, route, parts)
            )
        return token_requests

    @property
    def _main_fleet(self) -> Fleet:
        assert self._fleet is not None
        return self._fleet

    @property
    def _acts_with_ranks(self) -> bool:
        """All ranks share the servers."""
        return distributed.is_initialized()


_MOST_FILES: Final = 65_536


def _allow_connections() -> None:
    """Allow this process as many open files as possible, for hundreds of connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
