import sys
from collections.abc import Iterable
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lrlhf.vllm_worker.extension import WeightReceiver
from lrlhf.vllm_worker.fingerprint import Fingerprinted, fingerprint


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
            weight_transfer_config=SimpleNamespace(backend="lrlhf_gloo"),
        )

    def reload_weights(self, *, weights_iterator: Iterable[tuple[str, Tensor]]) -> None:
        assert not self.packer.packed, "packed before the weights were there"
        for count, (name, tensor) in enumerate(weights_iterator, start=1):
            self.loaded[name] = tensor
            if count == self._takes:
                return


def load(worker: Worker, weights: dict[str, Tensor]) -> tuple[dict[str, str], Fingerprinted]:
    passing = Fingerprinted(weights.items(), turn=0)
    return worker.lrlhf_load(passing), passing


def test_fingerprints_tell_what_was_loaded_and_not_what_was_left() -> None:
    weights = {"a": torch.ones(1), "b": torch.ones(2), "c": torch.ones(3)}
    arrived, passing = load(Worker(takes=2), weights)
    assert arrived == {name: str(int(fingerprint(weights[name], turn=0))) for name in "ab"}
    assert [name for name, _ in passing] == ["c"]


@pytest.fixture(autouse=True)
def _some_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker runs inside vLLM, which need not be installed here."""
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.30.1", raising=False)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_a_cpu_packed_copies_of_weights_are_made_again(device: str) -> None:
    worker = Worker(device=device)
    load(worker, {"a": torch.ones(1)})
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
        "transfer": "lrlhf_gloo",
        "vllm": "0.30.1",
    }
