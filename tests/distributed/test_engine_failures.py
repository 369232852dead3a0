"""Ranks that act together in an engine start it anew together, or give up together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing

from lrlhf.rollout import EngineFailure, Sampling
from lrlhf.rollout.responses import untold_prompts
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
    prompts = untold_prompts([tokenizer("hi")["input_ids"]])

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
