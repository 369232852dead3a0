"""vLLM in a process of its own, started here or by the user."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeVar

import torch
from torch import distributed

from lrlhf.background import in_background
from lrlhf.open_files import allow_connections
from lrlhf.rollout.engines.engine import Capabilities
from lrlhf.rollout.engines.synced_engine import EngineFailure, Request
from lrlhf.rollout.responses import Response
from lrlhf.rollout.sampling import Sampling
from lrlhf.rollout.vllm.client import Address, FailureAnswer, ServerClient
from lrlhf.rollout.vllm.dispatch import Targets, respond
from lrlhf.rollout.vllm.fleet import Fleet, Replica, Router, Traffic, on_all
from lrlhf.rollout.vllm.server import TRANSPORTS, StartsServers
from lrlhf.rollout.vllm.support import import_transfer, sampling_arguments, token_requests
from lrlhf.rollout.vllm.vllm_base import EngineStartError, check_transport
from lrlhf.vllm_worker.fingerprint import Fingerprinted

ResultT = TypeVar("ResultT")


def leads() -> bool:
    """Whether this process starts, feeds and ends the server."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


def led(act: Callable[[], ResultT]) -> ResultT:
    """Act on rank 0 only; what comes of it, also an error, comes to every rank."""
    outcome: list[Any] = [None, None]
    error: Exception | None = None
    if leads():
        try:
            outcome[0] = act()
        except Exception as raised:  # noqa: BLE001  raised again once every rank knows of it
            error = raised
            # not itself: what it holds may not survive the way to another process
            fails = isinstance(error, EngineFailure)
            outcome[1] = (EngineFailure if fails else EngineStartError)(str(error))
    if distributed.is_initialized():
        distributed.broadcast_object_list(outcome, src=0)
    value, told = outcome
    if told is not None:
        raise error or told
    result: ResultT = value
    return result


def check_gpus(transport: str, taken: list[str | None]) -> None:
    """Refuse a transport that the GPUs of workers and ranks cannot take; all ranks call it.

    Args:
        transport: ``gloo``, ``nccl`` or ``ipc``.
        taken: Which GPU each worker of the server has; None: none.

    Raises:
        EngineStartError: It cannot.
    """
    ranks: list[str | None] = [None]
    if torch.cuda.is_available():
        ranks = [str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)]
    if distributed.is_initialized():
        own, ranks = ranks[0], [None] * distributed.get_world_size()
        distributed.all_gather_object(ranks, own)
    if transport == "ipc" and not set(taken) <= set(ranks):
        raise EngineStartError(
            "engine.transport is ipc, and the server computes on a GPU that no rank of the trainer "
            "has: set engine.visible_devices to GPUs of the server's own, for nccl, or "
            "CUDA_VISIBLE_DEVICES of the run to the trainer's"
        )
    if transport == "nccl" and ranks[0] in taken:
        raise EngineStartError(
            "engine.transport is nccl, which cannot connect a GPU with itself, and the server "
            "computes on that of rank 0: set engine.visible_devices to other GPUs, or "
            "engine.transport: ipc"
        )


_SHARE_BESIDE_TRAINER = 0.3
_VERSIONS = 1000
"""Pushes whose names are remembered; no response is behind so many."""


