"""Episodes with vLLM: its tokens and probabilities, its cache between turns, and its sudden end."""

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count, groupby
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.callbacks import VLLMWeightSync
from lrlhf.datamodules import PromptDataModule
from lrlhf.environments import Episodes, TextEnvironment
from lrlhf.models import sequence_logprobs
from lrlhf.modules import RLOO
from lrlhf.rewards import Rewards
from lrlhf.rollout import (
    EngineFailure,
    Response,
    Sampling,
    SyncedEngine,
    TransformersEngine,
    VLLMEngine,
    VLLMServerEngine,
)
from lrlhf.rollout.engines.synced_engine import Request
from lrlhf.types import PromptBatch, Rollout
from tests.modules.policy_runs import Watcher, assert_same, fit, letters, sgd, weights
from tests.rollout.test_episodes import play, prompt_batch
from tests.vllm.models import LONG, build_policy, client_of, largest_gap, new_server, signal_server

OPTIONS: dict[str, Any] = {"num_generations": 3, "max_turn_tokens": 9}
SAMPLING = Sampling(max_new_tokens=60, temperature=0.8, stop=tuple(ascii_lowercase))
Turn = tuple[tuple[int, ...], tuple[int, ...]]
"""All tokens before a turn, and its own."""


class Sums(TextEnvironment):
    """Three turns, each answered with a number of three digits that depends on the whole turn."""

    def reset(self, word: str) -> str:
        self.turns = 0
        return f"{word}:"

    def step(self, action: str) -> Any:
        self.turns += 1
        return f"({sum(map(ord, action)) % 1000:03d})" if self.turns < 3 else None

    def reward(self) -> float:
        return float(self.turns)


class Late(Sums):
    """Answers after a while, now sooner and now later."""

    async def step(self, action: str) -> str | None:
        await asyncio.sleep(0.3 * random.random())
        answer: str | None = super().step(action)
        return answer


def prompts() -> PromptBatch:
    return prompt_batch(LONG, "short ", "é ", word=["a", "bc", "d"])


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> Callable[[SyncedEngine], Counter[Turn]]:
    """Writes down what an engine is asked for and answers."""

    def begin(engine: SyncedEngine) -> Counter[Turn]:
        turns: Counter[Turn] = Counter()
        respond = engine._respond

        def responding(requests: Sequence[Request], sampling: Sampling) -> list[Response]:
            answers = respond(requests, sampling)
            turns.update(
                (tuple(request.prompt_ids), tuple(answer.token_ids.tolist()))
                for request, answer in zip(requests, answers, strict=True)
            )
            return answers

        monkeypatch.setattr(engine, "_respond", responding)
        return turns

    return begin


def trained_turns(rollout: Rollout) -> Iterator[Turn]:
    """Go through all segments of tokens with a gradient, and what stands before each."""
    rows = zip(rollout.input_ids.tolist(), rollout.response_mask.tolist(), strict=True)
    for ids, sampled in rows:
        for counts, run in groupby(range(len(ids)), key=sampled.__getitem__):
            columns = list(run)
            if counts:
                yield tuple(ids[: columns[0]]), tuple(ids[columns[0] : columns[-1] + 1])


def assert_whole(rollout: Rollout, wrote: Counter[Turn], policy: PreTrainedModel) -> None:
    """Compare with what the engine wrote, and with the policy's own probabilities."""
    assert rollout.episodes is not None
    assert [(one.finish_reason, one.turns) for one in rollout.episodes] == [("done", 3)] * 9
    assert Counter(trained_turns(rollout)) == wrote
    assert wrote.total() == 27
    assert largest_gap(policy, rollout, 0.8) < 1e-4
    with torch.no_grad():
        own = sequence_logprobs(policy, rollout, temperature=0.8)
    assert float((own - rollout.sampling_logprobs)[rollout.response_mask].abs().max()) < 1e-4


# ---------------------------------------------------------------------- inside the process


