"""Connections to Ray, for the process that launches a run and for those that it launches."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

from lrlhf.cli.command_table import LAUNCHED

ENVIRONMENT: Final = "LRLHF_RAY_ENVIRONMENT"
"""Environment variable of a trainer: what the user gives all processes of the run, as JSON."""
ADDRESS: Final = "RAY_ADDRESS"
NO_GPUS: Final = {"CUDA_VISIBLE_DEVICES": ""}
"""Of processes with a share of no GPU, from which Ray does not hide those of its node."""


class RayMissingError(ValueError):
    """Ray is not installed, or this process does not belong to a run on it."""


def import_ray() -> Any:
    """Import Ray.

    Raises:
        RayMissingError: It is not installed.
    """
    # a library that is asked to train a model reports to nobody about it
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise RayMissingError("Ray is not installed: pip install 'lrlhf[ray]'") from error


def connect(connecting: Callable[[Any], None]) -> Any:
    """Connect, and leave SIGTERM to whom it belonged: Ray's own handler ends the process at once.

    Args:
        connecting: Calls ``ray.init`` of the module that it is given.
    """
    ray = import_ray()
    before = signal.getsignal(signal.SIGTERM)
    try:
        connecting(ray)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
    return ray


def joined(what: str) -> Any:
    """Return Ray, connected to the cluster of the run that this process is a trainer of.

    Args:
        what: Asks for it, for the error.

    Raises:
        RayMissingError: `lrlhf launch` did not start this process.
    """
    namespace = os.environ.get(LAUNCHED)
    if namespace is None:
        raise RayMissingError(f"{what} belongs to lrlhf launch, and this is a run without it")
    ray = import_ray()
    if not ray.is_initialized():
        options = with_environment(json.loads(os.environ.get(ENVIRONMENT, "{}")))
        connect(lambda ray: ray.init(namespace=namespace, log_to_driver=False, **options))
    return ray


def with_environment(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the option of Ray that gives variables to processes."""
    return {"runtime_env": {"env_vars": dict(variables)}} if variables else {}


def free_place() -> tuple[str, int]:
    """Return the address of this node, and a port that is free there."""
    host = str(import_module("ray.util").get_node_ip_address())
    with socket.socket() as listener:
        listener.bind((host, 0))
        return host, int(listener.getsockname()[1])
