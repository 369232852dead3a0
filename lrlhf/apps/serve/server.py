"""The service as a process: listens, loads, and ends well when it is asked to."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import logging
import signal
import socket

import uvicorn

from lrlhf.apps.serve.app import RewardService
from lrlhf.noted_signals import noted_signals
from lrlhf.rewards.remote.service_client import DEFAULT_TOKEN_ENV
from lrlhf.web import KEEP_ALIVE_SECONDS, Connection, ConnectionLimit, allowed_connections

logger = logging.getLogger(__name__)

_BACKLOG = 256
_SPARE_CONNECTIONS = 448  # idle ones count too
_WATCH_SECONDS = 0.05


def check_exposure(host: str, token: str | None) -> None:
    """Make sure that a service without a token is reached from its own machine only.

    Raises:
        ValueError: It would be reached from elsewhere.
    """
    try:
        own = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, which may lead anywhere
        own = False
    if token is None and not own:
        raise ValueError(
            f"host is {host!r}, so that other machines reach the service, and it has no token: set "
            f"the environment variable {DEFAULT_TOKEN_ENV}, or token_file, or take 127.0.0.1"
        )


def serve(
    service: RewardService, *, host: str, port: int, max_queue: int, grace_seconds: float
) -> signal.Signals | None:
    """Serve until a signal comes; requests that are being answered then are finished.

    Args:
        service: What is served.
        host: Address to listen at.
        port: To listen at; 0: any that is free. It is logged.
        max_queue: Of the service; somewhat more connections may be open at once.
        grace_seconds: That requests may take to finish after the signal.

    Returns:
        The signal.

    Raises:
        OSError: The address cannot be listened at.
        Exception: What loading the model raised.
    """
    listener = _listening(host, port)
    server = new_server(service, max_queue=max_queue, grace_seconds=grace_seconds)
    with listener, noted_signals() as notes:
        asyncio.run(_serve(service, server, listener))
    if service.batcher.failure is not None:
        raise service.batcher.failure
    return notes[0] if notes else None


def new_server(service: RewardService, *, max_queue: int, grace_seconds: float) -> uvicorn.Server:
    """Build what listens, see `serve`; connections end by themselves, see `Connection`."""
    connections = allowed_connections(max_queue + _SPARE_CONNECTIONS)
    limit = ConnectionLimit(connections, grace_seconds, service.count_refused)
    config = uvicorn.Config(
        service.app,
        # httptools, which uvicorn would take where it is installed, has no limit to a head
        http=functools.partial(Connection, limit),  # type: ignore[arg-type]
        backlog=_BACKLOG,
        access_log=False,
        log_config=None,
        log_level="error",  # or a line for every request that is none
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, round(grace_seconds)),
        ws="none",
    )
    return uvicorn.Server(config)


async def _serve(service: RewardService, server: uvicorn.Server, listener: socket.socket) -> None:
    watch = asyncio.create_task(_watch(service, server, listener))
    try:
        await server.serve(sockets=[listener])
    finally:
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch


async def _watch(service: RewardService, server: uvicorn.Server, listener: socket.socket) -> None:
    """Tell when the model is there, and end the server if it cannot be loaded."""
    host, port = listener.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    logger.info("%s: loading the model", address)
    while service.batcher.served is None:
        if service.batcher.failure is not None:
            server.should_exit = True
            return
        await asyncio.sleep(_WATCH_SECONDS)
    served = service.batcher.served
    logger.info("%s serves %s, version %s", address, served.model, served.version)


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise OSError(f"cannot listen at {host}, port {port}: {error}") from error
