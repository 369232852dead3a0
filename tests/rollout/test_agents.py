"""Programs that ask through the OpenAI client, played as episodes."""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from lrlhf.datamodules.rows.chat import ChatFormat
from lrlhf.environments import Episodes
from lrlhf.rewards import RewardError, Rewards
from lrlhf.rollout import Sampling
from lrlhf.rollout.episodes.episode_engine import EpisodeEngine
from lrlhf.rollout.responses import token_prompts
from lrlhf.types import PromptBatch, Rollout
from tests.conftest import build_tokenizer
from tests.environments.agents.policy import ADD
from tests.rollout.scripted_engine import Script, ScriptedEngine

HERMES = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>"
    "\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or () %}{{ '\n<tool_call>\n' }}"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = 'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
TOKENIZER = copy.deepcopy(build_tokenizer())
TOKENIZER.chat_template = HERMES


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return found


def prompts_of(count: int) -> PromptBatch:
    prompts = tuple(({"role": "user", "content": f"from {row}"},) for row in range(count))
    chat = ChatFormat(TOKENIZER)
    texts = [chat.render(one, {}, prompt=True) for one in prompts]
    rows = token_prompts([TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in texts])
    return PromptBatch(
        input_ids=rows.input_ids,
        attention_mask=rows.attention_mask,
        prompts=prompts,
        columns=tuple({"question": f"number {row}"} for row in range(count)),
    )


@pytest.fixture
def engine_of() -> Iterator[Callable[..., EpisodeEngine]]:
    engines: list[EpisodeEngine] = []

    def build(agent: Callable[..., Any], script: Script, **options: Any) -> EpisodeEngine:
        engine = EpisodeEngine(
            ScriptedEngine(script, concurrent=options.pop("concurrent", False)),
            Episodes(agent=agent, **{"timeout": 20.0, **options}),
        )
        engine.attach(None, TOKENIZER)  # type: ignore[arg-type]
        engine.use_chat(ChatFormat(TOKENIZER))
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        engine.close()


def rollout_of(engine: EpisodeEngine, count: int = 1, copies: int = 1, limit: int = 900) -> Rollout:
    return engine.generate(
        prompts_of(count),
        Sampling(max_new_tokens=limit),
        num_generations=copies,
        seeds=range(count * copies),
    )


def text_of(rollout: Rollout, row: int) -> str:
    return str(TOKENIZER.decode(rollout.input_ids[row][rollout.attention_mask[row]]))


