import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from lrlhf.environments.session import EnvironmentFailure, Reaction, TurnPrompt
from tests.environments.agents.policy import ADD, play, played, serving, session_of

NUMBERS = '{"a": 2, "b": 3}'
CALL = f'<tool_call>\n{{"name": "add", "arguments": {NUMBERS}}}\n</tool_call>'


def ask(base_url: str, api_key: str, *texts: str, **options: Any) -> Any:
    """Ask as any program does, with roles that alternate."""
    with OpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages: Any = [
            {"role": ("user", "assistant")[place % 2], "content": text}
            for place, text in enumerate(texts)
        ]
        return client.chat.completions.create(model="gpt-4o", messages=messages, **options)


def counts(base_url: str, api_key: str, question: str, to: int = 1) -> float:
    """Goes on as long as it is told to."""
    said = [question]
    for _ in range(to):
        said.append(ask(base_url, api_key, *said).choices[0].message.content)
        said.append("more")
    return len(said) / 2


def test_an_agent_is_asked_and_answered_until_it_returns() -> None:
    asked, end, reward = play(counts, lambda asked: str(len(asked.messages)), question="go", to=2)
    first = {"role": "user", "content": "go"}
    assert asked == [
        TurnPrompt((first,)),
        TurnPrompt(
            (first, {"role": "assistant", "content": "1"}, {"role": "user", "content": "more"})
        ),
    ]
    assert (end.finish_reason, end.next_prompt, end.messages, end.calls) == ("stop", None, (), ())
    assert reward == 2.5


def adds(base_url: str, api_key: str, model: str) -> float:
    """Calls what the policy wants to have called, as the documentation of the client has it."""
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "2 + 3?"}]}]
        while True:
            options: Any = {"model": model, "messages": messages, "tools": [ADD]}
            choice = client.chat.completions.create(**options).choices[0]
            messages.append(choice.message)
            if choice.finish_reason != "tool_calls":
                return float(choice.message.content == "5")
            for call in choice.message.tool_calls or ():
                assert call.type == "function"
                numbers = json.loads(call.function.arguments)
                told = str(numbers["a"] + numbers["b"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": told})


def test_calls_of_tools_go_to_the_agent_and_come_back_as_they_were() -> None:
    turns = iter([f"Let me see.\n{CALL}", "5"])
    asked, end, reward = play(adds, lambda _: next(turns))
    assert [one.tools for one in asked] == [(ADD,), (ADD,)]
    assert asked[0].messages == ({"role": "user", "content": "2 + 3?"},)
    function = {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert asked[1].messages[1:] == (
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "call00001", "content": "5"},
    )
    assert (end.calls, reward) == ((), 1.0)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (f'{CALL}\n<tool_call>\n{{"name": "add"', {"tools": [ADD]}),
        (CALL, {}),
        (CALL, {"tools": [ADD], "tool_choice": "none"}),
    ],
    ids=["malformed", "no tools", "tools that may not be called"],
)
def test_other_turns_are_text(text: str, options: dict[str, Any]) -> None:
    def agent(base_url: str, api_key: str) -> float:
        choice = ask(base_url, api_key, "hi", **options).choices[0]
        assert choice.message.tool_calls is None
        return float((choice.message.content, choice.finish_reason) == (text, "stop"))

    *_, reward = play(agent, lambda _: text)
    assert reward == 1.0


DEEPSEEK = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{NUMBERS}<｜tool▁call▁end｜>"
)


