"""Both ends of a weight transfer, with vLLM's classes and without its server."""

import importlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lrlhf.rollout import EngineFailure, PolicyWeights
from lrlhf.rollout.engines.policy_weights import AdapterWeights, compare_fingerprints
from lrlhf.rollout.vllm.vllm_base import import_transfer
from lrlhf.vllm_worker import gloo
from lrlhf.vllm_worker.fingerprint import Fingerprinted, as_text
from lrlhf.vllm_worker.model_access import forget_broken_update
from tests.vllm.models import build_policy
from tests.vllm.workers import Workers

SECONDS = 3.0
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def ends() -> ModuleType:
    # what an update imports for the first time takes longer than a step may
    for name in ("model_loader.reload", "layers.fusion.mm_input_norm"):
        importlib.import_module(f"vllm.model_executor.{name}")
    return import_transfer()


@pytest.fixture
def connected(
    ends: ModuleType, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[Any, Workers, PolicyWeights]]]:
    """The trainer's end, the workers, and the policy's weights."""
    # several buckets, and a tensor that is larger than one
    monkeypatch.setattr(gloo, "BUCKET", 40_000)
    opened = []

    def build(
        count: int = 1, lora: LoraConfig | None = None, *, delta: bool = False
    ) -> tuple[Any, Workers, PolicyWeights]:
        policy = build_policy(tokenizer)
        weights = PolicyWeights(get_peft_model(policy, lora) if lora else policy)
        workers = Workers(count)
        transfer = ends.WeightTransfer(
            "gloo",
            [ends.Member(workers, count)],
            weights,
            torch.float32,
            host="127.0.0.1",
            timeout=SECONDS,
            adapter=AdapterWeights(weights) if lora else None,
            delta=delta,
        )
        opened.append(transfer)
        return transfer, workers, weights

    yield build
    for transfer in opened:
        transfer.close()


def passing(weights: PolicyWeights, turn: int = 1) -> Fingerprinted:
    return Fingerprinted(weights.tensors(torch.float32), turn=turn)


@pytest.mark.parametrize("count", [1, 2])
def test_every_worker_gets_every_weight_and_the_version_says_which(connected, count: int) -> None:
    transfer, workers, weights = connected(count)
    workers.steps.clear()
    for turn in (1, 2):
        tensors = passing(weights, turn)
        transfer.push(tensors, f"turn{turn}")
        assert workers.version == f"turn{turn}"
        for model, engine in zip(workers.models, workers.engines, strict=True):
            compare_fingerprints(as_text(tensors.seen), engine.arrived())
            expected = dict(weights.tensors(torch.float32))
            assert list(model.loaded) == list(expected)
            assert all(torch.equal(model.loaded[name], one) for name, one in expected.items())
    # nothing computes while weights are mixed, and they have no version meanwhile
    assert workers.steps == 2 * [
        "/pause?mode=abort&clear_cache=false",
        "/update_weight_version",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
    ]


def bits(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, bytes]:
    return {name: bytes(one.contiguous().numpy().tobytes()) for name, one in tensors}


def test_pushes_of_changes_give_every_worker_what_full_ones_do(connected) -> None:
    (delta, changing, weights), (full, plain, others) = (
        connected(2, delta=True),
        connected(1, delta=False),
    )
    first, second = weights.model, others.model
    norm, projection = NORM, "model.layers.0.mlp.up_proj.weight"
    generator = torch.Generator().manual_seed(0)

    def few(model: nn.Module) -> None:
        model.get_parameter(norm)[3:5] = torch.tensor([-0.0, torch.nan])
        model.get_parameter(projection)[7, 11] += 1e-6

    def many(model: nn.Module) -> None:
        for weight in model.parameters():
            weight += torch.randn(weight.shape, generator=generator.manual_seed(1))

    whole = sum(each.nbytes for each in second.parameters())  # tied ones are listed once
    assert whole > 2 * gloo.BUCKET
    # of few changes each has a number of four bytes, and one or more for its position
    # (11 is in row 7 of 64 columns: 459 unchanged words before it)
    sizes = [(whole, "all"), (2 * 5 + 6, "few"), (0, "none"), (whole, "all")]
    for turn, (change, (size, _)) in enumerate(
        zip((None, few, None, many), sizes, strict=True), start=1
    ):
        for model in (first, second):
            with torch.no_grad():
                if change is not None:
                    change(model)
        tensors, expected = passing(weights, turn), passing(others, turn)
        assert delta.push(tensors, f"turn{turn}", afresh=turn == 1) == (size, whole)
        assert full.push(expected, f"turn{turn}", afresh=False) == (whole, whole)
        for model, engine in zip(changing.models, changing.engines, strict=True):
            compare_fingerprints(as_text(expected.seen), engine.arrived())
            assert bits(model.loaded.items()) == bits(plain.models[0].loaded.items())
            model.loaded.clear()  # every push loads all weights
    assert bits(plain.models[0].loaded.items()) == bits(weights.tensors(torch.float32))


