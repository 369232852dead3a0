"""A server's workers without the server: vLLM's receiving ends in threads."""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lrlhf.rollout import EngineFailure


class Keeps(nn.Module):
    """A worker's model, which keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, Tensor] = {}
        self.fault: Callable[[str], Any] = lambda name: None

    def load_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            self.fault(name)
            self.loaded[name] = tensor


class Workers:
    """Stands for a server and its client: every worker takes each step in a thread of its own."""

    url = "http://nowhere"

    def __init__(self, count: int) -> None:
        from lrlhf.vllm_worker.transfer_engines import GlooEngine  # noqa: PLC0415  loads vLLM

        self.models = [Keeps() for _ in range(count)]
        self.steps: list[str] = []
        self.version = "none yet"
        self.fails: dict[str, Exception] = {}
        self.engines = []
        for rank, model in enumerate(self.models):
            parallel = SimpleNamespace(data_parallel_index=0, world_size=count, rank=rank)
            config = SimpleNamespace(parallel_config=parallel, model_config=None)
            self.engines.append(GlooEngine(None, config, torch.device("cpu"), model))

    def post(self, path: str, body: dict[str, Any] | None = None, *, timeout: float) -> None:
        self.steps.append(path)
        if path in self.fails:
            raise self.fails[path]
        if path == "/update_weight_version":
            self.version = (body or {})["new_version"]
        errors: list[Exception] = []

        def step(engine: Any) -> None:
            try:
                self._step(engine, path, body or {})
            except Exception as error:  # noqa: BLE001  as the server would tell of it
                errors.append(error)

        threads = [threading.Thread(target=step, args=(engine,)) for engine in self.engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
        if any(thread.is_alive() for thread in threads):
            raise EngineFailure(f"{path} took longer than {timeout} s")
        if errors:
            raise EngineFailure(f"{path} answered with 500: {errors[0]}") from errors[0]
        if path == "/finish_weight_update":
            self.version = (body or {})["weight_version"]

    def _step(self, engine: Any, path: str, body: dict[str, Any]) -> None:
        if path == "/init_weight_transfer_engine":
            engine.init_transfer_engine(engine.parse_init_info(body["init_info"]))
        elif path == "/start_weight_update":
            engine.start_weight_update()
        elif path == "/update_weights":
            engine.receive_weights(engine.parse_update_info(body["update_info"]))
        elif path == "/finish_weight_update":
            engine.finish_weight_update()