def test_turns_are_the_engines_and_have_the_policys_probabilities(
    engine: VLLMEngine, policy: PreTrainedModel, spied: Callable[[SyncedEngine], Counter[Turn]]
) -> None:
    wrote = spied(engine)
    rollout, _ = play(engine, Sums, prompts(), policy=policy, sampling=SAMPLING, **OPTIONS)
    assert_whole(rollout, wrote, policy)
    assert rollout.weight_version is not None
    assert rollout.weight_version.tolist() == [0] * 9
    lengths = {len(turn) for _, turn in wrote}
    assert max(lengths) == 9  # cut off
    assert min(lengths) < 9  # a stop string


def test_greedy_turns_are_those_of_transformers(
    engine: VLLMEngine, policy: PreTrainedModel
) -> None:
    options = OPTIONS | {"policy": policy, "sampling": Sampling(max_new_tokens=60, temperature=0)}
    ours, _ = play(engine, Sums, prompts(), **options)
    theirs, _ = play(TransformersEngine(), Sums, prompts(), **options)
    equal = 0
    for row, (one, other) in enumerate(zip(ours.input_ids, theirs.input_ids, strict=True)):
        length = min(int(ours.lengths[row]), int(theirs.lengths[row]))
        unequal = (one[:length] != other[:length]).nonzero()
        if not len(unequal):
            equal += 1
            continue
        # the two of them were as likely, but for rounding
        place = int(unequal[0])
        with torch.no_grad():
            logits = policy(one[None, :place]).logits[0, -1]
        assert float((logits[one[place]] - logits[other[place]]).abs()) < 1e-3
    assert equal > 0


WHOLE_TURNS = Sampling(max_new_tokens=60, min_new_tokens=16)
CACHED = [0, 64, 96]
"""Tokens found in the cache for turns 1 to 3 of 16 tokens, in blocks of 32: the prompt has 61, so
turn 1 ends at 77 and turn 2, behind 5 given tokens, at 98. Of the last one nothing was computed."""


def test_a_turn_begins_with_what_the_cache_has_of_those_before(
    engine: VLLMEngine, policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached: list[int] = []
    generate = engine._llm.generate

    def counting(*args: object, **options: object) -> list[Any]:
        answers: list[Any] = generate(*args, **options)
        cached.extend(answer.num_cached_tokens for answer in answers)
        return answers

    monkeypatch.setattr(engine._llm, "generate", counting)
    engine.forget()
    one = prompt_batch(LONG, word=["a"])
    play(engine, Sums, one, policy=policy, sampling=WHOLE_TURNS, max_turn_tokens=16)
    assert cached == CACHED


# ---------------------------------------------------------------------- in a server


@pytest.fixture
def pushed(server: VLLMServerEngine) -> VLLMServerEngine:
    server.push(1)
    return server


def test_turns_of_late_environments_are_the_servers(
    pushed: VLLMServerEngine, spied: Callable[[SyncedEngine], Counter[Turn]]
) -> None:
    wrote, policy = spied(pushed), pushed._policy
    options = OPTIONS | {"policy": policy, "sampling": SAMPLING}
    rollout, _ = play(pushed, Late, prompts(), wait_for="any", **options)
    assert_whole(rollout, wrote, policy)  # type: ignore[arg-type]
    # whoever comes first, and if all wait for each other
    again, _ = play(pushed, Late, prompts(), wait_for="all", **options)
    assert torch.equal(rollout.input_ids, again.input_ids)


def test_a_turn_begins_with_what_the_servers_cache_has(pushed: VLLMServerEngine) -> None:
    def hits() -> float:
        lines = client_of(pushed)._http.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith("vllm:prefix_cache_hits_total")]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    pushed.forget()
    before = hits()
    one = prompt_batch(LONG, word=["a"])
    play(pushed, Sums, one, policy=pushed._policy, sampling=WHOLE_TURNS, max_turn_tokens=16)
    assert hits() - before == sum(CACHED)


