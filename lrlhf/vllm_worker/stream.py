"""Weights over a socket, one by one, so that no side holds a second copy of the model.

The receiver connects and shows a token first. Before each tensor come its name, type and shape in
JSON, the length of that in 8 bytes before it, and then the tensor as it lies in memory; length 0
ends the stream. Nothing of it can carry code, and nothing is copied on the way but by the sockets.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader

import torch
from torch import Tensor

_LENGTH = struct.Struct(">Q")
_LONGEST_TOKEN = 4096
_TOKEN_SECONDS = 5.0
_TYPES = {name: kind for name, kind in sorted(vars(torch).items()) if isinstance(kind, torch.dtype)}


class StreamError(ConnectionError):
    """The other side went away, took too long, or is not who it should be."""


class Sender:
    """Listens on a free port until ``receivers`` workers have come, and sends to all of them.

    Args:
        host: Address to listen on.
        receivers: Workers to wait for.
        timeout: Seconds that a worker may take to come, or to take a tensor.
    """

    def __init__(self, host: str, *, receivers: int, timeout: float) -> None:
        self.token = secrets.token_hex(32)
        self._receivers = receivers
        self._timeout = timeout
        self._listener = socket.create_server((host, 0), backlog=receivers)
        self.port: int = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Sender:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in (*self._sockets, self._listener):
            connection.close()

    def send(
        self,
        tensors: Iterable[tuple[str, Tensor]],
        *,
        give_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Send every tensor to every worker.

        Args:
            tensors: Named tensors; each is asked for when the ones before it are on their way.
            give_up: Tells that no worker will come, looked at while waiting for them.

        Raises:
            StreamError: A worker did not come, or went away.
        """
        self._accept(give_up)
        try:
            for name, tensor in tensors:
                kind = str(tensor.dtype).removeprefix("torch.")
                head = json.dumps([name, kind, list(tensor.shape)]).encode()
                data = _memory(tensor.detach().to("cpu").contiguous())
                self._send(_LENGTH.pack(len(head)) + head, data)
            self._send(_LENGTH.pack(0))
        except OSError as error:
            raise StreamError(f"a vLLM worker stopped taking weights ({error})") from error

    def _send(self, *parts: bytes | memoryview) -> None:
        for connection in self._sockets:
            for part in parts:
                connection.sendall(part)

    def _accept(self, give_up: Callable[[], bool]) -> None:
        self._listener.settimeout(0.1)
        waited = 0.0
        while len(self._sockets) < self._receivers:
            if give_up() or waited > self._timeout:
                raise StreamError(
                    f"{len(self._sockets)} of {self._receivers} vLLM workers came for the weights"
                )
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                waited += 0.1
                continue
            if self._shows_token(connection):
                connection.settimeout(self._timeout)
                # small tensors do not wait for the worker to confirm those before them
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets.append(connection)
            else:
                connection.close()

    def _shows_token(self, connection: socket.socket) -> bool:
        connection.settimeout(min(self._timeout, _TOKEN_SECONDS))
        try:
            with connection.makefile("rb") as file:
                shown = _read(file, _read_length(file, _LONGEST_TOKEN))
        except OSError:
            # a stranger who says something else, or nothing, keeps no worker out
            return False
        return secrets.compare_digest(bytes(shown), self.token.encode())


def receive(host: str, port: int, token: str, *, timeout: float) -> Iterator[tuple[str, Tensor]]:
    """Connect to a `Sender`, and go through what it sends.

    Raises:
        StreamError: The sender went away before its end mark, or took longer than ``timeout``
            seconds for a tensor.
    """
    try:
        with (
            socket.create_connection((host, port), timeout=timeout) as connection,
            connection.makefile("rb") as file,
        ):
            connection.sendall(_LENGTH.pack(len(token)) + token.encode())
            while size := _read_length(file):
                name, kind, shape = json.loads(_read(file, size))
                tensor = torch.empty(shape, dtype=_TYPES[kind])
                _fill(file, _memory(tensor))
                yield name, tensor
    except StreamError:
        raise
    except TimeoutError as error:
        raise StreamError(f"no weights came for {timeout:g} s") from error
    except OSError as error:
        raise StreamError(f"the sender of weights is gone ({error})") from error


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a tensor that lies in order in main memory."""
    # an empty one may have no memory, and `view` nothing to look at
    flat = tensor.view(-1) if tensor.numel() else torch.empty(0)
    return flat.view(torch.uint8).numpy().data


def _read_length(file: BufferedReader, longest: int | None = None) -> int:
    size: int = _LENGTH.unpack(_read(file, _LENGTH.size))[0]
    if longest is not None and size > longest:
        raise StreamError("the first message is no token")
    return size


def _read(file: BufferedReader, size: int) -> bytes:
    data = bytearray(size)
    _fill(file, memoryview(data))
    return bytes(data)


def _fill(file: BufferedReader, view: memoryview) -> None:
    if file.readinto(view) < len(view):
        raise StreamError("the connection ended in the middle of a message")
