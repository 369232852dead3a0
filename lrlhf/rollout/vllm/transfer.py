"""The sender of vLLM's weight transfer. It imports vLLM, which takes seconds."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed
from vllm.distributed.weight_transfer import (
    HTTPVLLMWeightSyncClient,
    ParamMeta,
    WeightSource,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
)

from lrlhf.background import in_background
from lrlhf.rollout.engines.policy_weights import AdapterWeights, PolicyWeights
from lrlhf.rollout.engines.synced_engine import EngineFailure
from lrlhf.rollout.vllm.client import ServerClient
from lrlhf.rollout.vllm.vllm_base import free_port
from lrlhf.vllm_worker.delta import changes
from lrlhf.vllm_worker.fingerprint import Fingerprinted
from lrlhf.vllm_worker.gloo import GlooGroup, buckets, open_store, pack, size_of

_LOCK_SECONDS = 5.0


class BreakableGroup:
    """A `GlooGroup` or NCCL communicator that does nothing after a failure; ranks stay in step."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._lock = threading.Lock()
        self.failure: Exception | None = None

    def broadcast(self, tensor: Tensor, src: int = 0, **options: Any) -> None:
        """Send a tensor, unless the group is broken."""
        with self._lock:
            if self.failure is not None:
                return
            try:
                self._group.broadcast(tensor, src=src, **options)
            except RuntimeError as error:
                if self.failure is None:
                    self.failure = error
                    self._group.destroy()

    def break_off(self, reason: Exception) -> None:
        """Abort the operations of all members; thread-safe."""
        first, self.failure = self.failure is None, self.failure or reason
        # NCCL must not be called while its communicator is destroyed, but a broadcast that waits
        # only ends by that; a gloo group can be left at any time
        locked = not isinstance(self._group, GlooGroup) and self._lock.acquire(
            timeout=_LOCK_SECONDS
        )
        if first:
            self._group.destroy()
        if locked:
            self._lock.release()

    def destroy(self) -> None:
        self.break_off(EngineFailure("the connection for weights was closed"))


_BUFFER = 2**28
_COMMON_STEPS = ("init_weight_transfer_engine", "update_weights")


