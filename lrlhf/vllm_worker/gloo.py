"""A gloo process group of trainer and workers, independent of their other groups."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented to be there

from lrlhf.torch_internals import gloo_group

BUCKET = 2**24
"""Bytes of a bucket; a larger tensor is sent alone. Memory of twice that size and more is returned
to the system and cleared again for every bucket, which takes as long as sending it."""

_LEFT = "left"
"""Key in the store once a member has left."""
_POLL = timedelta(seconds=0.5)


class GlooGroup:
    """Broadcasts from rank 0, which is the trainer.

    Args:
        store: Store for the rendezvous.
        host: Address of rank 0, which selects the network interface.
        token: Secret prefix of the keys in the store.
        rank: Rank of this member.
        size: Number of members.
        timeout: Seconds for each operation.
    """

    def __init__(
        self, store: TCPStore, *, host: str, token: str, rank: int, size: int, timeout: float
    ) -> None:
        address = host if rank == 0 else _own_address(host, store.port)
        self._store = PrefixStore(token, store)
        self._group: Any = gloo_group(
            self._store, rank, size, hostname=address, timeout=timedelta(seconds=timeout)
        )
        self._work: Any = None

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """Broadcast a tensor, and wait until it is complete.

        Raises:
            RuntimeError: It timed out, or a member was lost or has left the group.
        """
        group = self._group  # another thread may remove it
        if group is None:
            raise RuntimeError("the group of trainer and workers is closed")
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._work = group.broadcast([tensor], options)
        while not self._is_done():
            # gloo does not end a wait for the remainder of a message of a lost member
            if self._group is None or self._store.check([_LEFT]):
                raise RuntimeError("the group of trainer and workers was given up")

    def _is_done(self) -> bool:
        try:
            return bool(self._work.wait(_POLL))
        except RuntimeError:
            return self._work.is_completed() and bool(self._work.wait())

    def destroy(self) -> None:
        """Leave the group; open operations of all members fail. Thread-safe."""
        group, self._group = self._group, None
        if group is None:
            return
        with contextlib.suppress(RuntimeError):  # the store is gone, which members notice
            self._store.set(_LEFT, "")
        # the destructor of a group waits for its operations, and would block Python
        threading.Thread(target=self._keep_until_done, args=(group,), daemon=True).start()

    def _keep_until_done(self, _group: Any) -> None:
        time.sleep(_POLL.total_seconds())  # another thread may be about to start a broadcast
        while self._work is not None and not self._work.is_completed():
            time.sleep(_POLL.total_seconds())


def open_store(host: str, timeout: float) -> TCPStore:
    """Open a store on a free port of ``host`` alone."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_store(host: str, port: int, timeout: float) -> TCPStore:
    """Connect to a store of `open_store`."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))


def buckets(sizes: Iterable[int]) -> Iterator[int]:
    """Yield the number of tensors of each bucket, from the bytes of each tensor."""
    count = total = 0
    for size in sizes:
        if count and total + size > BUCKET:
            yield count
            count = total = 0
        count, total = count + 1, total + size
    if count:
        yield count


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate the bytes of tensors; those of a single one without a copy."""
    flat = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def unpack(data: Tensor, kinds: Sequence[tuple[torch.dtype, Sequence[int]]]) -> list[Tensor]:
    """Return the tensors that `pack` concatenated, as views where possible."""
    parts: tuple[Tensor, ...] = torch.split(data, [size_of(*kind) for kind in kinds])
    return [
        # a view must be aligned to its type
        (part if part.storage_offset() % dtype.itemsize == 0 else part.clone())
        .view(dtype)
        .view(tuple(shape))
        for part, (dtype, shape) in zip(parts, kinds, strict=True)
    ]


def size_of(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Bytes of a tensor."""
    return dtype.itemsize * prod(shape)


def _own_address(host: str, port: int) -> str:
    """Return the address of this machine's interface to a host."""
    family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # a datagram socket sends nothing
        name: Any = probe.getsockname()
    return str(name[0])