def test_a_copy_that_has_gone_wrong_shows_in_the_next_push_and_is_mended_afresh(connected) -> None:
    transfer, workers, weights = connected(delta=True)
    transfer.push(passing(weights), "first")
    workers.engines[0]._held[NORM][3] += 1e-3
    transfer.push(tensors := passing(weights, 2), "second", afresh=False)
    with pytest.raises(RuntimeError, match=f"other values of the weight {NORM}"):
        compare_fingerprints(as_text(tensors.seen), workers.engines[0].arrived())
    workers.engines[0]._held["that the policy has lost"] = torch.zeros(1)
    sent, whole = transfer.push(tensors := passing(weights, 3), "third", afresh=True)
    compare_fingerprints(as_text(tensors.seen), workers.engines[0].arrived())
    assert sent == whole


def test_a_push_that_was_broken_off_is_followed_by_a_complete_one(
    connected, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer, workers, weights = connected(delta=True)
    transfer.push(passing(weights), "first")
    with torch.no_grad():
        weights.model.get_parameter(NORM)[3] += 1
    with monkeypatch.context() as patch:
        patch.setattr(transfer._engine, "send_weights", raising(KeyboardInterrupt(), ""))
        with pytest.raises(KeyboardInterrupt):
            transfer.push(passing(weights, 2), "second", afresh=False)
    sent, whole = transfer.push(tensors := passing(weights, 3), "third", afresh=False)
    compare_fingerprints(as_text(tensors.seen), workers.engines[0].arrived())
    assert sent == whole


def test_a_model_that_writes_into_what_it_loads_does_not_spoil_the_copies(connected) -> None:
    transfer, workers, weights = connected(delta=True)
    load = workers.models[0].load_weights

    def load_and_clear(tensors: Iterable[tuple[str, Tensor]]) -> None:
        load((name, tensor.zero_()) for name, tensor in tensors)  # as vLLM's gpt-oss does

    workers.models[0].load_weights = load_and_clear
    for turn in (1, 2):
        transfer.push(tensors := passing(weights, turn), f"turn{turn}", afresh=turn == 1)
        compare_fingerprints(as_text(tensors.seen), workers.engines[0].arrived())


def test_changes_keep_whole_tensors_aligned_in_vllms_packed_buffers(
    tokenizer: PreTrainedTokenizerBase, ends: ModuleType
) -> None:
    packed = importlib.import_module("vllm.distributed.weight_transfer.packed_tensor")
    policy = build_policy(tokenizer)
    weights = PolicyWeights(policy)
    cpu = torch.device("cpu")
    source = ends.PolicySource(weights, torch.bfloat16, cpu, None, delta=True)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        return ((name, one) for name, one in weights.tensors(torch.bfloat16))

    source.prepare(tensors(), full=True, afresh=True)
    with torch.no_grad():
        first, *_, last = policy.parameters()
        first.view(-1)[5] += 1  # three bytes, before what is sent whole
        last += 1
    source.prepare(tensors(), full=True, afresh=False)
    chunk = packed.pack_tensors(iter(source), lambda item: item[1], 2**20)
    arrived = packed.unpack_tensor(
        chunk.packed_tensor, chunk.names, chunk.shapes, chunk.dtypes, chunk.tensor_sizes
    )
    assert sorted(tensor.dtype.itemsize for _, tensor in arrived) == [1, 2]
    assert sum(tensor.nbytes for _, tensor in arrived) == 2 * last.numel() + 3


def test_after_a_new_connection_nothing_is_left_of_earlier_copies(
    connected, ends: ModuleType
) -> None:
    transfer, workers, weights = connected(delta=True)
    transfer.push(passing(weights), "first")
    workers.engines[0]._held["of another policy"] = torch.zeros(1)
    workers.models[0].fault = raising(KeyError("no such layer"), at=NORM)
    with pytest.raises(EngineFailure, match="no such layer"):
        transfer.push(passing(weights, 2), "second", afresh=False)
    workers.models[0].fault = lambda name: None
    again = ends.WeightTransfer(
        "gloo",
        [ends.Member(workers, 1)],
        weights,
        torch.float32,
        host="127.0.0.1",
        timeout=SECONDS,
        delta=True,
    )
    sent, whole = again.push(tensors := passing(weights, 3), "third", afresh=False)
    assert sent == whole
    compare_fingerprints(as_text(tensors.seen), workers.engines[0].arrived())
    again.close()


def test_the_workers_of_all_servers_get_the_weights_in_one_pass(
    ends: ModuleType, tokenizer: PreTrainedTokenizerBase
) -> None:
    weights = PolicyWeights(build_policy(tokenizer))
    servers = [Workers(1), Workers(2)]
    members = [ends.Member(one, len(one.models)) for one in servers]
    transfer = ends.WeightTransfer(
        "gloo", members, weights, torch.float32, host="127.0.0.1", timeout=5.0
    )
    tensors = passing(weights)  # can be gone through once only
    transfer.push(tensors, "new", in_flight=True)
    for one in servers:
        assert one.version == "new"
        assert one.steps[1] == "/pause?mode=keep&clear_cache=false"
        # with the keys and values that connectors keep elsewhere, as clear_cache does
        assert one.steps[2] == "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
        for engine in one.engines:
            compare_fingerprints(as_text(tensors.seen), engine.arrived())
    # with one of them gone nothing comes through, and the others do not wait for it
    servers[0].fails["/update_weights"] = EngineFailure("gone")
    with pytest.raises(EngineFailure, match="gone"):
        transfer.push(passing(weights, 2), "newer")
    transfer.close()
    rest = ends.WeightTransfer(
        "gloo", members[1:], weights, torch.float32, host="127.0.0.1", timeout=5.0
    )
    rest.push(tensors := passing(weights, 3), "newest")
    assert [one.version for one in servers] == ["newer, incomplete", "newest"]
    for engine in servers[1].engines:
        compare_fingerprints(as_text(tensors.seen), engine.arrived())
    rest.close()


@pytest.mark.parametrize("offset", [1, 3])
def test_what_nccl_is_told_to_begin_counting_at(ends: ModuleType, offset: int) -> None:
    told: list[Any] = []
    members = [
        ends.Member(SimpleNamespace(url="", post=lambda *a, **_: told.append(a)), count)
        for count in (2, 4)
    ]
    client = ends.SyncClient(members, 5.0)
    client.init_weight_transfer_engine({"rank_offset": offset, "world_size": 7})
    offsets = sorted(body["init_info"]["rank_offset"] for _, body in told)
    assert offsets == [offset, offset + 2]
    assert client.workers == 6


def test_fingerprints_are_those_of_what_arrives_not_of_what_was_sent(
    connected, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer, workers, weights = connected()
    pack = gloo.pack

    def flipped(tensors: list[Tensor]) -> Tensor:
        data = pack(tensors).clone()
        data[5] ^= 1
        return data

    monkeypatch.setattr("lrlhf.rollout.vllm.transfer.pack", flipped)
    tensors = passing(weights)
    transfer.push(tensors, "new")
    with pytest.raises(RuntimeError, match=r"other values of the weight model\.embed_tokens"):
        compare_fingerprints(as_text(tensors.seen), workers.engines[0].arrived())


def raising(error: BaseException, at: str) -> Callable[..., Any]:
    def check(name: str = "") -> None:
        if name == at:
            raise error

    return check


@pytest.mark.parametrize("step", ["/start_weight_update", "/update_weights", "worker", "hang"])
def test_a_push_that_fails_goes_through_all_tensors_and_ends_in_time(connected, step: str) -> None:
    transfer, workers, weights = connected(2)
    if step == "worker":
        workers.models[1].fault = raising(KeyError("no such layer"), at=NORM)
        told = "/update_weights answered with 500: 'no such layer'"
    elif step == "hang":
        workers.models[1].fault = lambda name: time.sleep(3 * SECONDS)
        told = "/update_weights"
    else:
        workers.fails[step] = EngineFailure(f"{step} broke")
        told = f"{step} broke"
    tensors = passing(weights)
    started = time.monotonic()
    with pytest.raises(EngineFailure, match=told):
        transfer.push(tensors, "new")
    # other ranks may need this one's parts of each
    assert len(tensors.seen) == len(list(weights.layout(torch.float32)))
    assert time.monotonic() - started < (2.5 * SECONDS if step == "hang" else SECONDS)
    assert workers.version.endswith("incomplete")
    # workers wait for each other in a broadcast: who fails first there may not be the cause
    assert transfer.failed == ([workers] if step == "/start_weight_update" else [])


def test_a_policy_that_cannot_be_read_is_told_as_it_is(connected) -> None:
    transfer, workers, weights = connected()

    def broken() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights.tensors(torch.float32):
            if name == NORM:
                raise IndexError("no shard")
            yield name, tensor

    with pytest.raises(IndexError, match="no shard"):
        transfer.push(Fingerprinted(broken(), turn=1), "new")
    assert workers.version.endswith("incomplete")


def test_weights_that_are_not_as_announced_are_refused(connected) -> None:
    transfer, _, weights = connected()
    tensors = [(name, one) for name, one in weights.tensors(torch.float32) if name != NORM]
    with pytest.raises(ValueError, match="yielded"):
        transfer.push(Fingerprinted(tensors, turn=1), "new")


def test_workers_that_do_not_come_are_told_of(
    ends: ModuleType, tokenizer: PreTrainedTokenizerBase
) -> None:
    workers, weights = Workers(1), PolicyWeights(build_policy(tokenizer))
    members = [ends.Member(workers, 1)]
    for error in (EngineFailure("there is no engine"), ValueError("unknown field")):
        workers.fails["/init_weight_transfer_engine"] = error
        with pytest.raises(type(error), match=str(error)):
            ends.WeightTransfer(
                "gloo", members, weights, torch.float32, host="127.0.0.1", timeout=5.0
            )


def test_a_connection_that_comes_about_too_late_is_left(
    ends: ModuleType, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    come, left = threading.Event(), threading.Event()

    def init(*_: Any, **__: Any) -> Any:
        assert come.wait(60)
        return SimpleNamespace(shutdown=left.set)

    monkeypatch.setattr(ends.WeightTransferTrainerFactory, "trainer_init", init)
    weights, members = PolicyWeights(build_policy(tokenizer)), [ends.Member(Workers(1), 1)]
    with pytest.raises(EngineFailure, match="did not come for weights at 127"):
        ends.WeightTransfer("gloo", members, weights, torch.float32, host="127.0.0.1", timeout=0.1)
    assert not left.is_set()
    come.set()
    assert left.wait(60)


def test_another_trainer_takes_the_workers_over(connected, ends: ModuleType) -> None:
    first, workers, weights = connected()
    members = [ends.Member(workers, 1)]
    second = ends.WeightTransfer(
        "gloo", members, weights, torch.float32, host="127.0.0.1", timeout=SECONDS
    )
    second.push(passing(weights), "second")
    assert workers.version == "second"
    started = time.monotonic()
    with pytest.raises(EngineFailure, match="another trainer has connected to this engine"):
        first.push(passing(weights), "new")
    assert time.monotonic() - started < SECONDS  # nothing was waited for
    second.close()


def test_an_adapter_comes_before_the_weights_or_alone(
    connected, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    transfer, workers, weights = connected(lora=config)
    adapter, model, engine = AdapterWeights(weights), workers.models[0], workers.engines[0]
    begun: list[nn.Module] = []
    engines = importlib.import_module("lrlhf.vllm_worker.transfer_engines")
    receiver = engines.NCCLWeightTransferEngine
    monkeypatch.setattr(receiver, "start_weight_update", lambda self: begun.append(self.model))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    base = dict(weights.tensors(torch.float32, adapters=False))
    for whole in (True, False):
        parts = {**dict(adapter.tensors(torch.float32)), **(base if whole else {})}
        tensors = Fingerprinted(parts.items(), turn=1)
        transfer.push(tensors, "new", full=whole)
        compare_fingerprints(as_text(tensors.seen), engine.arrived())
        # the model is given none of it, and without weights is not even touched
        assert list(model.loaded) == (list(base) if whole else [])
        assert begun == [model]
        model.loaded.clear()
        kept = load_file(engine.adapter.write("token", "{}") / "adapter_model.safetensors")
        expected = dict(adapter.tensors(torch.float32))
        assert kept.keys() == expected.keys()
        assert all(torch.equal(kept[name], one) for name, one in expected.items())


class Blocking:
    """A group whose members never come."""

    def __init__(self) -> None:
        self.ended, self.calls = threading.Event(), 0

    def broadcast(self, tensor: Tensor, src: int, stream: str) -> None:
        assert (src, stream) == (0, "a stream")
        self.calls += 1
        assert self.ended.wait(20)

    def destroy(self) -> None:
        assert not self.ended.is_set(), "given up twice"
        self.ended.set()


def test_a_broadcast_that_nobody_takes_is_freed_from_another_thread(
    ends: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as NCCL waits inside a kernel, or before it, until its communicator is given up
    monkeypatch.setattr("lrlhf.rollout.vllm.transfer._LOCK_SECONDS", 0.1)
    inner = Blocking()
    group = ends.BreakableGroup(inner)
    timer = threading.Timer(0.2, group.break_off, [EngineFailure("too late")])
    timer.start()
    for _ in range(3):
        group.broadcast(torch.zeros(1), src=0, stream="a stream")
    timer.join()
    assert inner.calls == 1
    assert str(group.failure) == "too late"
    group.destroy()
    assert str(group.failure) == "too late"


@pytest.mark.parametrize("transport", ["nccl", "ipc"])
def test_what_vllms_own_engines_are_told(
    ends: ModuleType,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
) -> None:
    engine = SimpleNamespace(model_update_group=Blocking(), send_weights=lambda: None)
    if transport == "ipc":
        del engine.model_update_group
    told: list[Any] = []

    def init(info: Any, *, client: Any, source: Any) -> Any:
        assert client.failure is None
        told.append((info, source.metadata()))
        return engine

    done: list[Any] = []
    monkeypatch.setattr(ends.WeightTransferTrainerFactory, "trainer_init", init)
    monkeypatch.setattr(ends, "_BUFFER", 1000)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: told.append(device))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    monkeypatch.setattr(torch.cuda, "synchronize", done.append)
    weights = PolicyWeights(build_policy(tokenizer))
    members = [ends.Member(Workers(2), 2), ends.Member(Workers(1), 1)]
    transfer = ends.WeightTransfer(
        transport, members, weights, torch.bfloat16, host="127.0.0.1", timeout=5.0
    )
    device, (info, metadata) = told
    assert device == torch.device("cuda:3")  # of a thread of its own
    assert info.backend == transport
    assert info.is_sender
    assert info.packed
    assert info.packed_buffer_size_bytes == 260 * 64 * 2  # the embedding, in bfloat16
    assert {one.dtype for one in metadata} == {torch.bfloat16}
    if transport == "nccl":
        assert (info.master_address, info.world_size) == ("127.0.0.1", 4)
        assert isinstance(engine.model_update_group, ends.BreakableGroup)
    transfer.push(passing(weights), "new")
    # the optimizer's step is over before other streams read; and memory is there for the engine
    assert done == [device, *(["emptied"] if transport == "ipc" else [])]


class Fused(nn.Module):
    """A layer whose weight comes in three parts, as vLLM's of queries, keys and values do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(torch.zeros(6, 2), requires_grad=False)

        def take(param: Tensor, part: Tensor, place: int) -> None:  # vLLM asks for this name
            param.data[2 * place : 2 * place + 2].copy_(part)

        self.weight.weight_loader = take


def test_a_push_after_one_that_broke_off_inside_a_layer_is_whole(ends: ModuleType) -> None:
    del ends
    reload = importlib.import_module("vllm.model_executor.model_loader.reload")
    model = nn.Sequential(Fused(), Fused())
    reload.record_metadata_for_reloading(model)

    def push(value: float, parts: int = 6) -> None:
        reload.initialize_layerwise_reload(model)
        forget_broken_update(model)
        weights: list[Any] = [weight for _, weight in model.named_parameters()]
        for number in range(parts):
            weight = weights[number // 3]
            weight.weight_loader(weight, torch.full((2, 2), value + number % 3), number % 3)
        if parts == 6:
            reload.finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.float32))

    push(10.0)
    push(20.0, parts=4)  # one of the second layer's three
    push(30.0)
    expected = torch.tensor([30.0, 30, 31, 31, 32, 32])
    assert all(torch.equal(layer.weight[:, 0], expected) for layer in model)  # type: ignore[index]