class PolicySource(WeightSource):  # type: ignore[misc]
    """The policy's weights for vLLM's transfer engines, after those of an adapter, if any."""

    def __init__(
        self,
        weights: PolicyWeights,
        dtype: torch.dtype,
        device: torch.device,
        adapter: AdapterWeights | None,
        delta: bool,
    ) -> None:
        self._weights = _metadata(weights.layout(dtype))
        self._adapter = _metadata(adapter.layout(dtype)) if adapter else []
        self.device = device
        self.sends = True
        """Whether this rank sends, or only takes part in gathering shards."""
        self._layout = self._adapter + self._weights
        self._tensors: Iterable[tuple[str, Tensor]] = ()
        self._held: dict[str, Tensor] | None = {} if delta else None
        """With ``delta``: copies of what was sent."""

    def prepare(self, tensors: Fingerprinted, *, full: bool, afresh: bool) -> None:
        """Set the tensors of the next pass; see `WeightTransfer.push`."""
        self._tensors, self._layout = tensors, self._adapter + (self._weights if full else [])
        if self._held is not None and self.sends:
            if afresh:
                self._held.clear()
            # before the pass, as vLLM asks for their sizes then; wide types first, as vLLM's packed
            # buffers view each tensor where the one before ends
            sent = changes(tensors, self._held)
            self._tensors = sorted(sent, key=lambda each: -each[1].element_size())
            self._layout = _metadata(self._tensors)

    def metadata(self) -> list[ParamMeta]:
        """Return names, types and shapes of the next pass, at first of all weights."""
        return self._layout

    @property
    def bytes(self) -> int:
        """Size of the next pass."""
        return sum(size_of(each.dtype, each.shape) for each in self._layout)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights; all ranks must iterate over sharded ones."""
        tensors, self._tensors = self._tensors, ()
        for name, tensor in tensors:
            yield name, tensor.to(self.device) if self.sends else tensor


def _metadata(layout: Iterable[tuple[str, Tensor]]) -> list[ParamMeta]:
    return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in layout]


@dataclass(frozen=True)
class Member:
    """A server that takes part in an update."""

    client: ServerClient
    workers: int


class SyncClient(HTTPVLLMWeightSyncClient):  # type: ignore[misc]
    """Runs the steps of an update on all servers in parallel, until a step fails.

    The error is stored instead of raised: ranks that gather weights iterate over all of them,
    whatever happens to the engine.
    """

    def __init__(self, members: Sequence[Member], timeout: float) -> None:
        super().__init__(members[0].client.url, timeout)
        self._members = members
        self.group: BreakableGroup | None = None
        self.failure: Exception | None = None
        self.failed: list[ServerClient] = []
        """The server of the first failure, where it is that server's own."""
        self._failing = threading.Lock()
        self.version = ""
        self.turn = 0
        self.changes: dict[str, bool] = {}
        """How the next push is to be read, where it has changes alone."""
        self.in_flight = False
        self._trainer = secrets.token_hex(16)

    @property
    def workers(self) -> int:
        """Number of workers of all servers."""
        return sum(member.workers for member in self._members)

    def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
        self._post_each(path, [json] * len(self._members))

    def _post_each(self, path: str, bodies: Sequence[dict[str, Any] | None]) -> None:
        if self.failure is not None:
            return

        def post(member: Member, body: dict[str, Any] | None) -> None:
            try:
                member.client.post(f"/{path}", body, timeout=self.timeout)
            except Exception as error:  # noqa: BLE001  raised by WeightTransfer.push
                with self._failing:
                    first, self.failure = self.failure is None, self.failure or error
                    # in common steps the first to fail may have waited for another
                    if first and path not in _COMMON_STEPS and isinstance(error, EngineFailure):
                        self.failed.append(member.client)
                if self.group is not None:
                    # a broadcast would wait for workers that never join
                    self.group.break_off(error)

        wait(
            [
                in_background(partial(post, member, body), name="vllm-step")
                for member, body in zip(self._members, bodies, strict=True)
            ]
        )

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect the workers to this trainer alone."""
        info, bodies = {**init_info, "trainer": self._trainer}, []
        for member in self._members:
            bodies.append({"init_info": dict(info)})
            if "rank_offset" in info:  # workers are numbered over all servers
                info["rank_offset"] += member.workers
        self._post_each("init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        """Pause generation and begin.

        Unfinished responses are aborted, as they would come from two policies; with updates in
        flight they are paused, and their keys and values are computed again afterwards. Until the
        end the weights have no version, as an update that fails leaves them mixed.
        """
        self._post(f"pause?mode={'keep' if self.in_flight else 'abort'}&clear_cache=false")
        if self.in_flight:
            # clear_cache would forget what the processor made of images, on which a request that
            # arrives meanwhile may rely
            self._post("reset_prefix_cache?reset_running_requests=true&reset_external=true")
        self._post("update_weight_version", {"new_version": f"{self.version}, incomplete"})
        super().start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let the workers receive, with the number of the push for fingerprints."""
        ours = {"turn": self.turn, "trainer": self._trainer}
        super().update_weights({**update_info, **ours, **self.changes})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Finish, and set the version of the weights."""
        super().finish_weight_update(weight_version or self.version)


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """Options of the sender; see `GlooGroup`."""

    backend: ClassVar[str] = "lrlhf_gloo"

    host: str
    workers: int
    timeout: float


class GlooTrainerEngine(NCCLTrainerWeightTransferEngine):  # type: ignore[misc]
    """Sends through gloo, with the protocol of vLLM's engine for NCCL."""

    init_info_cls = GlooTrainerInitInfo

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInitInfo, *, client: SyncClient, source: PolicySource
    ) -> GlooTrainerEngine:
        """Open a store, and a group when all workers have joined."""
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        if not engine.is_sender:
            return engine
        host, timeout = init_info.host, init_info.timeout
        store, token = open_store(host, timeout), secrets.token_hex(32)
        size = init_info.workers + 1
        shared: dict[str, Any] = {"host": host, "token": token, "size": size, "timeout": timeout}
        info = {**shared, "port": store.port, "rank_offset": 1}
        request = in_background(
            lambda: client.init_weight_transfer_engine(info), name="vllm-rendezvous"
        )
        while not store.check([f"{token}/{rank}" for rank in range(1, size)]):
            if request.done():
                raise client.failure or EngineFailure("a worker of vLLM did not come for weights")
            time.sleep(0.01)
        engine.model_update_group = GlooGroup(store, rank=0, **shared)
        request.result()
        return engine

    def _broadcast(self, source: PolicySource, meta: list[ParamMeta]) -> None:
        if not self.is_sender:
            super()._broadcast(source, meta)
            return
        pairs = self._checked_iter(source, meta)
        for count in buckets(size_of(each.dtype, each.shape) for each in meta):
            bucket = [tensor for _, tensor in islice(pairs, count)]
            self.model_update_group.broadcast(pack(bucket))
        for _ in pairs:
            pass  # raises for a surplus tensor


WeightTransferTrainerFactory.register_engine("lrlhf_gloo", GlooTrainerEngine)


