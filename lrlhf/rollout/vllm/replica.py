"""What is done with every server that has the policy's weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from lrlhf.background import in_background
from lrlhf.rollout.engines.synced_engine import EngineFailure
from lrlhf.rollout.vllm.client import ServerClient

ResultT = TypeVar("ResultT")

_RESET_SECONDS = 10.0


@dataclass
class Replica:
    """A server that takes part in pushes, as one rank talks to it."""

    number: int
    client: ServerClient
    described: dict[str, Any] = field(default_factory=dict)
    """What its workers tell of it."""
    failed: bool = False
    """Whether it did not do something that all were asked for."""
    _adapter: str = ""

    def load_adapter(self, version: str, settings: str, seconds: float) -> None:
        """Have the server compute with what was sent, for requests that name this version.

        Args:
            version: Name of the adapter.
            settings: What ``adapter_config.json`` says.
            seconds: How long each step may take.
        """
        call = partial(self.client.call_workers, timeout=seconds)
        folder, *_ = call("lrlhf_write_adapter", version, settings)
        # under a new name, as one that is replaced under its old would be read at every step
        body = {"lora_name": version, "lora_path": folder}
        self.client.post("/v1/load_lora_adapter", body, timeout=seconds)
        call("lrlhf_remove_adapter", version)
        if self._adapter:
            body = {"lora_name": self._adapter}
            self.client.post("/v1/unload_lora_adapter", body, timeout=seconds)
        self._adapter = version

    def reset_caches(self, seconds: float) -> None:
        """Have the server forget keys, values and image features.

        Args:
            seconds: How long each step may take.
        """
        deadline = time.monotonic() + _RESET_SECONDS
        while not self.client.post("/reset_prefix_cache", timeout=seconds)["success"]:
            # the blocks of a response that was just answered are given back a moment later
            if time.monotonic() > deadline:
                raise EngineFailure("vLLM did not reset its prefix cache: requests still run")
            time.sleep(0.1)
        for path in ("/reset_mm_cache", "/reset_encoder_cache"):
            self.client.post(path, timeout=seconds)


def on_all(replicas: Sequence[Replica], act: Callable[[Replica], ResultT]) -> list[ResultT]:
    """Act on all replicas at once; raises what went wrong, once all are through."""

    def acted(one: Replica) -> ResultT:
        try:
            return act(one)
        except EngineFailure:
            one.failed = True
            raise

    futures = [in_background(partial(acted, one), name="vllm-replica") for one in replicas]
    wait(futures)
    return [future.result() for future in futures]
