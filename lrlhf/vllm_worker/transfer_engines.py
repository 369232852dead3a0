"""The receivers of vLLM's weight transfer in a worker.

vLLM creates one with the worker's model; see `register` in `lrlhf.vllm_worker.extension`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)

from lrlhf.vllm_worker.delta import apply_changes
from lrlhf.vllm_worker.fingerprint import Fingerprinted, as_text
from lrlhf.vllm_worker.gloo import GlooGroup, buckets, join_store, size_of, unpack
from lrlhf.vllm_worker.model_access import ReceivedAdapter, forget_broken_update, repair


class RecordingReceiver:
    """Records the fingerprint of every received tensor, and stores those of an adapter.

    Requests have fields besides vLLM's: ``trainer``, a token, and for updates the ``turn``, see
    `fingerprint`, ``delta``, whether they are `changes`, and ``afresh``, whether these stand alone.
    Changes are applied to a copy of the weights in main memory, which is then loaded whole.
    """

    device: Any
    model: Any
    vllm_config: Any
    _seen: dict[str, Tensor]
    _turn: int
    _trainer: str
    _delta: bool
    _afresh: bool
    _held: dict[str, Tensor]
    _begun: bool
    adapter: ReceivedAdapter

    def start_weight_update(self) -> None:
        """Clear the records; the model is prepared by the first of its weights."""
        self._seen, self._begun, self.adapter = {}, False, ReceivedAdapter()

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        """Store the trainer's token."""
        known = dict(init_dict)
        self._trainer = known.pop("trainer")
        return super().parse_init_info(known)  # type: ignore[misc]

    def init_transfer_engine(self, init_info: Any) -> None:
        """Connect to a trainer, and disconnect from the one before."""
        self._held = {}
        self.shutdown()  # type: ignore[attr-defined]
        super().init_transfer_engine(init_info)  # type: ignore[misc]

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        """Raise ``RuntimeError`` for a trainer that is not connected, which could not send."""
        known = dict(update_dict)
        self._turn = known.pop("turn")
        self._delta, self._afresh = known.pop("delta", False), known.pop("afresh", False)
        if known.pop("trainer") != self._trainer:
            raise RuntimeError("another trainer has connected to this engine meanwhile")
        return super().parse_update_info(known)  # type: ignore[misc]

    def receive_weights(self, update_info: Any) -> None:
        """Receive tensors through vLLM's engine, which only calls ``model.load_weights``."""
        model = self.model

        def load(tensors: Any) -> Any:
            recorded = Fingerprinted(tensors, turn=self._turn, seen=self._seen)
            weights = self.adapter.split(recorded)
            if weights is None:
                return None
            if not self._begun:
                self._begun, self.model = True, model
                super(RecordingReceiver, self).start_weight_update()  # type: ignore[misc]
                forget_broken_update(model)
            return model.load_weights(weights)

        if self._afresh:
            self._held.clear()
        hold = partial(apply_changes, self._held)
        self.model = SimpleNamespace(load_weights=hold if self._delta else load)
        try:
            super().receive_weights(update_info)  # type: ignore[misc]
            if self._delta:
                # copies, as some of vLLM's models write into what they load
                load((name, one.to(self.device, copy=True)) for name, one in self._held.items())
        except BaseException:
            self._held.clear()
            # else the trainer would wait for this worker
            self.shutdown()  # type: ignore[attr-defined]
            raise
        finally:
            self.model = model

    def finish_weight_update(self) -> None:
        """Finish, and repair the model if it received weights."""
        if self._begun:
            super().finish_weight_update()  # type: ignore[misc]
            repair(self.model, self.vllm_config, self.device)

    def arrived(self) -> dict[str, str]:
        """Return the fingerprints of the last update by name."""
        return as_text(self._seen)


@dataclass(kw_only=True)
class GlooInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Options of a receiver; see `GlooGroup`."""

    host: str
    port: int
    token: str
    size: int
    """Number of members: the trainer and the workers of all servers."""
    rank_offset: int
    """Rank of the first worker of this server."""
    timeout: float


class GlooReceiver(NCCLWeightTransferEngine):  # type: ignore[misc]
    """Receives through gloo, with the protocol of the NCCL engine."""

    init_info_cls = GlooInitInfo
    model_update_group: GlooGroup | None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the trainer's group."""
        store = join_store(init_info.host, init_info.port, init_info.timeout)
        parallel = self.parallel_config
        own = parallel.data_parallel_index * parallel.world_size + parallel.rank
        rank = init_info.rank_offset + own
        store.set(f"{init_info.token}/{rank}", "here")
        self.model_update_group = GlooGroup(
            store,
            host=init_info.host,
            token=init_info.token,
            rank=rank,
            size=init_info.size,
            timeout=init_info.timeout,
        )

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Load bucket by bucket."""
        if self.model_update_group is None:
            raise RuntimeError("the trainer's connection is gone")
        self.model.load_weights(self._received(update_info))

    def _received(self, update_info: NCCLWeightTransferUpdateInfo) -> Iterator[tuple[str, Tensor]]:
        assert self.model_update_group is not None
        dtypes = [getattr(torch, name) for name in update_info.dtype_names]
        kinds = list(zip(dtypes, update_info.shapes, strict=True))
        sizes = [size_of(*kind) for kind in kinds]
        start = 0
        for count in buckets(sizes):
            end = start + count
            data = torch.empty(sum(sizes[start:end]), dtype=torch.uint8)
            self.model_update_group.broadcast(data)
            tensors = unpack(data, kinds[start:end])
            yield from zip(update_info.names[start:end], tensors, strict=True)
            start = end


class GlooEngine(RecordingReceiver, GlooReceiver):
    """Receiver for gloo."""


class NCCLEngine(RecordingReceiver, NCCLWeightTransferEngine):  # type: ignore[misc]
    """Receiver for NCCL."""


class IPCEngine(RecordingReceiver, IPCWeightTransferEngine):  # type: ignore[misc]
    """Receiver for CUDA IPC."""

    def finish_weight_update(self) -> None:
        """Finish, and release the trainer's memory, also after an adapter alone."""
        super().finish_weight_update()
        self._packed_importer.close()
