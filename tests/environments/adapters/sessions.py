"""Sessions with adapters, and servers for them."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from lrlhf.environments import Episodes, ToolCall
from lrlhf.environments.session import Reaction, Session
from lrlhf.environments.settings import resolve
from lrlhf.media import MediaOptions

_RESERVED: list[socket.socket] = []
"""Bound until the process ends, so that the ports that they have stay the tests' own."""


def session(
    name: str, *, timeout: float = 20.0, media: MediaOptions | None = None, **options: Any
) -> Session:
    """A session with an adapter, found as a config finds it."""
    path = name if "." in name else f"lrlhf.environments.adapters.{name}"
    cast = resolve(Episodes(environment=path, options=options))
    return Session(cast.make, [], read_call, timeout=timeout, reset_timeout=60, media=media)


def read_call(text: str) -> list[ToolCall]:
    name, _, arguments = text.partition(" ")
    return [ToolCall(name, json.loads(arguments or "{}"))]


@contextlib.asynccontextmanager
async def opened(
    name: str, row: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Any]:
    """A session, what it shows, and a function that says something and returns the reaction."""
    one = session(name, **options)
    try:
        shown = await one.open({"seed": 7, **(row or {})})
        yield one, shown, lambda text: one.react(text, text)
    finally:
        await one.close()


def told(reaction: Reaction) -> str:
    (message,) = reaction.messages
    return str(message["content"])


def is_open(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def served(name: str, port: int) -> Iterator[None]:
    """A program of this folder, as long as the block runs."""
    command = [*program(name), str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + 60
            while not is_open(port):
                assert time.monotonic() < deadline
                assert server.poll() is None
                time.sleep(0.05)
            yield
        finally:
            server.kill()


def free_port() -> int:
    """A port at which a server may listen, and which nobody else is given meanwhile."""
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("127.0.0.1", 0))
    _RESERVED.append(one)
    return int(one.getsockname()[1])


def program(name: str) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name(name))]
