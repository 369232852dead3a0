"""Episodes: the policy's tokens are the engine's, and what happens in between is told apart."""

import asyncio
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.datamodules.rows.chat import ChatFormat
from lrlhf.environments import Episodes, TextEnvironment
from lrlhf.models import sequence_logprobs
from lrlhf.rewards import RewardError, Rewards
from lrlhf.rollout import (
    Collector,
    EngineFailure,
    RolloutEngine,
    RolloutQueue,
    Sampling,
    TransformersEngine,
)
from lrlhf.rollout.episodes.episode_engine import EpisodeEngine
from lrlhf.rollout.responses import token_prompts
from lrlhf.types import Prompt, PromptBatch, Rollout
from tests.conftest import build_tokenizer
from tests.rollout.scripted_engine import ScriptedEngine

TOKENIZER = build_tokenizer()
HUNDRED = Sampling(max_new_tokens=100)


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return found


def prompt_batch(*prompts: Prompt, **columns: Sequence[Any]) -> PromptBatch:
    chat = ChatFormat(TOKENIZER)
    texts = [one if isinstance(one, str) else chat.render(one, {}, prompt=True) for one in prompts]
    rows = [{name: values[row] for name, values in columns.items()} for row in range(len(prompts))]
    return replace(
        token_prompts([ids(text) for text in texts]), prompts=prompts, columns=tuple(rows)
    )


def play(
    engine: RolloutEngine,
    environment: Any,
    prompts: PromptBatch,
    *,
    num_generations: int = 1,
    policy: Any = None,
    sampling: Sampling = HUNDRED,
    **options: Any,
) -> tuple[Rollout, EpisodeEngine]:
    episodes = EpisodeEngine(engine, Episodes(environment=environment, **options))
    episodes.attach(policy, TOKENIZER)
    episodes.use_chat(ChatFormat(TOKENIZER))
    rollout = episodes.generate(
        prompts,
        sampling,
        num_generations=num_generations,
        seeds=range(len(prompts) * num_generations),
    )
    return rollout, episodes


class Echo(TextEnvironment):
    """Says what it heard, twice."""

    def reset(self, word: str) -> str:
        self.heard: list[str] = []
        self.closed = False
        return f"{word}:"

    def step(self, action: str) -> str | None:
        self.heard.append(action)
        return f"[{action}]" if len(self.heard) < 3 else None

    def reward(self) -> float:
        return float(len(self.heard))

    def get_reward(self) -> float:
        return 10.0

    def close(self) -> None:
        self.closed = True


def text_of(rollout: Rollout, row: int, *, sampled: bool | None = None) -> str:
    chosen = rollout.attention_mask[row]
    if sampled is not None:
        chosen = chosen & (rollout.response_mask[row] == sampled)
    return str(TOKENIZER.decode(rollout.input_ids[row][chosen]))


def test_turns_of_text() -> None:
    engine = ScriptedEngine(lambda text: f"{len(text)}.")
    prompts = prompt_batch("say ", "sing ", word=["a", "bc"])
    rollout, _ = play(engine, Echo, prompts, num_generations=2)
    assert [text_of(rollout, row) for row in (0, 2)] == [
        "say a:6.[6.]12.[12.]20.",  # 6, 12 and 20 characters stand before each turn
        "sing bc:8.[8.]14.[14.]22.",
    ]
    assert text_of(rollout, 0) == text_of(rollout, 1)
    assert text_of(rollout, 0, sampled=True) == "6.12.20."
    assert rollout.group_ids.tolist() == [0, 0, 1, 1]
    assert rollout.prompt_lengths is not None
    assert rollout.prompt_lengths.tolist() == [6, 6, 8, 8]
    assert not rollout.truncated.any()
    assert rollout.turn_rewards is not None
    earned = {
        int(column): float(rollout.turn_rewards[0, column])
        for column in rollout.turn_rewards[0].nonzero()[:, 0]
    }
    assert earned == {7: 1.0, 14: 2.0, 22: 13.0}  # where "6.", "12." and "20." end
    assert rollout.episodes is not None
    episode = rollout.episodes[0]
    assert episode.prompt == "say a:"
    assert episode.messages == (
        {"role": "assistant", "content": "6."},
        {"role": "user", "content": "[6.]"},
        {"role": "assistant", "content": "12."},
        {"role": "user", "content": "[12.]"},
        {"role": "assistant", "content": "20."},
    )
    assert episode.rewards == (1.0, 2.0, 13.0)
    assert (episode.finish_reason, episode.turns, episode.failure) == ("done", 3, "")