class WeightTransfer:
    """Sends the policy's weights to the workers of all servers, in one pass per push.

    All ranks have one; rank 0 sends requests to the servers. All workers share one connection, so
    after the failure of one a push to the others needs a new one.

    Args:
        transport: ``gloo``, ``nccl`` or ``ipc``.
        members: The servers.
        weights: The policy's weights.
        dtype: Type of the engine's weights.
        host: Address of this machine for the workers.
        timeout: Seconds that the workers and the trainer wait for each other.
        adapter: Adapter that is sent apart from the weights; None: it is merged.
        delta: Whether to send only `changes` since the last push.
    """

    def __init__(
        self,
        transport: str,
        members: Sequence[Member],
        weights: PolicyWeights,
        dtype: torch.dtype,
        *,
        host: str,
        timeout: float,
        adapter: AdapterWeights | None = None,
        delta: bool = False,
    ) -> None:
        cpu = transport == "gloo"
        device = torch.device("cpu" if cpu else f"cuda:{torch.cuda.current_device()}")
        self._rank = distributed.get_rank() if distributed.is_initialized() else 0
        self._source = PolicySource(weights, dtype, device, adapter, delta)
        self._source.sends = transport == "ipc" or self._rank == 0
        self._full_bytes = self._source.bytes
        self._client = SyncClient(members, timeout)
        self._delta, self._complete = delta, False
        self._shares_gpu = transport == "ipc"
        info = self._init_info(transport, host, self._client.workers, timeout)

        def connect() -> Any:
            if not cpu:
                torch.cuda.set_device(device)  # each thread has its own
            return WeightTransferTrainerFactory.trainer_init(
                info, client=self._client, source=self._source
            )

        # in the background, as NCCL waits for its members forever
        opened, deadline = in_background(connect, name="vllm-transfer"), time.monotonic() + timeout
        try:
            while not (wait([opened], 0.05).done or self._client.failure):
                if time.monotonic() > deadline:
                    raise EngineFailure(
                        f"vLLM's workers did not come for weights at {host} within {timeout:g} s "
                        "(engine.sync_timeout)"
                    )
            self._raise_failure()
        except Exception:
            opened.add_done_callback(_leave)  # workers may still join
            raise
        self._opened, self._engine = opened, opened.result()
        group = getattr(self._engine, "model_update_group", None)
        if group is not None:
            self._client.group = self._engine.model_update_group = BreakableGroup(group)

    def _init_info(self, transport: str, host: str, workers: int, timeout: float) -> Any:
        rank = self._rank
        if transport == "gloo":
            return GlooTrainerInitInfo(host, workers, timeout, rank=rank)
        # no tensor may be larger than the buffer, of which there is one or two
        largest = max(size_of(tensor.dtype, tensor.shape) for tensor in self._source.metadata())
        buffer: dict[str, Any] = {"packed": True, "packed_buffer_size_bytes": max(_BUFFER, largest)}
        if transport == "ipc":
            return IPCTrainerInitInfo(**buffer, rank=rank)
        port = free_port(host) if rank == 0 else 0  # of that rank's machine
        return NCCLTrainerInitInfo(host, port, workers + 1, **buffer, rank=rank)

    def push(
        self,
        tensors: Fingerprinted,
        version: str,
        *,
        full: bool = True,
        in_flight: bool = False,
        afresh: bool = True,
    ) -> tuple[int, int]:
        """Send all weights, or the adapter alone, and leave the servers paused.

        Args:
            tensors: The tensors.
            version: Their version at the servers.
            full: Whether they contain the weights.
            in_flight: Whether unfinished responses continue with them.
            afresh: Whether to send unchanged weights too, as after a push that failed here.

        Returns:
            On the rank that sends: bytes for each worker, and of all weights.

        Raises:
            EngineFailure: The transfer failed, after iteration over all tensors.
        """
        self._client.version, self._client.turn = version, tensors.turn
        self._client.in_flight = in_flight
        afresh, self._complete = afresh or not self._complete, False
        if self._delta:
            self._client.changes = {"delta": True, "afresh": afresh}
        if self._source.device.type == "cuda":
            # weights are read on other streams than that of the optimizer's step
            torch.cuda.synchronize(self._source.device)
        if self._shares_gpu:
            # release cached memory for the engine's copies of the weights
            torch.cuda.empty_cache()
        try:
            self._source.prepare(tensors, full=full, afresh=afresh)
            sent = self._source.bytes
            self._engine.send_weights()
        except Exception as error:
            if self._client.group is not None:
                self._client.group.break_off(error)
            raise  # an error of the policy, which a restart would not repair
        self._raise_failure()
        self._complete = True
        return sent, self._full_bytes

    def _raise_failure(self) -> None:
        """Raise the failure, preferably the server's, which is more specific."""
        if self._client.failure is not None:
            raise self._client.failure
        group = self._client.group
        if group is not None and group.failure is not None:
            raise EngineFailure(f"a push of weights broke off ({group.failure})") from group.failure

    @property
    def failed(self) -> Sequence[ServerClient]:
        """Servers that failed in a push, as far as known."""
        return self._client.failed

    def close(self) -> None:
        """Disconnect from the workers."""
        _leave(self._opened)


def _leave(opened: Future[Any]) -> None:
    if opened.exception() is None:
        with contextlib.suppress(RuntimeError):  # the group is broken
            opened.result().shutdown()
