import stat
import sys
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
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
            lora_config=None,
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
        "max_lora_rank": 0,
        "vllm": "0.30.1",
    }


@pytest.mark.parametrize(
    ("server", "variable", "rank"), [(True, "1", 16), (True, "0", 0), (False, "0", 16)]
)
def test_a_server_takes_adapters_only_where_it_is_allowed_to(
    monkeypatch: pytest.MonkeyPatch, server: bool, variable: str, rank: int
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", variable)
    worker = Worker()
    worker.vllm_config.lora_config = SimpleNamespace(max_lora_rank=16)
    if not server:
        worker.vllm_config.weight_transfer_config = None
    assert worker.lrlhf_describe()["max_lora_rank"] == rank


class Wrapping(nn.Module):
    """A layer that an adapter is added to: what it lacks it takes from the one inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.base_layer = inner

    def __getattr__(self, name: str) -> Any:
        inner = self.__dict__["_modules"].get("base_layer")
        return inner if name == "base_layer" else getattr(inner, name)


def test_a_layer_with_an_adapter_is_packed_once_and_inside() -> None:
    worker = Worker()
    worker.model = nn.Sequential(Wrapping(worker.packed_layer))
    load(worker, {"a": torch.ones(1)})
    assert worker.packer.packed == [worker.packed_layer]


def test_an_adapter_is_written_and_removed_and_no_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    worker = Worker()
    name = "base_model.model.layer.lora_A.weight"
    sent = torch.arange(6.0).view(2, 3)
    arrived, _ = load(worker, {name: sent})
    assert arrived == {name: str(int(fingerprint(sent, turn=0)))}
    sent.zero_()  # a buffer that is used again
    assert not worker.loaded
    assert not worker.packer.packed
    folder = Path(worker.lrlhf_write_adapter("abc", '{"r": 2}'))
    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert (folder / "adapter_config.json").read_text() == '{"r": 2}'
    stored = load_file(folder / "adapter_model.safetensors")
    assert stored.keys() == {name}
    assert torch.equal(stored[name], torch.arange(6.0).view(2, 3))
    worker.lrlhf_remove_adapter("abc")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="other characters"):
        worker.lrlhf_remove_adapter("../abc")