@pytest.mark.parametrize(
    ("form", "text", "raw"),
    [
        ("hermes", f"Hm. {CALL}", f"Hm. <|calls|>{CALL}<|im_end|>"),
        ("deepseek", f"Hm. add{NUMBERS}", f"Hm. {DEEPSEEK}"),
        ("mistral", f"Hm. add{NUMBERS}", f"Hm. [TOOL_CALLS]add{NUMBERS}</s>"),
    ],
    ids=["hermes", "deepseek", "mistral"],
)
def test_what_is_said_before_a_call_is_content(form: str, text: str, raw: str) -> None:
    async def whole() -> Reaction:
        session = session_of(adds, endpoint, form)
        await session.open({})
        reaction = await session.react(text, raw)
        await session.close()
        return reaction

    with serving() as endpoint:
        reaction = asyncio.run(whole())
    function = {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert reaction.calls == ({"type": "function", "function": function},)
    assert reaction.next_prompt is not None
    assert reaction.next_prompt.messages[1]["content"] == "Hm."


async def later(base_url: str, api_key: str, delay: float) -> None:
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await asyncio.sleep(delay)
        messages: Any = [{"role": "user", "content": "hi"}]
        await client.chat.completions.create(model="any", messages=messages)


def test_an_async_agent_without_a_reward() -> None:
    async def whole() -> tuple[float, bool]:
        session = session_of(later, endpoint)
        await played(session, lambda _: "ho", delay=0.0)
        return await session.outcome(), session.has_rewards

    with serving() as endpoint:
        assert asyncio.run(whole()) == (0.0, False)


def shouts(asked: TurnPrompt) -> str:
    return f"{asked.messages[-1]['content']}!"


def test_two_conversations_stay_apart() -> None:
    async def agent(base_url: str, api_key: str, name: str, meeting: asyncio.Barrier) -> float:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            messages: list[Any] = []
            for turn in range(5):
                await meeting.wait()  # so that both ask at the same time
                messages.append({"role": "user", "content": f"{name}{turn}"})
                answer = await client.chat.completions.create(model="any", messages=messages)
                messages.append(answer.choices[0].message)
            wanted = [f"{name}{turn}!" for turn in range(5)]
            return float([one.content for one in messages[1::2]] == wanted)

    async def both() -> list[float]:
        meeting = asyncio.Barrier(2)
        sessions = [session_of(agent, endpoint) for _ in "ab"]
        plays = [
            played(
                one, lambda asked: f"{asked.messages[-1]['content']}!", name=name, meeting=meeting
            )
            for one, name in zip(sessions, "ab", strict=True)
        ]
        for name, heard in zip("ab", await asyncio.gather(*plays), strict=True):
            assert all(
                message["content"].startswith(name)
                for asked in heard[:-1]
                for message in asked.messages
            )
            assert len(heard) == 6
        rewards = [await one.outcome() for one in sessions]
        await asyncio.gather(*[one.close() for one in sessions])
        return rewards

    with serving() as endpoint:
        assert asyncio.run(both()) == [1.0, 1.0]


def test_questions_at_the_same_time_are_answered_one_after_the_other() -> None:
    async def agent(base_url: str, api_key: str) -> float:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

            async def one(word: str) -> bool:
                messages: Any = [{"role": "user", "content": word}]
                answer = await client.chat.completions.create(model="any", messages=messages)
                return answer.choices[0].message.content == word.upper()

            return float(sum(await asyncio.gather(*[one(word) for word in "abcd"])))

    asked, _, reward = play(agent, lambda asked: asked.messages[0]["content"].upper())
    assert sorted(one.messages[0]["content"] for one in asked) == ["a", "b", "c", "d"]
    assert reward == 4.0


def raises(base_url: str, api_key: str) -> None:
    ask(base_url, api_key, "hi")
    raise ValueError("no idea")


def exits(base_url: str, api_key: str) -> None:
    ask(base_url, api_key, "hi")
    raise SystemExit(3)


def tells(base_url: str, api_key: str) -> str:
    ask(base_url, api_key, "hi")
    return "well done"


async def cancels_itself(base_url: str, api_key: str) -> None:
    await later(base_url, api_key, 0.0)
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("agent", "failure"),
    [
        (lambda: 1.0, r"<lambda>\(\) ended without asking the policy anything"),
        (lambda: 1 / 0, r"<lambda>\(\) raised ZeroDivisionError: division by zero"),
        (lambda question: None, r"<lambda>\(\) raised TypeError: .*'question'"),
        (raises, r"raises\(\) raised ValueError: no idea"),
        (exits, r"exits\(\) raised RuntimeError: SystemExit: 3"),
        (cancels_itself, r"cancels_itself\(\) cancelled itself"),
        (tells, r"tells\(\) returned 'well done', not a finite number"),
    ],
)
def test_a_bad_agent_fails_its_episode(agent: Callable[..., Any], failure: str) -> None:
    with pytest.raises(EnvironmentFailure, match=f"^{failure}"):
        play(agent, lambda _: "ho")