def test_the_engines_tokens_are_the_trained_ones() -> None:
    engine = ScriptedEngine(lambda text: f"{len(text)}é.")
    rollout, _ = play(engine, Echo, prompt_batch("é", "ab", word=["ü", ""]), num_generations=2)
    for row in range(4):
        sampled = rollout.response_mask[row]
        own = rollout.input_ids[row][sampled].tolist()
        # turn 1 of all rows, then turn 2 of all, then turn 3
        assert own == engine.wrote[row] + engine.wrote[4 + row] + engine.wrote[8 + row]
        assert rollout.sampling_logprobs[row][sampled].tolist() == [-float(i) for i in own]
        assert not rollout.sampling_logprobs[row][~sampled].any()


def chat(text: str) -> Prompt:
    return ({"role": "user", "content": text},)


class Desk:
    """Tools as methods."""

    def reset(self, **row: Any) -> str:
        self.row = row
        self.done = False
        return " now"

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    def finish(self) -> str:
        """End the work."""
        self.done = True
        return "bye"

    def fail(self) -> str:
        """Break."""
        raise ValueError("no paper")


CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'


def worker(text: str) -> str:
    """Adds, breaks something, calls what is not there, and answers."""
    turns = [
        CALL.format("add", '{"a": 2, "b": 3}') + "<|im_end|>",
        CALL.format("fail", "{}") + "<|im_end|>",
        CALL.format("paint", "{}") + "<tool_call>{oops</tool_call><|im_end|>",
        "five<|im_end|>",
    ]
    return turns[text.count("<|im_start|>assistant") - 1]


