"""Two vLLM servers behind one engine, one that is lost, and updates while responses are written."""

import asyncio
import copy
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lrlhf.rollout import Sampling, VLLMServerEngine
from lrlhf.types import Rollout
from tests.vllm.models import (
    LONG,
    client_of,
    counted,
    disturb,
    generated_across_a_push,
    largest_gap,
    logprobs_by_whole_logits,
    new_server,
    prompts_of,
    signal_server,
)

TEXTS = [f"{LONG} {letter}" for letter in "abcd"]
"""As long as each other, and shorter than a block of the router's."""


@pytest.fixture(scope="module")
def pair(
    server: VLLMServerEngine,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[VLLMServerEngine]:
    """Two servers with the policy of `server`."""
    engine = new_server(tmp_path_factory.mktemp("replicas"), replicas=2)
    engine.attach(server._policy, tokenizer)
    engine.push(0)
    yield engine
    engine.close()


def ask(engine: VLLMServerEngine, tokenizer: PreTrainedTokenizerBase, most: int = 12) -> Rollout:
    prompts = prompts_of(*TEXTS, tokenizer=tokenizer)
    return engine.generate(
        prompts, Sampling(max_new_tokens=most), num_generations=2, seeds=range(2 * len(TEXTS))
    )


def asked_and_shared(
    pair: VLLMServerEngine, tokenizer: PreTrainedTokenizerBase
) -> tuple[Rollout, list[int]]:
    """Return responses, and how many of them each server gave."""
    before = [counted(pair, number) for number in (0, 1)]
    rollout = ask(pair, tokenizer)
    while True:  # counters follow a moment later
        shares = [counted(pair, number) - before[number] for number in (0, 1)]
        if sum(shares) == len(rollout.input_ids):
            return rollout, shares
        time.sleep(0.1)


def test_two_replicas_give_the_responses_of_one_and_one_may_be_lost_meanwhile(
    pair: VLLMServerEngine,
    server: VLLMServerEngine,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = server._policy
    disturb(policy, seed=1)
    for engine in (server, pair):
        engine.push(1)
    expected = ask(server, tokenizer)
    both, shares = asked_and_shared(pair, tokenizer)
    assert largest_gap(policy, both) < 1e-4
    assert_equal(both, expected)
    assert shares == [4, 4]  # two prompts of the four each
    # one is killed when it has given the first of its responses: the others break off
    lost, first = client_of(pair, 1), asyncio.Event()
    generate = lost.generate

    async def give_one(session: httpx.AsyncClient, body: dict[str, Any]) -> bytes:
        asked.append(body)
        if len(asked) > 1:
            await first.wait()
            return await generate(session, body)
        answer = await generate(session, body)
        # it stands still before it gets the others: it may be fast enough to answer them
        signal_server(pair, signal.SIGSTOP, replica=1)
        first.set()
        asyncio.get_running_loop().call_later(0.5, signal_server, pair, signal.SIGKILL, 1)
        return answer

    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(lost, "generate", give_one)
    restarts, url = pair.restarts, client_of(pair, 0).url
    assert_equal(ask(pair, tokenizer), expected)
    assert len(asked) == 4
    assert list(pair._failed) == [lost.address]
    # the other is not disturbed, takes the next push alone, and the new one joins when it can
    disturb(policy, seed=2)
    pair.push(2)
    assert pair.restarts == restarts + 1
    assert client_of(pair, 0).url == url
    assert largest_gap(policy, ask(pair, tokenizer)) < 1e-4
    deadline = time.monotonic() + 400
    while len(pair._replicas) < 2:
        assert time.monotonic() < deadline
        time.sleep(1.0)
        pair.push(2)
    both, shares = asked_and_shared(pair, tokenizer)
    assert largest_gap(policy, both) < 1e-4
    assert shares == [4, 4]
    assert pair.restarts == restarts + 1


@pytest.mark.exhaustive
def test_a_push_that_one_replica_breaks_off_is_repeated_to_the_other(
    pair: VLLMServerEngine,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def killing(self: Any) -> Iterator[tuple[str, Tensor]]:
        for index, one in enumerate(read(self)):
            if index == 2 and not killed:
                killed.append(True)
                signal_server(pair, signal.SIGKILL, replica=0)
            yield one

    while len(pair._replicas) < 2:
        time.sleep(1.0)
        pair.push(5)
    source = type(pair._transfer._source)
    killed: list[bool] = []
    read, restarts, url = source.__iter__, pair.restarts, client_of(pair, 1).url
    monkeypatch.setattr(source, "__iter__", killing)
    disturb(pair._policy, seed=6)
    began = time.monotonic()
    pair.push(6)
    assert time.monotonic() - began < 30  # the other one does not wait for sync_timeout
    assert killed
    assert [(one.number, one.client.url) for one in pair._replicas] == [(1, url)]
    assert pair.restarts == restarts + 1
    assert largest_gap(pair._policy, ask(pair, tokenizer)) < 1e-4


def assert_equal(one: Rollout, other: Rollout) -> None:
    assert torch.equal(one.input_ids, other.input_ids)
    torch.testing.assert_close(one.sampling_logprobs, other.sampling_logprobs, rtol=0, atol=1e-5)


def test_responses_go_on_with_new_weights_and_say_which_sampled_a_token(
    server: VLLMServerEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    policy, old = server._policy, copy.deepcopy(server._policy)
    # of some the end comes early: what keeps it from that would change the distribution
    rollout = generated_across_a_push(
        server, prompts_of("short", "a prompt", tokenizer=tokenizer), versions=(3, 4), copies=64
    )
    assert rollout.token_versions is not None
    assert rollout.weight_version is not None
    found_in = [
        rollout.token_versions[row][rollout.response_mask[row]].tolist() for row in range(128)
    ]
    assert all(versions == sorted(versions) for versions in found_in)
    assert rollout.weight_version.tolist() == [versions[0] for versions in found_in]
    assert sum(set(versions) == {3, 4} for versions in found_in) >= 16
    for model, version in ((old, 3), (policy, 4)):
        own = logprobs_by_whole_logits(model, rollout, 1.0)
        mine = rollout.response_mask & (rollout.token_versions == version)
        gaps = (own - rollout.sampling_logprobs).abs()
        # keys and values of the old weights' tokens were computed anew too
        assert float(gaps[mine].max()) < 1e-4
        other = rollout.response_mask & ~mine
        assert float(gaps[other].max()) > 1e-2