@pytest.mark.parametrize("asks", [0, 1])
def test_an_agent_that_hangs_is_given_up(asks: int) -> None:
    free = threading.Event()

    def hangs(base_url: str, api_key: str) -> None:
        for _ in range(asks):
            ask(base_url, api_key, "hi")
        free.wait(20)

    async def whole() -> None:
        limits = {"reset_timeout": 5.0, "timeout": 0.2} if asks else {"reset_timeout": 0.3}
        session = session_of(hangs, endpoint, **limits)
        started = time.monotonic()
        with pytest.raises(EnvironmentFailure, match=r"hangs\(\) neither asked nor ended within 0"):
            await played(session, lambda _: "ho")
        await session.close()
        assert time.monotonic() - started < 15

    with serving() as endpoint:
        asyncio.run(whole())
    free.set()


def test_a_closed_session_ends_its_agent() -> None:
    """Whether it waits for an answer in a thread, asks again, or is async."""
    errors: list[int] = []
    ended = threading.Event()

    def waits(base_url: str, api_key: str) -> None:
        for _ in range(2):
            try:
                ask(base_url, api_key, "hi")
            except openai.APIStatusError as error:
                errors.append(error.status_code)
        ended.set()

    cleaned = []

    async def cleans_up(base_url: str, api_key: str) -> None:
        try:
            await later(base_url, api_key, 0.0)
        finally:
            cleaned.append(True)

    async def whole() -> None:
        for agent in (waits, cleans_up):
            session = session_of(agent, endpoint)
            await session.open({})
            await session.close()
        await session_of(waits, endpoint).close()  # which was never opened

    with serving() as endpoint:
        asyncio.run(whole())
        assert ended.wait(10)
    assert errors == [410, 401]
    assert cleaned == [True]


def test_a_question_that_nobody_waits_for_any_more_is_not_answered() -> None:
    async def agent(base_url: str, api_key: str) -> None:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

            def asking(word: str, timeout: float) -> asyncio.Future[Any]:
                messages: Any = [{"role": "user", "content": word}]
                chat = client.chat.completions
                return asyncio.ensure_future(
                    chat.create(model="any", messages=messages, timeout=timeout)
                )

            first = asking("a", 10)
            await opened.wait()
            with pytest.raises(openai.APITimeoutError):
                await asking("b", 0.3)
            last = asking("c", 10)
            gone.set()
            await asyncio.gather(first, last)

    opened, gone = asyncio.Event(), asyncio.Event()

    async def whole() -> list[str]:
        session = session_of(agent, endpoint)
        heard = [await session.open({})]
        opened.set()
        await gone.wait()
        assert session._key is not None
        _, waiting = endpoint._conversations._open[session._key]
        async with asyncio.timeout(20):  # until the endpoint has noticed
            while {one.prompt.messages[0]["content"] for one in [*waiting]} != {"a", "c"}:
                await asyncio.sleep(0.01)
        while (asked := (await session.react("ho", "ho")).next_prompt) is not None:
            heard.append(asked)
        await session.close()
        return [one.messages[0]["content"] for one in heard]

    with serving() as endpoint:
        assert asyncio.run(whole()) == ["a", "c"]
