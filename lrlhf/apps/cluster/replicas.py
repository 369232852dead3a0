"""vLLM servers on other nodes of a Ray cluster, for the engine that rank 0 leads."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from filelock import FileLock, Timeout

from lrlhf.apps.cluster.connection import NO_GPUS, free_place, import_ray, joined
from lrlhf.apps.cluster.guarded_program import GuardedProgram
from lrlhf.rollout import VLLMServerEngine
from lrlhf.rollout.vllm.client import ServerClient
from lrlhf.rollout.vllm.servers import Server, root_cause
from lrlhf.rollout.vllm.vllm_base import EngineStartError, is_cpu

_POLL_SECONDS = 0.5
_ANSWER_SECONDS = 30.0
"""That an actor may take to say how its server is, and to end it."""
_FOLDER, _LOCK = "lrlhf-replica-", "lock"
_KEPT_SECONDS = 24 * 3600.0
"""How long the log of a server that failed stays on its node at least."""
_TAIL_BYTES = 256 * 1024
_OWN_HOST = "127.0.0.1"
logger = logging.getLogger(__name__)


class RayServerEngine(VLLMServerEngine):
    """A `VLLMServerEngine` whose servers run on the nodes that ``lrlhf launch`` has reserved.

    Each is an actor in a bundle of the placement group ``rollouts``, which belongs to rank 0 and
    ends with it. The servers listen on the addresses of their nodes and ask for a token that only
    this run knows; between nodes it travels unencrypted.

    Takes the arguments of `VLLMServerEngine`. ``visible_devices`` is Ray's to choose, and
    ``sync_host`` is the address of rank 0's node unless it is given. ``transport: auto`` is nccl
    on GPUs.
    """

    stands_for: ClassVar = "lrlhf.rollout.VLLMServerEngine"
    """The class that the user named, which the saved config has."""

    def _new_server(self, number: int) -> Server:
        joined(type(self).__name__)
        if self.sync_host == _OWN_HOST:
            self.sync_host = import_module("ray.util").get_node_ip_address()
        return RayServer(
            number,
            command=lambda: self.command(0),
            environment=self._environment,
            timeout=self.start_timeout,
            explain=self._start_error,
        )

    def _server_transport(self) -> str:
        if self.transport == "auto" and not is_cpu():
            return "nccl"
        return super()._server_transport()

    def _devices(self, number: int) -> str | None:
        return None  # Ray shows a replica its own


class RayServer(Server):
    """A server in an actor.

    Args:
        number: Of the bundle that it is put in.
        command: Starts a server on this machine.
        environment: Of a server here that asks for a token.
        timeout: Seconds until it answers, the wait for a place included.
        explain: Turns what a server complained about into what to change.
    """

    def __init__(
        self,
        number: int,
        *,
        command: Callable[[], list[str]],
        environment: Callable[[str], dict[str, str]],
        timeout: float,
        explain: Callable[[str], EngineStartError],
    ) -> None:
        self._number = number
        self._command = command
        self._environment = environment
        self._timeout = timeout
        self._explain = explain
        self._actor: Any = None
        self._on_gpus = False

    def start(self) -> ServerClient:
        """Start it in a new actor."""
        self.stop()
        ray = import_ray()
        token = secrets.token_hex(32)
        # which another thread may end meanwhile
        actor = self._actor = self._placed(ray)
        until = time.monotonic() + self._timeout
        try:
            host, port = ray.get(
                actor.start.remote(
                    *portable(self._command()), self._server_environment(token), self._on_gpus
                ),
                timeout=self._timeout,
            )
            client = ServerClient(f"http://{host}:{port}", token)
            while not client.is_healthy():
                ended = ray.get(actor.ended.remote(), timeout=_ANSWER_SECONDS)
                if ended is None and time.monotonic() > until:
                    ended = f"no answer after {self._timeout:g} s (engine.start_timeout)"
                if ended is not None:
                    client.close()
                    raise self._explain(ended)
                time.sleep(_POLL_SECONDS)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise self._explain(f"rollout replica {self._number}: {error}") from error
        return client

    def stop(self) -> None:
        """End its processes, and the actor."""
        actor, self._actor = self._actor, None
        if actor is None:
            return
        ray = import_ray()
        try:
            ray.get(actor.stop.remote(), timeout=_ANSWER_SECONDS)
        except ray.exceptions.RayError as error:
            logger.warning("rollout replica %d is ended with its actor: %s", self._number, error)
        finally:
            ray.kill(actor)

    def alive(self) -> bool:
        """Whether its process runs."""
        actor = self._actor
        if actor is None:
            return False
        ray = import_ray()
        try:
            return ray.get(actor.ended.remote(), timeout=_ANSWER_SECONDS) is None
        except ray.exceptions.RayError:
            return False

    def _placed(self, ray: Any) -> Any:
        group = ray.util.get_placement_group("rollouts")
        share = dict(group.bundle_specs[self._number])
        self._on_gpus = share.get("GPU", 0) > 0
        strategies = import_module("ray.util.scheduling_strategies")
        strategy = strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=self._number
        )
        actor = ray.remote(ReplicaActor).options(
            num_cpus=share.pop("CPU", 0),
            num_gpus=share.pop("GPU", 0),
            resources=share,
            scheduling_strategy=strategy,
        )
        return actor.remote()

    def _server_environment(self, token: str) -> dict[str, str]:
        """Return what a server is to find in its environment beside what its node has there."""
        environment = self._environment(token)
        return {
            name: value
            for name, value in environment.items()
            if name.startswith("VLLM_") or os.environ.get(name) != value
        }


class ReplicaActor:
    """An actor that runs one server on its node."""

    def __init__(self) -> None:
        remove_stale_folders()
        self._folder = Path(tempfile.mkdtemp(prefix=_FOLDER))
        self._alive = FileLock(self._folder / _LOCK)
        self._alive.acquire()
        self._log = self._folder / "vllm.log"
        self._server: GuardedProgram | None = None

    def start(
        self,
        command: Sequence[str],
        files: Mapping[str, bytes],
        environment: Mapping[str, str],
        on_gpus: bool,
    ) -> tuple[str, int]:
        """Start the server, and return where it listens."""
        model = self._folder / "model"
        model.mkdir()
        for name, content in files.items():
            (model / name).write_bytes(content)
        host, port = free_place()
        here = {"--model": str(model), "--host": host, "--port": str(port)}
        self._server = GuardedProgram(
            [sys.executable, *adapted(command[1:], here)],
            env={**os.environ, **environment, **({} if on_gpus else NO_GPUS)},
            folder=self._folder,
            log_file=self._log,
        )
        return host, port

    def ended(self) -> str | None:
        """Say what ended the server; None: it runs."""
        code = None if self._server is None else self._server.wait(0)
        if code is None:
            return None
        with self._log.open("rb") as log:
            log.seek(max(0, self._log.stat().st_size - _TAIL_BYTES))
            cause = root_cause(log.read().decode(errors="replace"))
        log_location = f"{self._log} on {socket.gethostname()}"
        return f"{cause or f'it ended with status {code}'} (all of it is in {log_location})"

    def stop(self) -> None:
        """End the server; what one that failed wrote stays for a day."""
        if self._server is not None and self._server.wait(0) is None:
            self._server.stop()
            shutil.rmtree(self._folder, ignore_errors=True)


def remove_stale_folders() -> None:
    """Remove what actors on this node left that were killed, or whose server failed, a day ago."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        # of another user, removed in this moment, or of an actor that lives
        with contextlib.suppress(PermissionError, FileNotFoundError, Timeout):
            newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
            if time.time() - newest > _KEPT_SECONDS:
                with FileLock(folder / _LOCK, blocking=False):
                    shutil.rmtree(folder, ignore_errors=True)


def portable(command: Sequence[str]) -> tuple[list[str], dict[str, bytes]]:
    """Return a command, and the files of the model's folder that it names."""
    folder = Path(command[command.index("--model") + 1])
    return list(command), {path.name: path.read_bytes() for path in folder.iterdir()}


def adapted(command: Sequence[str], options: Mapping[str, str]) -> list[str]:
    """Return a command with other values of options that it has."""
    changed = list(command)
    for name, value in options.items():
        changed[changed.index(name) + 1] = value
    return changed