def ending(server: VLLMServerEngine, number: int, after: int = 0) -> type[Late]:
    """Return environments that end the server at a second turn, once ``after`` have seen theirs."""
    seconds = count()

    class Ends(Late):
        async def step(self, action: str) -> str | None:
            if self.turns == 1 and next(seconds) == after:
                signal_server(server, number)
            return await super().step(action)

    return Ends


def assert_recovers(server: VLLMServerEngine, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a server end in the middle of episodes, and compare them with undisturbed ones."""
    options = OPTIONS | {"policy": server._policy, "sampling": SAMPLING}
    expected, _ = play(server, Late, prompts(), **options)
    restarts = server.restarts
    monkeypatch.setattr(server, "stall_timeout", 20.0)
    monkeypatch.setattr(server, "sync_timeout", 20.0)
    rollout, _ = play(server, ending(server, number), prompts(), **options)
    assert server.restarts == restarts + 1
    assert torch.equal(rollout.input_ids, expected.input_ids)
    assert torch.equal(rollout.response_mask, expected.response_mask)
    torch.testing.assert_close(
        rollout.sampling_logprobs, expected.sampling_logprobs, rtol=0, atol=1e-4
    )
    assert rollout.episodes is not None
    assert [one.rewards for one in rollout.episodes] == [(1.0, 2.0, 3.0)] * 9


def test_episodes_go_on_where_a_server_was_killed_in_the_middle(
    pushed: VLLMServerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_recovers(pushed, signal.SIGKILL, monkeypatch)


@pytest.mark.exhaustive
def test_episodes_go_on_where_a_server_hung_in_the_middle(
    pushed: VLLMServerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_recovers(pushed, signal.SIGSTOP, monkeypatch)


@pytest.mark.exhaustive
def test_a_server_that_may_not_be_started_again_ends_the_run(
    pushed: VLLMServerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = OPTIONS | {"policy": pushed._policy, "sampling": SAMPLING}
    monkeypatch.setattr(pushed, "max_restarts", 0)
    with pytest.raises(EngineFailure, match=r"did not answer .* after 0 restarts \(engine.max_r"):
        play(pushed, ending(pushed, signal.SIGKILL), prompts(), **options)
    pushed.push(2)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ahead", "replicas"), [(0, 1), (1, 1), (0, 2)])
def test_a_run_goes_on_where_its_server_was_killed_in_the_middle(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, ahead: int, replicas: int
) -> None:
    rows = [{"prompt": f"write {number} ", "word": "a"} for number in range(4)]

    def train(
        name: str, *, kill_after: int, replicas: int = 1
    ) -> tuple[VLLMServerEngine, dict[str, Tensor]]:
        server = new_server(tmp_path / name, replicas=replicas)
        policy, watcher = build_policy(tokenizer), Watcher()
        module = RLOO(
            policy,
            Rewards(["environment_reward", letters]),
            tokenizer=tokenizer,
            num_generations=2,
            sampling=SAMPLING,
            episodes=Episodes(
                environment=ending(server, signal.SIGKILL, kill_after), max_turn_tokens=9
            ),
            engine=server,
            max_staleness=ahead,
            optimizer=sgd(0.05),
        )
        fit(
            module,
            tmp_path,
            tmp_path / name,
            steps=3,
            callbacks=[watcher, VLLMWeightSync()],
            data=PromptDataModule(rows, batch_size=4),
        )
        ends = [[one["finish_reason"] for one in records] for records in watcher.records]
        assert ends == [["done"] * 8] * 3
        return server, weights(policy)

    # there are 8 episodes in an iteration
    server, killed = train("killed", kill_after=10, replicas=replicas)
    assert server.restarts == 1
    if not ahead:  # else it generates again, with newer weights
        whole = train("whole", kill_after=100)[1]
        # keys and values out of a cache differ in their last bit from those that are computed
        assert_same(whole, killed, **({} if replicas == 1 else {"atol": 1e-6}))