def adds(base_url: str, api_key: str, question: str) -> float:
    """Answers a question with a tool, as the documentation of the client shows it."""
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = [{"role": "user", "content": question}]
        while True:
            options: Any = {"model": "gpt-4o", "messages": messages, "tools": [ADD]}
            message = client.chat.completions.create(**options).choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return float(message.content or 0)
            for call in message.tool_calls:
                assert call.type == "function"
                numbers = json.loads(call.function.arguments)
                told = str(numbers["a"] + numbers["b"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": told})


def asker(text: str) -> str:
    """Return the number in the question."""
    return text.partition("number ")[2].partition("<")[0]


def worker(text: str) -> str:
    """Adds, and then says what came out, and who asked."""
    return f"{asker(text)}5<|im_end|>" if "<|im_start|>tool" in text else f"{CALL}<|im_end|>"


@pytest.mark.parametrize("concurrent", [False, True])
def test_an_agent_with_a_tool_is_trained_on_what_it_saw(
    engine_of: Callable[..., EpisodeEngine], concurrent: bool
) -> None:
    engine = engine_of(adds, worker, concurrent=concurrent)
    rollout = rollout_of(engine, count=3, copies=2)
    assert rollout.episodes is not None
    assert rollout.turn_rewards is not None
    assert rollout.forks is None  # the agent keeps what the policy said
    for row, episode in enumerate(rollout.episodes):
        number = row // 2
        assert (episode.failure, episode.finish_reason, episode.turns) == ("", "stop", 2)
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
        conversation = [
            {"role": "user", "content": f"number {number}"},
            {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
            {"role": "tool", "content": "5"},
            {"role": "assistant", "content": f"{number}5"},
        ]
        whole = ChatFormat(TOKENIZER).render(conversation, {"tools": [ADD]}, prompt=False)
        assert text_of(rollout, row) + "\n" == whole
        wrote = rollout.input_ids[row][rollout.response_mask[row]].tolist()
        turns = [f"{CALL}<|im_end|>", f"{number}5<|im_end|>"]
        assert wrote == [token for turn in turns for token in ids(turn)]
        assert episode.rewards == (0.0, float(f"{number}5"))
        assert float(rollout.turn_rewards[row].sum()) == float(f"{number}5")


def test_a_history_that_the_agent_rewrites_is_a_fork(
    engine_of: Callable[..., EpisodeEngine],
) -> None:
    def forgets(base_url: str, api_key: str) -> float:
        with OpenAI(base_url=base_url, api_key=api_key) as client:
            for word in ("one", "two"):
                messages: Any = [{"role": "user", "content": word}]
                client.chat.completions.create(model="any", messages=messages)
        return 1.0

    rollout = rollout_of(engine_of(forgets, lambda text: "ho<|im_end|>"))
    assert rollout.forks is not None
    assert int((rollout.forks > 0).sum()) == 1
    beginning = "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\nho<|im_end|>"
    assert text_of(rollout, 0).startswith(beginning)


def test_the_limits_of_a_question_and_its_tokens(engine_of: Callable[..., EpisodeEngine]) -> None:
    told: list[Any] = []

    def agent(base_url: str, api_key: str) -> None:
        messages: Any = [{"role": "user", "content": "hi"}]
        with OpenAI(base_url=base_url, api_key=api_key) as client:
            for limit in (2, 50):
                told.append(
                    client.chat.completions.create(
                        model="any", messages=messages, max_completion_tokens=limit
                    )
                )

    engine = engine_of(agent, lambda text: "hello there<|im_end|>")
    with pytest.raises(RewardError, match="or the agent returned None"):
        Rewards(["environment_reward"]).score(
            ["hi"], ["ho"], [[1]], [{}], on_request={"episodes": rollout_of(engine).episodes}
        )
    hi = ChatFormat(TOKENIZER).render([{"role": "user", "content": "hi"}], {}, prompt=True)
    prompt, whole = len(ids(hi)), len(ids("hello there<|im_end|>"))
    assert [one.choices[0].finish_reason for one in told] == ["length", "stop"]
    assert [one.usage.completion_tokens for one in told] == [2, whole]
    assert [one.usage.prompt_tokens for one in told] == [prompt, prompt]


def test_an_agent_that_is_cut_off_has_earned_nothing(
    engine_of: Callable[..., EpisodeEngine],
) -> None:
    ended: list[int] = []
    stopped = threading.Event()

    def insists(base_url: str, api_key: str) -> float:
        messages: Any = [{"role": "user", "content": "hi"}]
        try:
            with OpenAI(base_url=base_url, api_key=api_key) as client:
                while True:
                    client.chat.completions.create(model="any", messages=messages)
        except openai.APIStatusError as error:
            ended.append(error.status_code)
            stopped.set()
            raise

    rollout = rollout_of(engine_of(insists, lambda text: "ho<|im_end|>", max_turns=3))
    assert rollout.episodes is not None
    (episode,) = rollout.episodes
    assert (episode.finish_reason, episode.rewards) == ("max_turns", (0.0, 0.0, 0.0))
    assert episode.release is not None
    episode.release()
    assert stopped.wait(10)
    assert ended == [410]


def test_one_that_fails_leaves_the_others_alone(engine_of: Callable[..., EpisodeEngine]) -> None:
    def agent(base_url: str, api_key: str, question: str) -> float:
        if question == "number 1":
            raise ValueError("not this one")
        return adds(base_url, api_key, question)

    engine = engine_of(agent, worker)
    episodes = rollout_of(engine, count=3).episodes or ()
    failure = "agent() raised ValueError: not this one"
    assert [episode.failure for episode in episodes] == ["", failure, ""]


class Narrow(ScriptedEngine):
    context_length = 60


def test_a_question_that_the_model_cannot_read_fails_the_episode() -> None:
    def agent(base_url: str, api_key: str, question: str) -> float:
        messages: Any = [{"role": "user", "content": "long " * (100 if "0" in question else 1)}]
        with OpenAI(base_url=base_url, api_key=api_key) as client:
            client.chat.completions.create(model="any", messages=messages)
        return 1.0

    engine = EpisodeEngine(Narrow(lambda text: "ho<|im_end|>"), Episodes(agent=agent))
    engine.attach(None, TOKENIZER)  # type: ignore[arg-type]
    engine.use_chat(ChatFormat(TOKENIZER))
    episodes = rollout_of(engine, count=2).episodes or ()
    engine.close()
    failure = episodes[0].failure
    assert re.fullmatch(r"the prompt has \d+ tokens, and the model reads \d+", failure)
    assert [one.failure for one in episodes] == [failure, ""]


def test_a_hundred_at_once(engine_of: Callable[..., EpisodeEngine]) -> None:
    def agent(base_url: str, api_key: str, question: str) -> float:
        messages: Any = [{"role": "user", "content": question}]
        own = client.with_options(base_url=base_url, api_key=api_key)
        for _ in range(2):
            message = own.chat.completions.create(model="any", messages=messages).choices[0].message
            messages += [message, {"role": "user", "content": "and?"}]
        return float(message.content or 0)

    engine = engine_of(agent, lambda text: f"{asker(text)}<|im_end|>")
    with OpenAI(api_key="of nobody") as client:  # to make one takes longer than an episode
        episodes = rollout_of(engine, count=50, copies=2).episodes or ()
    assert [episode.failure for episode in episodes] == [""] * 100
    outcomes = [(episode.rewards or (0.0,))[-1] for episode in episodes]
    assert outcomes == [float(row // 2) for row in range(100)]
