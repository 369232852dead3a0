"""Ranks that act together in an engine start it anew together, or give up together."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lrlhf.rollout import EngineFailure, Sampling, VLLMServerEngine
from lrlhf.rollout.responses import token_prompts
from lrlhf.rollout.vllm.dispatch import Traffic
from tests.conftest import build_language_model, build_tokenizer
from tests.rollout.copy_engine import CopyEngine

pytestmark = pytest.mark.slow


class SharedEngine(CopyEngine):
    @property
    def _acts_with_ranks(self) -> bool:
        return True


def process(rank: int, folder: Path) -> None:
    """One rank of two; the engine of the second one fails, then its call does."""
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    tokenizer = build_tokenizer()
    engine = SharedEngine(fail={"respond": [1]} if rank == 1 else {})
    engine.attach(build_language_model(tokenizer), tokenizer)
    engine.push(0)
    prompts = token_prompts([tokenizer("hi")["input_ids"]])

    def generate(tokens: int) -> torch.Tensor:
        sampling = Sampling(max_new_tokens=tokens)
        return engine.generate(prompts, sampling, num_generations=1, seeds=[3]).input_ids

    ids, calls, restarts = generate(4), dict(engine.calls), engine.restarts
    raised: Exception | None = None
    try:
        generate(10_000 if rank == 1 else 4)
    except (EngineFailure, ValueError) as error:
        raised = error
    late = SharedEngine(fail={"start": [1]} if rank == 1 else {})
    late.attach(engine._policy, tokenizer)
    late.push(0)
    found = {"ids": ids.tolist(), "calls": calls, "restarts": restarts, "late": late.restarts}
    torch.save({**found, "raised": repr(raised)}, folder / f"rank{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.timeout(300)
def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    multiprocessing.start_processes(process, (tmp_path,), nprocs=2, start_method="fork")
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    # both start a second engine, push to it, and get the same responses
    for rank in (first, second):
        assert rank["restarts"] == 1
        assert {rank["calls"][name] for name in ("start", "send", "respond")} == {2}
    assert first["ids"] == second["ids"]
    # nor does one rank go on with an engine that another could not start
    assert first["late"] == second["late"] == 1
    # what no restart mends ends both
    assert first["raised"].startswith("EngineFailure('the engine failed on another rank, which ")
    assert "max_new_tokens is 10000" in second["raised"]


class BrokenOffPush:
    """The trainer's end of a transfer; that of the second rank fails after a few tensors."""

    def __init__(self) -> None:
        self.pushed = 0

    def push(self, tensors: Iterable[tuple[str, Tensor]], *_: Any, **__: Any) -> None:
        fails = distributed.get_rank() == 1
        self.pushed += len(list(islice(tensors, 3 if fails else None)))
        if fails:
            raise ValueError("no room for a tensor")


class ServerlessEngine(VLLMServerEngine):
    """A server engine that has no servers to send to."""

    def _start(self) -> None:
        self._described = {"dtype": "float32"}
        self._transfer = BrokenOffPush()
        self._fleet: Any = SimpleNamespace(drop_broken=lambda *_: [], succeeded=list, stop=list)
        self._router: Any = SimpleNamespace(forget=list)
        self._traffic = Traffic()


def broken_off(rank: int, folder: Path) -> None:
    """One rank of two, which have half of each weight; a push fails on the second."""
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    tokenizer = build_tokenizer()
    policy = build_language_model(tokenizer)
    fully_shard(policy, mesh=init_device_mesh("cpu", (2,)))
    engine = ServerlessEngine()
    engine.attach(policy, tokenizer)
    weights = len(policy.state_dict())
    try:
        engine.push(0)
    except (EngineFailure, ValueError) as error:
        pushed = engine._transfer.pushed
        found = {"raised": repr(error), "pushed": pushed, "weights": weights}
        torch.save(found, folder / f"rank{rank}.pt")
    distributed.barrier()  # neither still waits for a part of a weight
    distributed.destroy_process_group()


@pytest.mark.timeout(120)
def test_a_push_that_breaks_off_on_one_rank_ends_on_all(tmp_path: Path) -> None:
    multiprocessing.start_processes(broken_off, (tmp_path,), nprocs=2, start_method="fork")
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    # the first one got all weights whole, so the second went on bringing its parts
    assert first["pushed"] >= first["weights"] - 1  # one may be tied
    assert first["raised"].startswith("EngineFailure('the push failed on another rank")
    assert second["pushed"] == 3
    assert "no room for a tensor" in second["raised"]
