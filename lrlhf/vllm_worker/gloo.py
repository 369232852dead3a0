"""A process group of trainer and workers over gloo, beside all others that they are in."""

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
from torch.distributed import (  # type: ignore[attr-defined]  # documented to be there
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

BUCKET = 2**24
"""Bytes that are sent at once; a larger tensor goes alone. Memory of twice that size and more is
given back to the system and cleared anew for every bucket, which takes as long as sending it."""

_LEFT = "left"
"""Is in the store once a member has left."""
_LOOK_EVERY = timedelta(seconds=0.5)


class GlooGroup:
    """Broadcasts from rank 0, which is the trainer.

    Args:
        store: Where the members find each other.
        host: Address by which the others reach rank 0; the connections stay on the way there.
        token: What a member has to know to find the others.
        rank: Of this member.
        size: Number of members.
        timeout: Seconds that they may wait for each other, each time.
    """

    def __init__(
        self, store: TCPStore, *, host: str, token: str, rank: int, size: int, timeout: float
    ) -> None:
        gloo: Any = ProcessGroupGloo  # of which PyTorch declares the half
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout)
        address = host if rank == 0 else _own_address(host, store.port)
        options._devices = [gloo.create_device(hostname=address)]
        self._store = PrefixStore(token, store)
        self._group: Any = gloo(self._store, rank, size, options)
        self._work: Any = None

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """Send a tensor, or fill it with what is sent; returns when that is done.

        Raises:
            RuntimeError: The timeout has passed, a member was lost, or one has left the group.
        """
        group = self._group  # which another thread may take away
        if group is None:
            raise RuntimeError("the group of trainer and workers is closed")
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._work = group.broadcast([tensor], options)
        while not self._is_done():
            # gloo does not tell one that waits for the rest of a message that it will not come
            if self._group is None or self._store.check([_LEFT]):
                raise RuntimeError("the group of trainer and workers was given up")

    def _is_done(self) -> bool:
        try:
            return bool(self._work.wait(_LOOK_EVERY))
        except RuntimeError:
            return self._work.is_completed() and bool(self._work.wait())

    def destroy(self) -> None:
        """Leave; what waits for the others fails, here and there. From any thread."""
        group, self._group = self._group, None
        if group is None:
            return
        with contextlib.suppress(RuntimeError):  # of a store that is gone, as a member sees too
            self._store.set(_LEFT, "")
        # the end of a group waits for what runs in it, and Python would wait with it
        threading.Thread(target=self._keep_until_done, args=(group,), daemon=True).start()

    def _keep_until_done(self, _group: Any) -> None:
        time.sleep(_LOOK_EVERY.total_seconds())  # another thread may be about to begin a broadcast
        while self._work is not None and not self._work.is_completed():
            time.sleep(_LOOK_EVERY.total_seconds())


def open_store(host: str, timeout: float) -> TCPStore:
    """Listen on a free port of ``host``, and nowhere else, for the members of a group."""
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
    """Connect to a store that `open_store` has opened."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))


def buckets(sizes: Iterable[int]) -> Iterator[int]:
    """Yield how many tensors go together, one bucket after the other.

    Args:
        sizes: Bytes of each tensor.
    """
    count = total = 0
    for size in sizes:
        if count and total + size > BUCKET:
            yield count
            count = total = 0
        count, total = count + 1, total + size
    if count:
        yield count


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of tensors one after the other; those of one alone without a copy."""
    flat = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def unpack(data: Tensor, kinds: Sequence[tuple[torch.dtype, Sequence[int]]]) -> list[Tensor]:
    """Return the tensors that `pack` has put together, as views where they can be.

    Args:
        data: Bytes.
        kinds: Type and shape of each tensor.
    """
    parts: tuple[Tensor, ...] = torch.split(data, [size_of(*kind) for kind in kinds])
    return [
        # behind one with an odd number of smaller words a tensor could not be a view
        (part if part.storage_offset() % dtype.itemsize == 0 else part.clone())
        .view(dtype)
        .view(tuple(shape))
        for part, (dtype, shape) in zip(parts, kinds, strict=True)
    ]


def size_of(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Bytes of a tensor."""
    return dtype.itemsize * prod(shape)


def _own_address(host: str, port: int) -> str:
    """Tell by which address of its own this machine reaches another."""
    family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket: nothing is sent
        name: Any = probe.getsockname()
    return str(name[0])
