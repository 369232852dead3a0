"""A run whose server takes new weights while it generates for later iterations."""

import itertools
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from lrlhf.callbacks import VLLMWeightSync
from lrlhf.datamodules import PromptDataModule
from lrlhf.modules import RLOO
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling, VLLMServerEngine
from lrlhf.types import Rollout
from tests.modules.policy_runs import Watcher, fit, letters, sgd
from tests.vllm.models import GENERATED, build_policy, client_of, counted, new_server

STEPS, STALENESS = 20, 2


def begin_before_the_last_push(server: VLLMServerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have some tokens of the last batch sampled before the last push, and the rest after it."""
    generate, push = server.generate, server.push
    begun, done, there = itertools.count(), itertools.count(1), threading.Event()

    def begin() -> None:
        count = partial(counted, server, 0)
        before = count(GENERATED)
        while count(GENERATED) < before + 16 or not count("vllm:num_requests_running"):
            client_of(server).post("/resume")
            time.sleep(0.01)
            client_of(server).post("/pause?mode=keep&clear_cache=false")
        there.set()

    def generate_slowly(*args: Any, **options: Any) -> Rollout:
        if next(begun) == STEPS - 1:
            assert earlier.wait(60)
            client_of(server).post("/pause?mode=keep&clear_cache=false")
            threading.Thread(target=begin, daemon=True).start()
        rollout = generate(*args, **options)
        if next(done) == STEPS - 1:
            earlier.set()
        return rollout

    def push_later(version: int) -> None:
        assert version < STEPS - 1 or there.wait(60)
        push(version)

    earlier = threading.Event()
    monkeypatch.setattr(server, "generate", generate_slowly)
    monkeypatch.setattr(server, "push", push_later)


def test_no_token_of_a_server_is_older_than_allowed(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, watcher = new_server(tmp_path, max_num_seqs=2), Watcher()
    begin_before_the_last_push(server, monkeypatch)
    module = RLOO(
        build_policy(tokenizer),
        Rewards([letters]),
        tokenizer=tokenizer,
        num_generations=2,
        sampling=Sampling(max_new_tokens=100),
        engine=server,
        max_staleness=STALENESS,
        optimizer=sgd(0.05),
    )
    rows = [{"prompt": f"write {number} "} for number in range(8)]
    fit(
        module,
        tmp_path,
        tmp_path / "run",
        steps=STEPS,
        callbacks=[watcher, VLLMWeightSync(probe_every=3)],
        data=PromptDataModule(rows, batch_size=4),
        limit_val_batches=0,
    )
    mixed = 0
    for step, experience in enumerate(watcher.experiences):
        assert experience.versions is not None
        tokens = experience.versions[experience.response_mask].tolist()
        assert max(0, step - STALENESS) <= min(tokens) <= max(tokens) <= step
        for row, mask in zip(experience.versions, experience.response_mask, strict=True):
            own = row[mask].tolist()
            # a response goes on with newer weights, never with older ones
            assert all(first <= second for first, second in itertools.pairwise(own))
            mixed += len(set(own)) > 1
    assert mixed
