import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lrlhf.vllm_worker.extension import WeightReceiver
from lrlhf.vllm_worker.fingerprint import Fingerprinted, fingerprint
from lrlhf.vllm_worker.stream import Sender


class LogprobsMode(Enum):
    PROCESSED = "processed_logprobs"


class Packer:
    """Stands for the method that packs a layer's weight for a kernel."""

    def __init__(self) -> None:
        self.packed: list[nn.Module] = []

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        self.packed.append(layer)


class Worker(WeightReceiver):
    """As much of vLLM's worker as the extension uses; keeps what it is given."""

    def __init__(self, *, device: str = "cpu", takes: int | None = None) -> None:
        self.device = SimpleNamespace(type=device)
        self.loaded: dict[str, Tensor] = {}
        self.packer = Packer()
        self._takes = takes
        plain, packed, empty = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
        packed.cpu_linear, packed.quant_method = object(), self.packer  # type: ignore[assignment]
        empty.weight = nn.Parameter(torch.empty(0))
        empty.cpu_linear, empty.quant_method = object(), self.packer  # type: ignore[assignment]
        self.packed_layer = packed
        self.model = nn.Sequential(plain, packed, empty, nn.ReLU())
        self.model_runner = SimpleNamespace(get_model=lambda: self.model)
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                served_model_name=["tiny", "other name"],
                model="/folder",
                dtype=torch.bfloat16,
                max_model_len=256,
                logprobs_mode="processed_logprobs",
            ),
            parallel_config=SimpleNamespace(world_size=2),
        )

    def reload_weights(self, *, weights_iterator: Iterable[tuple[str, Tensor]]) -> None:
        assert not self.packer.packed, "packed before the weights were there"
        for count, (name, tensor) in enumerate(weights_iterator, start=1):
            self.loaded[name] = tensor
            if count == self._takes:
                return


def test_weights_of_the_same_process_are_not_looked_at_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(
        "lrlhf.vllm_worker.fingerprint.fingerprint",
        lambda tensor: taken.append(tensor.numel()) or tensor.numel(),
    )
    passing = Fingerprinted({"a": torch.ones(1), "b": torch.ones(2), "c": torch.ones(3)}.items())
    arrived = Worker(takes=2).lrlhf_load(passing)
    assert arrived == {"a": "1", "b": "2"}
    assert [name for name, _ in passing] == ["c"]
    assert passing.seen == {"a": "1", "b": "2", "c": "3"}
    assert taken == [1, 2, 3]


@pytest.fixture(autouse=True)
def _some_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker runs inside vLLM, which need not be installed here."""
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.30.1", raising=False)


def test_the_last_push_is_known_by_its_token_once_it_is_whole() -> None:
    worker = Worker()
    assert worker.lrlhf_last_push() == ""
    with Sender("127.0.0.1", receivers=1, timeout=10.0) as sender, ThreadPoolExecutor(1) as threads:
        arrived = threads.submit(
            worker.lrlhf_receive, "127.0.0.1", str(sender.port), sender.token, "10.0"
        )
        weights = {name: torch.randn(50) for name in "abcdef"}
        sender.send(weights.items())
        numbers = arrived.result(10)
    assert worker.lrlhf_last_push() == sender.token
    assert numbers == {name: str(fingerprint(tensor)) for name, tensor in weights.items()}
    assert all(torch.equal(worker.loaded[name], tensor) for name, tensor in weights.items())
    worker.packer.packed.clear()
    with pytest.raises(ConnectionError):
        worker.lrlhf_receive("127.0.0.1", str(sender.port), "another", "1.0")
    assert worker.lrlhf_last_push() == ""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_a_cpu_packed_copies_of_weights_are_made_again(device: str) -> None:
    worker = Worker(device=device)
    worker.lrlhf_load([("a", torch.ones(1))])
    # neither the layer without a packed copy nor the one whose weight was given up for it
    assert worker.packer.packed == ([worker.packed_layer] if device == "cpu" else [])


@pytest.mark.parametrize(
    ("served", "name", "mode"),
    [
        (["tiny", "other name"], "tiny", "processed_logprobs"),
        ("tiny", "tiny", LogprobsMode.PROCESSED),
        (None, "/folder", LogprobsMode.PROCESSED),
    ],
)
def test_the_engine_is_described_in_plain_json_types(served: Any, name: str, mode: Any) -> None:
    worker = Worker()
    worker.vllm_config.model_config.served_model_name = served
    worker.vllm_config.model_config.logprobs_mode = mode
    assert worker.lrlhf_describe() == {
        "model": name,
        "dtype": "bfloat16",
        "max_model_len": 256,
        "logprobs_mode": "processed_logprobs",
        "workers": 2,
        "vllm": "0.30.1",
    }