def test_turns_of_a_chat_are_those_of_its_template() -> None:
    engine = ScriptedEngine(worker)
    sampling = Sampling(max_new_tokens=1000)
    rollout, _ = play(engine, Desk, prompt_batch(chat("2+3?")), sampling=sampling)
    assert rollout.episodes is not None
    episode = rollout.episodes[0]
    assert episode.prompt == ({"role": "user", "content": "2+3? now"},)
    said = [(message["role"], message["content"]) for message in episode.messages]
    assert [role for role, _ in said] == [
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "tool",
        "assistant",
    ]
    assert said[1][1] == "5"
    assert said[3][1] == "error: no paper"
    assert said[5][1] == "error: no tool 'paint'; there are: add, finish, fail"
    assert said[6][1].startswith("error: ")
    assert said[7][1] == "five"
    assert episode.messages[0]["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    ]
    assert episode.finish_reason == "stop"
    assert episode.rewards is None
    assert rollout.turn_rewards is None
    # the template renders the whole conversation to the same text, but for the line break that it
    # puts behind the end of a turn and that nobody has written yet
    whole = ChatFormat(TOKENIZER).render([*episode.prompt, *episode.messages], {}, prompt=False)
    assert text_of(rollout, 0) + "\n" == whole
    given = text_of(rollout, 0, sampled=False)
    assert "<|im_end|>\n<|im_start|>assistant\n\n<|im_start|>tool\n5<|im_end|>" in given


def test_the_environment_ends_an_episode() -> None:
    engine = ScriptedEngine(lambda text: CALL.format("finish", "{}"))
    rollout, _ = play(engine, Desk, prompt_batch(chat("go")), sampling=Sampling(max_new_tokens=200))
    assert rollout.episodes is not None
    assert (rollout.episodes[0].finish_reason, rollout.episodes[0].turns) == ("done", 1)


def test_the_seed_is_the_groups_and_a_row_reaches_reset() -> None:
    engine = ScriptedEngine(lambda text: "hm")
    prompts = prompt_batch(chat("a"), chat("b"), level=[1, 2])
    rollout, _ = play(engine, Desk, prompts, num_generations=2)
    assert rollout.episodes is not None
    rows = [episode.environment.row for episode in rollout.episodes]
    assert [row["seed"] for row in rows] == [0, 0, 2, 2]
    assert [row["level"] for row in rows] == [1, 1, 2, 2]
    assert rows[2]["prompt"] == chat("b")


class Named(Echo):
    def reset(self, name: str, limit: int) -> str:  # type: ignore[override]
        return super().reset(f"{name} {limit}")


def test_a_column_may_have_any_name() -> None:
    prompts = prompt_batch("say ", name=["ada"], limit=[7])
    rollout, _ = play(ScriptedEngine(lambda text: "hm"), Named, prompts)
    assert "ada 7:" in text_of(rollout, 0)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def test_tools_without_an_environment() -> None:
    engine = ScriptedEngine(worker)
    rollout, _ = play(
        engine,
        None,
        prompt_batch(chat("2+3?")),
        tools=[add],
        max_turns=2,
        sampling=Sampling(max_new_tokens=1000),
    )
    assert rollout.episodes is not None
    episode = rollout.episodes[0]
    assert next(m["content"] for m in episode.messages if m["role"] == "tool") == "5"
    assert (episode.finish_reason, episode.turns) == ("max_turns", 2)
    assert rollout.truncated.tolist() == [True]


@pytest.mark.parametrize("limit", range(1, 30))
def test_no_episode_is_longer_than_its_limit(limit: int) -> None:
    engine = ScriptedEngine(lambda text: f"{len(text)}.")
    sampling = Sampling(max_new_tokens=limit)
    rollout, _ = play(engine, Echo, prompt_batch("say ", word=["a"]), sampling=sampling)
    whole = "6.[6.]12.[12.]20."
    behind = text_of(rollout, 0).removeprefix("say a:")
    assert whole.startswith(behind)
    assert len(behind) <= limit
    assert bool(rollout.truncated[0]) == (limit < len(whole))
    assert rollout.response_mask[0].any()
    assert rollout.response_mask[0, rollout.attention_mask[0].sum() - 1]  # nothing given at the end


def test_a_turn_has_a_limit_of_its_own() -> None:
    engine = ScriptedEngine(lambda text: "abcdef")
    rollout, _ = play(engine, Echo, prompt_batch("p", word=["x"]), max_turn_tokens=2)
    assert text_of(rollout, 0) == "px:ab[ab]ab[ab]ab"
    assert rollout.truncated.tolist() == [False]


class Bad(Echo):
    """Breaks in one place."""

    place = ""

    def __init__(self) -> None:
        self.breaks("init")

    def breaks(self, place: str) -> None:
        if self.place == place:
            raise ValueError("broken")
        if self.place == f"{place} hangs":
            time.sleep(3)

    def reset(self, word: str) -> Any:
        self.breaks("reset")
        super().reset(word)
        return 3 if self.place == "reset returns 3" else None

    def step(self, action: str) -> Any:
        self.breaks("step")
        super().step(action)
        return {"a": 1} if self.place == "step returns a dict" else "ok"

    def reward(self) -> Any:
        self.breaks("reward")
        return float("nan") if self.place == "reward is NaN" else 1.0

    def get_reward(self) -> Any:
        self.breaks("get_reward")
        return "much" if self.place == "get_reward is text" else 1.0

    @property
    def done(self) -> bool:
        self.breaks("done")
        return len(self.heard) > 1


@pytest.mark.parametrize(
    ("place", "failure"),
    [
        ("init", "Environment raised ValueError: broken"),
        ("init hangs", "Environment took longer than 1 s"),
        ("reset", "reset() raised ValueError: broken"),
        ("reset hangs", "reset() took longer than 1 s"),
        ("reset returns 3", "reset() returned a int, not text or None"),
        ("step", "step() raised ValueError: broken"),
        ("step hangs", "step() took longer than 1 s"),
        ("step returns a dict", "step() returned a dict, not text or None"),
        ("reward", "reward() raised ValueError: broken"),
        ("reward is NaN", "reward() returned nan, not a finite number"),
        ("get_reward", "get_reward() raised ValueError: broken"),
        ("get_reward hangs", "get_reward() took longer than 1 s"),
        ("get_reward is text", "get_reward() returned 'much', not a finite number"),
        ("done", "done raised ValueError: broken"),
    ],
)
def test_a_bad_environment_fails_its_episode_alone(place: str, failure: str) -> None:
    numbers = itertools.count()

    class Environment(Bad):
        def __init__(self) -> None:
            self.place = place if next(numbers) == 1 else ""
            super().__init__()

    engine = ScriptedEngine(lambda text: "x")
    rollout, episodes = play(
        engine,
        Environment,
        prompt_batch("a", word=["b"]),
        num_generations=3,
        timeout=1.0,
        reset_timeout=1.0,
    )
    assert rollout.episodes is not None
    reasons = [episode.finish_reason for episode in rollout.episodes]
    assert sorted(reasons) == ["done", "done", "failed"]
    (failed,) = [one for one in rollout.episodes if one.failure]
    assert failed.failure == failure
    assert rollout.turn_rewards is not None
    row = reasons.index("failed")
    assert not rollout.turn_rewards[row].any()
    assert [float(rewards.sum()) for rewards in rollout.turn_rewards].count(3.0) == 2
    episodes.close()


class Slow(Echo):
    """Async, and slower the longer the word."""

    async def step(self, action: str) -> str | None:  # type: ignore[override]
        await asyncio.sleep(0.05 * len(self.word))
        return super().step(action)  # type: ignore[return-value]

    def reset(self, word: str) -> str:
        self.word = word
        return super().reset(word)


def test_nobody_waits_for_the_slowest() -> None:
    through = threading.Event()

    class SlowAtLast(Slow):
        """However slow the others are."""

        async def step(self, action: str) -> str | None:  # type: ignore[override]
            while self.word and not through.is_set():
                await asyncio.sleep(0.01)
            shown = await super().step(action)
            if shown is None:
                through.set()
            return shown

    engine = ScriptedEngine(lambda text: "x", concurrent=True)
    prompts = prompt_batch("p", "p", word=["", "1234567890"])
    rollout, _ = play(engine, SlowAtLast, prompts)
    assert engine.calls == [2, 1, 1, 1, 1]  # the fast one has all its turns to itself
    together = ScriptedEngine(lambda text: "x")
    again, _ = play(together, Slow, prompts)
    assert together.calls == [2, 2, 2]
    assert torch.equal(rollout.input_ids, again.input_ids)


class Blocks(Echo):
    goes_on = threading.Event()

    async def step(self, action: str) -> str | None:  # type: ignore[override]
        self.goes_on.wait(20)  # in the event loop
        return None


def test_what_blocks_the_event_loop_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lrlhf.rollout.episodes.episode_engine._STALLED", 0.3)
    engine = ScriptedEngine(lambda text: "x")
    began = time.monotonic()
    rollout, _ = play(engine, Blocks, prompt_batch("p", word=[""]), timeout=0.2)
    assert time.monotonic() - began < 15
    Blocks.goes_on.set()
    assert rollout.episodes is not None
    assert "keeps the event loop from going on" in rollout.episodes[0].failure


def test_environments_are_closed_when_released_and_in_every_other_case() -> None:
    engine = ScriptedEngine(lambda text: "x")
    rollout, episodes = play(engine, Echo, prompt_batch("p", "p", word=["a", "b"]))
    assert rollout.episodes is not None
    environments = [episode.environment for episode in rollout.episodes]
    assert [one.closed for one in environments] == [False, False]
    assert rollout.episodes[0].release is not None
    rollout.episodes[0].release()
    episodes.close()  # the other one was never scored
    assert [one.closed for one in environments] == [True, True]

    made: list[Echo] = []

    class Kept(Echo):
        def __init__(self) -> None:
            made.append(self)

    def breaks(text: str) -> str:
        raise RuntimeError(f"the engine broke at {text}")

    with pytest.raises(RuntimeError, match="the engine broke"):
        play(ScriptedEngine(breaks), Kept, prompt_batch("p", word=["a"]))
    deadline = time.monotonic() + 20
    while not made[0].closed and time.monotonic() < deadline:
        time.sleep(0.01)
    assert made[0].closed


def test_one_turn_is_what_the_engine_gives_alone(language_model: PreTrainedModel) -> None:
    class Once(TextEnvironment):
        def step(self, action: str) -> None:
            return None

    prompts = prompt_batch("one ", "and two ")
    sampling = Sampling(max_new_tokens=9)
    options: dict[str, Any] = {"num_generations": 3}
    plain = TransformersEngine()
    plain.attach(language_model, TOKENIZER)
    expected = plain.generate(prompts, sampling, seeds=range(6), **options)
    rollout, _ = play(
        TransformersEngine(), Once, prompts, policy=language_model, sampling=sampling, **options
    )
    for name in ("input_ids", "response_mask", "sampling_logprobs", "truncated", "group_ids"):
        assert torch.equal(getattr(rollout, name), getattr(expected, name)), name


def test_sampled_turns_have_the_policys_probabilities(language_model: PreTrainedModel) -> None:
    prompts = prompt_batch("one ", "and two ", word=["x", "yz"])
    options: dict[str, Any] = {
        "policy": language_model,
        "num_generations": 2,
        "max_turn_tokens": 6,
        "sampling": Sampling(max_new_tokens=60),
    }
    rollout, _ = play(TransformersEngine(), Echo, prompts, **options)
    with torch.no_grad():
        own = sequence_logprobs(language_model, rollout)
    mask = rollout.response_mask
    assert mask.sum(dim=1).tolist() == [18] * 4 or mask.any(dim=1).all()
    torch.testing.assert_close(own[mask], rollout.sampling_logprobs[mask], rtol=0, atol=1e-4)
    # and do not depend on who else plays
    alone, _ = play(TransformersEngine(), Echo, prompts.select(torch.tensor([0])), **options)
    length = int(alone.attention_mask[1].sum())
    assert torch.equal(alone.input_ids[1, :length], rollout.input_ids[1, :length])


def test_a_template_that_says_nothing_of_tools_is_refused() -> None:
    tokenizer: PreTrainedTokenizerBase = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    engine = EpisodeEngine(ScriptedEngine(worker), Episodes(environment=Desk))
    engine.attach(None, tokenizer)  # type: ignore[arg-type]
    engine.use_chat(ChatFormat(tokenizer))
    with pytest.raises(ValueError, match="leaves out what the role 'tool' says"):
        engine.generate(
            prompt_batch(chat("x")), Sampling(max_new_tokens=500), num_generations=1, seeds=[0]
        )


def test_a_template_that_drops_reasoning_is_named(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer: PreTrainedTokenizerBase = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    engine = EpisodeEngine(ScriptedEngine(worker), Episodes(environment=Desk))
    engine.attach(None, tokenizer)  # type: ignore[arg-type]
    engine.use_chat(ChatFormat(tokenizer))
    with caplog.at_level(logging.WARNING):
        engine.generate(
            prompt_batch(chat("x")), Sampling(max_new_tokens=900), num_generations=1, seeds=[0]
        )
    assert caplog.text.count("drops the reasoning of earlier turns") == 1


def test_hundreds_of_slow_environments_at_once() -> None:
    class Waits(Echo):
        def step(self, action: str) -> str | None:
            time.sleep(0.2)
            return super().step(action)

    engine = ScriptedEngine(lambda text: "x", concurrent=True)
    prompts = prompt_batch(*["p"] * 200, word=["w"] * 200)
    began = time.monotonic()
    rollout, episodes = play(engine, Waits, prompts)
    # one after the other they would take 120 s
    assert time.monotonic() - began < 20
    assert rollout.episodes is not None
    assert {episode.finish_reason for episode in rollout.episodes} == {"done"}
    episodes.close()


def test_a_callable_can_make_environments() -> None:
    def made(word: str) -> Callable[[], Echo]:
        assert word
        return Echo()  # type: ignore[return-value]

    engine = ScriptedEngine(lambda text: "x")
    rollout, _ = play(engine, made, prompt_batch("p", word=["a"]), options={"word": "o"})
    assert rollout.episodes is not None
    assert rollout.episodes[0].finish_reason == "done"


def test_episodes_played_ahead_are_in_a_checkpoint(tmp_path: Path) -> None:
    episodes = EpisodeEngine(
        ScriptedEngine(lambda text: f"{len(text)}.", concurrent=True), Episodes(environment=Echo)
    )
    episodes.attach(None, TOKENIZER)  # type: ignore[arg-type]
    prompts = prompt_batch("say ", word=["a"])
    ahead = RolloutQueue(episodes, 1)
    ahead.start(1, prompts, HUNDRED, num_generations=2, seeds=range(2))
    torch.save(ahead.state_dict(), tmp_path / "state.pt")
    resumed = RolloutQueue(episodes, 1)
    resumed.load_state_dict(
        torch.load(tmp_path / "state.pt", weights_only=True), torch.device("cpu")
    )
    first, second = (
        one.take(1, prompts, num_generations=2, any_rank=bool) for one in (ahead, resumed)
    )
    assert first is not None
    assert second is not None
    assert second.episodes is not None
    assert first.episodes is not None
    for before, after in zip(first.episodes, second.episodes, strict=True):
        assert before.environment is not None
        for name in ("prompt", "messages", "rewards", "finish_reason", "failure"):
            assert getattr(before, name) == getattr(after, name), name
    assert torch.equal(first.input_ids, second.input_ids)
    assert torch.equal(first.turn_rewards, second.turn_rewards)  # type: ignore[arg-type]
    rewards = Rewards(["environment_reward"])
    collector = Collector(episodes, rewards, TOKENIZER)
    scores = [
        collector.score(prompts, one, HUNDRED, step=1, phase=nullcontext).rewards.scores
        for one in (first, second)
    ]
    assert scores[0].tolist() == scores[1].tolist() == [16.0, 16.0]


def test_episodes_of_several_iterations_are_played_at_once() -> None:
    turns = ScriptedEngine(lambda text: f"{len(text)}.", concurrent=True, seconds=0.02)
    episodes = EpisodeEngine(turns, Episodes(environment=Echo))
    episodes.attach(None, TOKENIZER)  # type: ignore[arg-type]
    queue = RolloutQueue(episodes, 3)
    asked = [prompt_batch("say " * step, word=["a" * step]) for step in (1, 2, 3)]
    for step, prompts in enumerate(asked):
        queue.start(step, prompts, HUNDRED, num_generations=2, seeds=range(2))
    for step, prompts in enumerate(asked):
        taken = queue.take(step, prompts, num_generations=2, any_rank=bool)
        alone = episodes.generate(prompts, HUNDRED, num_generations=2, seeds=range(2))
        assert taken is not None
        assert torch.equal(taken.input_ids, alone.input_ids)
        assert torch.equal(taken.response_mask, alone.response_mask)


def test_an_engine_that_fails_in_the_middle_is_asked_again() -> None:
    failed: list[str] = []

    def script(text: str) -> str:
        if "[" in text and not failed:
            failed.append(text)
            raise EngineFailure("gone")
        return "x"

    prompts = prompt_batch("p", "p", word=["", "1234"])
    rollout, _ = play(ScriptedEngine(script, concurrent=True), Slow, prompts)
    expected, _ = play(ScriptedEngine(lambda text: "x", concurrent=True), Slow, prompts)
    assert failed
    assert torch.equal(rollout.input_ids, expected.input_ids)
    assert rollout.episodes is not None
    assert [one.rewards for one in rollout.episodes] == [(1.0, 2.0, 13.0)] * 2

    def broken(text: str) -> str:
        if "[" in text:
            raise EngineFailure("gone for good")
        return "x"

    with pytest.raises(EngineFailure, match="gone for good"):
        play(ScriptedEngine(broken, concurrent=True), Slow, prompts)


class Rude(Desk):
    """What no environment should do, one in each tool."""

    def leave(self) -> str:
        """Leave."""
        sys.exit(3)

    async def cancel(self) -> str:
        """Cancel."""
        raise asyncio.CancelledError

    def stop(self) -> str:
        """Stop."""
        raise StopIteration("none left")

    def shout(self) -> str:
        """Shout."""
        return "\ud800!"


@pytest.mark.parametrize(
    ("tool", "told"),
    [
        ("leave", "error: SystemExit: 3"),
        ("cancel", "error: it cancelled itself"),
        ("stop", "error: StopIteration: none left"),
        ("shout", "?!"),
    ],
)
def test_a_rude_tool_is_answered(tool: str, told: str) -> None:
    turns = [CALL.format(tool, "{}"), "so"]
    engine = ScriptedEngine(lambda text: turns[text.count("assistant\n") - 1])
    rollout, episodes = play(
        engine, Rude, prompt_batch(chat("x")), sampling=Sampling(max_new_tokens=400)
    )
    assert rollout.episodes is not None
    assert rollout.episodes[0].messages[1]["content"] == told
    assert rollout.episodes[0].finish_reason == "stop"
    episodes.close()  # the event loop still runs


def test_an_array_that_is_neither_true_nor_false_fails_the_episode() -> None:
    class Vague(Echo):
        done = torch.tensor([True, False])

    rollout, _ = play(ScriptedEngine(lambda text: "x"), Vague, prompt_batch("p", word=["a"]))
    assert rollout.episodes is not None
    assert rollout.episodes[0].failure.startswith("done raised RuntimeError: Boolean value")


def test_half_a_letter_is_no_reason_to_stop() -> None:
    class Half(Echo):
        def reset(self, word: str) -> str:
            super().reset(word)
            return "\udc00"

    rollout, _ = play(ScriptedEngine(lambda text: "x"), Half, prompt_batch("p", word=["a"]))
    assert text_of(rollout, 0).startswith("p?x")


def test_what_is_made_too_late_is_closed() -> None:
    made: list[Echo] = []

    class Late(Echo):
        def __init__(self) -> None:
            time.sleep(1.0)
            self.closed = False
            made.append(self)

    engine = ScriptedEngine(lambda text: "x" * 200)
    rollout, episodes = play(engine, Late, prompt_batch("p", word=["a"]), reset_timeout=0.2)
    assert rollout.episodes is not None
    # although its first turn ran into the limit
    assert rollout.episodes[0].finish_reason == "failed"
    deadline = time.monotonic() + 10
    while not (made and made[0].closed) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert made[0].closed
    episodes.close()


def test_functions_are_not_asked_about_failed_episodes() -> None:
    class Fails(Echo):
        def step(self, action: str) -> str | None:
            if self.word == "bad":
                raise RuntimeError("no")
            return None

        def reset(self, word: str) -> str:
            self.word = word
            return super().reset(word)

    asked: list[int] = []

    def judge(environments: Sequence[Echo], completions: Sequence[str]) -> list[float]:
        asked.append(len(completions))
        return [float(len(one.word)) for one in environments]

    prompts = prompt_batch("p", "p", "p", word=["ok", "bad", "fine"])
    rollout, episodes = play(ScriptedEngine(lambda text: "x"), Fails, prompts)
    result = Collector(episodes, Rewards([judge], max_unscorable_fraction=0.4), TOKENIZER).score(
        prompts, rollout, HUNDRED, step=1, phase=nullcontext
    )
    assert asked == [2]
    assert result.rewards.scores.nan_to_num(nan=-1).tolist() == [2.0, -1.0, 4.0]
    rollout, episodes = play(ScriptedEngine(lambda text: "x"), Fails, prompts)
    collector = Collector(episodes, Rewards([judge]), TOKENIZER)
    with pytest.raises(RewardError, match=r"1 of 3[\s\S]*step\(\) raised RuntimeError: no"):
        collector.score(prompts, rollout, HUNDRED, step=1, phase=nullcontext)


def test_an_engine_of_one_batch_after_the_other_cannot_hurry() -> None:
    with pytest.raises(ValueError, match="wait_for is any, and ScriptedEngine generates in the"):
        play(ScriptedEngine(str), Echo, prompt_batch("p", word=["a"]), wait_for="any")