class VLLMServerEngine(StartsServers):
    """vLLM servers, shared by all ranks: on GPUs of their own, on the trainer's, or on a CPU.

    Without ``url`` they are started on the first push and end with the run, however that ends. They
    listen on this machine only and ask for a token that no one else knows. Weights go to all of
    them at once through vLLM's own weight transfer, see ``transport``; requests go where their
    prompt is known and the least is to be done. A server that fails is started again while the
    others go on.

    Args:
        url: A server that runs already, or several; their token is the environment's
            ``VLLM_API_KEY``. None: start them. ``docs/rollouts.md`` has the command.
        replicas: Servers that are started, each with all of the model.
        sync_host: Address of this machine that the server's workers can reach.
        tensor_parallel_size: GPUs of each server, which the model is split over.
        transport: How weights get there: ``nccl`` from GPU to GPU, ``ipc`` where both are on the
            same GPUs, ``gloo`` through main memory. "auto": what a server that runs already was
            started for; else gloo on a CPU, ipc without ``visible_devices``, and nccl with them.
        visible_devices: GPUs of all servers, as in CUDA_VISIBLE_DEVICES; None: the trainer's.
        start_timeout: Seconds until a started server, or one that went away, answers.
        stall_timeout: Seconds without a finished response after which the server counts as hung.
        sync_timeout: Seconds that each step of a push may take.
        log_file: Where a started server writes, several into ``name.0.log`` and so on; None: into a
            temporary folder.
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
        log_file: str | None = None,
        **engine: Any,
    ) -> None:
        super().__init__(**engine)
        check_transport(type(self).__name__, transport, ("auto", *TRANSPORTS))
        self.urls = [url] if isinstance(url, str) else list(url or ())
        if self.urls and replicas not in (1, len(self.urls)):
            raise ValueError(
                f"engine.replicas is {replicas}, and engine.url names {len(self.urls)} servers: "
                "drop engine.replicas, or name as many"
            )
        for name, value in (
            ("replicas", replicas),
            ("tensor_parallel_size", tensor_parallel_size),
            ("start_timeout", start_timeout),
            ("stall_timeout", stall_timeout),
            ("sync_timeout", sync_timeout),
        ):
            if not value > 0:
                raise ValueError(f"engine.{name} is {value}; it must be above 0")
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
        self.log_file = log_file
        if engine.get("gpu_memory_utilization") is None and self._server_transport() == "ipc":
            self.gpu_memory_utilization = _SHARE_BESIDE_TRAINER
        self._fleet: Fleet | None = None
        """On the rank that leads."""
        self._replicas: list[Replica] = []
        """Those that take part in pushes."""
        self._targets: Targets | None = None
        """Those that have the weights of the last push, for requests from any thread."""
        self._failed: dict[Address, str] = {}
        """Those of them that failed here since then, and why."""
        self._counted = 0
        self._pushing = 0
        self._name = ""
        self._names: dict[str, int] = {}
        """Training iterations behind the weights of each push, by what the servers call them."""
        self._transfer: Any = None

    @property
    def capabilities(self) -> Capabilities:
        """A process of its own; with images or videos its server would tokenise the text again."""
        return Capabilities(
            holds_copy=True,
            concurrent=True,
            tells_kept_mass=False,
            media=False,
            # an adapter is loaded under a new name, which requests that run do not hear of
            updates_in_flight=self._adapter is None,
            structured=True,
        )

    # ------------------------------------------------------------------ life of the servers

    def _start(self) -> None:
        # which takes seconds, as long as a server starts anyway
        loading = None if self.urls else in_background(import_transfer, name="vllm-import")
        self._model_folder()  # here, as several threads will ask for it
        allow_connections()  # one for each response that is computed
        # calls that are still open note what fails in that of the servers they were begun with
        self._failed, self._traffic, self._counted = {}, Traffic(), 0
        self._name = led(lambda: secrets.token_hex(12))
        if leads():
            servers = [self._new_server(number) for number in range(self.replicas)]
            self._fleet = Fleet(servers, max_restarts=self.max_restarts)
        led(lambda: self._led_fleet.start())
        self._transfer_module = loading.result() if loading else import_transfer()
        self._muster()

    def _start_together(self) -> None:
        ran = self._running
        super()._start_together()
        if not ran:
            return
        try:
            self._muster()
        except Exception as error:
            self._worst_of_ranks(1 if isinstance(error, EngineFailure) else 2)
            raise
        if self._worst_of_ranks(0) > 0:
            raise EngineFailure("another rank did not connect to the servers")

    def _muster(self) -> None:
        """Agree on the servers that take the next push, and connect to them if they are others."""
        told = dict(self._failed)
        each: list[dict[Address, str]] = [told]
        if distributed.is_initialized():
            each = [{} for _ in range(distributed.get_world_size())]
            distributed.all_gather_object(each, told)
        failed = {address: reason for one in each for address, reason in one.items()}

        def find() -> tuple[dict[int, Address], int]:
            for address, reason in failed.items():
                self._led_fleet.fail(address, reason)
            running = self._led_fleet.running()
            found = {number: (one.url, one.token) for number, one in sorted(running.items())}
            return found, self._led_fleet.restarts

        addresses, restarts = led(find)
        for address in told:
            del self._failed[address]
        self.restarts += restarts - self._counted
        self._counted = restarts
        # of one at an address where one failed nothing is known
        known = {one.client.address: one for one in self._replicas}
        kept = {address: one for address, one in known.items() if address not in failed}
        if self._transfer is None or {*addresses.values()} != kept.keys():
            self._leave()
            self._join(addresses, kept)

    def _join(self, addresses: Mapping[int, Address], known: Mapping[Address, Replica]) -> None:
        """Connect to servers; those that are known keep what they have."""
        before = self._replicas
        self._replicas = [
            known.get(address) or Replica(number, ServerClient(*address))
            for number, address in addresses.items()
        ]
        for one in before:
            if one not in self._replicas:
                one.client.close()
        for replica, described in zip(self._replicas, led(self._describe), strict=True):
            replica.described = described
        self._check_descriptions([replica.described for replica in self._replicas])
        self._router = Router(
            addresses, first=distributed.get_rank() if self._acts_with_ranks else 0
        )
        transport = str(self._described["transfer"]).removeprefix("lrlhf_")
        check_gpus(transport, led(self._await_trainer))
        led(partial(self._connect, transport))
        if not leads():
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
        )

    def _leave(self) -> None:
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None

    def _stop(self) -> None:
        self._targets = None
        self._leave()
        for replica in self._replicas:
            replica.client.close()
        self._replicas = []
        if self._fleet is not None:
            self._fleet.stop()
            self._fleet = None
        self._remove_folder()

    def _describe(self) -> list[dict[str, Any]]:
        def ask(replica: Replica) -> dict[str, Any]:
            try:
                return dict(replica.client.call_workers("lrlhf_describe", timeout=60.0)[0])
            except FailureAnswer as error:  # not without an answer, which a new server may give
                if error.busy or not replica.client.is_healthy():
                    raise
                raise EngineStartError(
                    f"the vLLM server cannot take weights ({error}); start it with\n"
                    f"{self._command_for_users()}"
                ) from error

        return on_all(self._replicas, ask)

    def _await_trainer(self) -> list[str | None]:
        """Have all workers get ready; returns their GPUs."""

        def ask(replica: Replica) -> list[str | None]:
            return replica.client.call_workers("lrlhf_await_trainer", timeout=60.0)

        return list(chain(*on_all(self._replicas, ask)))

    # ------------------------------------------------------------------ weights and responses

    def _push_once(self, version: int) -> None:
        """Push; if servers fail meanwhile, the others are given the weights once more."""
        self._pushing = version
        while True:
            error: Exception | None = None
            try:
                super()._push_once(version)
            except Exception as raised:  # noqa: BLE001  raised again unless others can go on
                error = raised
            fails = isinstance(error, EngineFailure) and self._running
            worst = self._worst_of_ranks(0 if error is None else 1 if fails else 2)
            if worst == 0:
                break
            if worst == 2 or not led(self._drop_broken):
                raise error or EngineFailure("the push failed on another rank")
            self._leave()  # what is connected broke off
        while len(self._names) > _VERSIONS:  # in place: responses that are written look there
            del self._names[next(iter(self._names))]
        if leads():
            self._led_fleet.succeeded()

    def _send(self, tensors: Fingerprinted) -> list[dict[str, str]]:
        version, options = f"{self._name}{tensors.turn:08x}", {"in_flight": self._in_flight}
        # already now: responses may come from these weights before this rank hears of it
        self._names[version] = self._pushing
        error: Exception | None = None
        if not leads():
            try:
                self._transfer.push(tensors, version, whole=not self._has_base, **options)
            except Exception as raised:  # noqa: BLE001  raised again once rank 0 is through
                error = raised
                # which rank 0 puts together meanwhile, whatever became of this rank
                self._bring_parts(tensors)

        def push() -> list[dict[str, str]]:
            try:
                self._transfer.push(tensors, version, whole=not self._has_base, **options)
            finally:
                # before the other ranks hear how it went: until then they bring their parts
                self._bring_parts(tensors)
            return list(chain(*on_all(self._replicas, partial(self._finish, version=version))))

        arrived = led(push)
        if error is not None:
            raise error
        self._router.forget()
        self._publish(version)
        return arrived

    def _publish(self, version: str) -> None:
        """Have requests that come from now on go to those that were sent this version."""
        clients = {one.number: one.client for one in self._replicas}
        apart = self._adapter_apart is not None
        models = {
            one.number: version if apart else one.described["model"] for one in self._replicas
        }
        fleet, failed = self._fleet, self._failed

        def note(number: int, failure: EngineFailure) -> None:
            """Send nothing more there; on the rank that leads it is started again at once."""
            address = clients[number].address
            failed[address] = str(failure)
            if fleet is not None:
                fleet.fail(address, str(failure))

        known = {version: self._pushing}
        self._targets = Targets(clients, models, self._router, note, known, failed, self._traffic)

    def _drop_broken(self) -> list[int]:
        """Take servers out that broke a step off, on the rank that leads."""
        culprits = self._transfer.failed if self._transfer is not None else ()
        failed = [one.number for one in self._replicas if one.failed or one.client in culprits]
        return self._led_fleet.drop_broken([one.number for one in self._replicas], failed)

    def _finish(self, replica: Replica, version: str) -> list[dict[str, str]]:
        """Have a server go on with what was sent, and return what arrived there."""
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
                on_all(self._replicas, lambda one: one.reset_caches(self.sync_timeout))
            except EngineFailure as failure:
                broken = self._drop_broken()
                if not broken:
                    raise
                gone = [one.client.address for one in self._replicas if one.number in broken]
                self._failed |= dict.fromkeys(gone, str(failure))

        led(reset)
        self._router.forget()

    def _respond(self, requests: Sequence[Request], sampling: Sampling) -> list[Response]:
        shared = sampling_arguments(sampling, self._weights.model, self._tokenizer)
        # text is only looked at for stop strings
        shared["detokenize"] = bool(sampling.stop)
        if (targets := self._targets) is None:
            raise EngineFailure("no vLLM server has the policy's weights")
        if self._in_flight:
            targets = replace(targets, versions=self._names)
        bodies = token_requests(requests, shared)
        return respond(bodies, targets, concurrency=self.max_num_seqs, stall=self.stall_timeout)

    @property
    def _led_fleet(self) -> Fleet:
        assert self._fleet is not None
        return self._fleet

    # ------------------------------------------------------------------ ranks

    @property
    def _acts_with_ranks(self) -> bool:
        """All of them share the servers."""
        return distributed.is_initialized()
