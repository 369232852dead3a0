"""A run whose server takes new weights while it generates for later iterations."""

import itertools
import subprocess
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
from lrlhf.rollout.rollout_queue import RolloutQueue
from tests.forked import NewProgram
from tests.modules.policy_runs import Watcher, fit, letters, sgd
from tests.vllm.models import GENERATED, build_policy, client_of, counted, new_server

STEPS, STALENESS, HELD_FROM = 20, 2, 8


def begin_before_the_next_push(server: VLLMServerEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have some tokens of one batch sampled before the next push, and the rest after it.

    The server may finish a batch before it is paused, by which the next batch gets its turn.
    """
    start = RolloutQueue.start
    pause = "/pause?mode=keep&clear_cache=false"
    held = False

    def start_and_hold(queue: RolloutQueue, step: int, *args: Any, **options: Any) -> None:
        nonlocal held
        if step < HELD_FROM or held:
            start(queue, step, *args, **options)
            return
        queue.wait()
        client, count = client_of(server), partial(counted, server, 0)
        client.post(pause)
        before = count(GENERATED)
        start(queue, step, *args, **options)
        deadline = time.monotonic() + 120
        while count(GENERATED) < before + 16:
            assert time.monotonic() < deadline
            client.post("/resume")
            time.sleep(0.01)
            client.post(pause)
        held = count("vllm:num_requests_running") > 0

    monkeypatch.setattr(RolloutQueue, "start", start_and_hold)


def test_no_token_of_a_server_is_older_than_allowed(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # with the command line itself, which other tests fork
    monkeypatch.setattr(subprocess, "Popen", NewProgram)
    server, watcher = new_server(tmp_path, max_num_seqs=2), Watcher()
    begin_before_the_next_push(server, monkeypatch)
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
