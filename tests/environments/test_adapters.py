"""Environments of other packages, with these packages themselves."""

import asyncio
import contextlib
import importlib.util
import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from lrlhf.environments import Episodes, ToolCall, adapters
from lrlhf.environments.session import EnvironmentFailure, Reaction, Session
from lrlhf.environments.settings import resolve

SHOP = [sys.executable, str(Path(__file__).with_name("mcp_shop.py"))]


def session(name: str, *, timeout: float = 20.0, **options: Any) -> Session:
    """A session with an adapter, found as a config finds it."""
    path = f"lrlhf.environments.adapters.{name}"
    cast = resolve(Episodes(environment=path, options=options))
    return Session(cast.make, [], read_call, timeout=timeout, reset_timeout=60)


def read_call(text: str) -> list[ToolCall]:
    name, _, arguments = text.partition(" ")
    return [ToolCall(name, json.loads(arguments or "{}"))]


@contextlib.asynccontextmanager
async def opened(
    name: str, row: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Any]:
    """A session, what it shows, and a function that says something and returns the reaction."""
    one = session(name, **options)
    try:
        shown = await one.open({"seed": 7, **(row or {})})
        yield one, shown, lambda text: one.react(text, text)
    finally:
        await one.close()


def told(reaction: Reaction) -> str:
    (message,) = reaction.messages
    return str(message["content"])


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "find_spec", lambda _: None)
    for name in adapters.__all__:
        with pytest.raises(ValueError, match=rf"{name} needs the package .*lrlhf\[\w+\]"):
            session(name)


def test_there_is_no_other_adapter() -> None:
    with pytest.raises(ValueError, match="no attribute 'AtariEnvironment'"):
        session("AtariEnvironment")


# ------------------------------------------------------------------ MCP


def children() -> set[int]:
    return {one.pid for one in psutil.Process().children()}


def test_the_tools_of_a_server_are_called() -> None:
    async def played() -> list[str]:
        async with opened("McpTools", servers=[{"command": SHOP}]) as (shop, shown, say):
            assert shown is None
            schema = next(tool.schema for tool in shop.tools if tool.name == "buy")
            assert schema["function"]["description"] == "Buy something."
            assert schema["function"]["parameters"]["required"] == ["item"]
            assert schema["function"]["parameters"]["properties"]["number"]["type"] == "integer"
            calls = (
                'buy {"item": "tea", "number": "2"}',
                'buy {"item": "jam"}',
                'buy {"item": "unicorn"}',
                'buy {"number": 1}',
                'read {"name": "jam"}',
                "key",
            )
            return [told(await say(call)) for call in calls]

    before = children()
    answers = asyncio.run(played())
    assert answers[:2] == ["tea tea", "tea tea jam"]  # the server remembers
    assert answers[2].startswith("error: ")
    assert answers[2].endswith("there are none")
    assert answers[3].startswith("error: wrong arguments: 'item' is missing")
    assert answers[4:] == ["Page:\njam is out of stock", "none"]
    assert children() == before


def test_episodes_have_servers_of_their_own() -> None:
    async def played() -> list[str]:
        servers = [{"command": SHOP, "env": {"SHOP_KEY": "k"}}]
        one, other = opened("McpTools", servers=servers), opened("McpTools", servers=servers)
        async with one as (_, _, here), other as (_, _, there):
            said = [here('buy {"item": "tea"}'), there('buy {"item": "jam"}'), there("key")]
            return [told(await one) for one in said]

    assert asyncio.run(played()) == ["tea", "jam", "k"]


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("look", "look gave content of type image"),
        ("crash", "the MCP server of crash is gone"),
        ("sleep", r"sleep\(\) took longer than 2 s"),
    ],
)
def test_what_no_policy_can_read_fails_the_episode(call: str, problem: str) -> None:
    async def played() -> None:
        async with opened("McpTools", servers=[{"command": SHOP}], timeout=2.0) as (_, _, say):
            await say('buy {"item": "tea"}')
            with pytest.raises(EnvironmentFailure, match=problem):
                await say(call)

    before = children()
    asyncio.run(played())
    assert children() == before


def is_open(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def served(program: str, port: int) -> Iterator[None]:
    command = [sys.executable, program, str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + 60
            while not is_open(port):
                assert time.monotonic() < deadline
                assert server.poll() is None
                time.sleep(0.05)
            yield
        finally:
            server.kill()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_a_server_behind_http() -> None:
    port = free_port()
    server = {"url": f"http://127.0.0.1:{port}/mcp", "headers": {"X-Shop": "1"}}

    async def played() -> str:
        async with opened("McpTools", servers=[server]) as (_, _, say):
            answer = told(await say('buy {"item": "tea"}'))
            with pytest.raises(EnvironmentFailure, match="the MCP server of crash is gone"):
                await say("crash")
            return answer

    with served(SHOP[1], port):
        assert asyncio.run(played()) == "tea"


@pytest.mark.parametrize(
    ("server", "problem"),
    [
        ({"url": f"http://127.0.0.1:{free_port()}/mcp"}, "MCP server http:.*cannot be reached: Co"),
        ({"command": ["no-such-server"]}, "MCP server no-such-server cannot be reached: FileNot"),
        ({"command": [sys.executable, "-c", "pass"]}, "cannot be reached: MCPError: Connection c"),
        ({"command": "server"}, "write a server's command as a list"),
        ({"command": SHOP, "url": "http://a"}, "a server has command, url"),
        ({}, "a server has nothing"),
    ],
)
def test_a_server_that_cannot_be_reached(server: dict[str, Any], problem: str) -> None:
    async def played() -> None:
        async with opened("McpTools", servers=[server]):
            pass

    with pytest.raises(EnvironmentFailure, match=problem):
        asyncio.run(played())


# ------------------------------------------------------------------ Gymnasium

if importlib.util.find_spec("gymnasium"):
    import gymnasium
    from gymnasium.spaces import Discrete, Text
    from gymnasium.wrappers import TransformAction, TransformObservation

    LETTERS = "abcdefghijklmnopqrstuvwxyz 0123456789"

    class Doors(gymnasium.Env[str, str]):
        """The door with the seed's number leads out; each other one costs a point."""

        observation_space = Text(40, charset=LETTERS)
        action_space = Text(6, charset=LETTERS)

        def reset(self, *, seed: Any = None, options: Any = None) -> tuple[str, dict[str, Any]]:
            super().reset(seed=seed)
            self.right = f"door {seed}"
            return f"choose {(options or {}).get('of', 'a door')}", {"tries": 0}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            right = action == self.right
            return "out" if right else "a wall", 1.0 if right else -1.0, right, False, {"tries": 1}

    class Switch(gymnasium.Env[int, int]):
        """On or off; it does not end by itself."""

        observation_space = Discrete(2)
        action_space = Discrete(2)

        def reset(self, *, seed: Any = None, options: Any = None) -> tuple[int, dict[str, Any]]:
            return 0, {}

        def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
            return action, float(action), False, False, {}

    gymnasium.register("Doors-v0", Doors, disable_env_checker=True)
    gymnasium.register("Switch-v0", Switch, disable_env_checker=True)


def in_words(environment: Any) -> Any:
    """Observations and actions of the switch as words."""

    def action_of(word: str) -> int:
        if word not in ("off", "on"):
            raise gymnasium.error.InvalidAction("say on or off")
        return ("off", "on").index(word)

    words = Text(10, charset=LETTERS)
    seen = TransformObservation(environment, lambda state: f"it is {('off', 'on')[state]}", words)
    return TransformAction(seen, action_of, words)


@pytest.fixture
def _gymnasium() -> None:
    pytest.importorskip("gymnasium")


def reactions(said: Sequence[str], row: dict[str, Any] | None = None, **options: Any) -> list[Any]:
    async def played() -> list[Any]:
        async with opened("GymnasiumEnvironment", row, **options) as (one, shown, say):
            heard = [await say(text) for text in said]
            return [shown, *heard, await one.outcome(), one.gives_rewards, one.environment.info]

    return asyncio.run(played())


@pytest.mark.usefixtures("_gymnasium")
def test_texts_go_in_and_out_with_rewards_of_turns() -> None:
    row = {"options": {"of": "three doors"}, "prompt": "x"}
    shown, wrong, odd, right, outcome, rewards, info = reactions(
        [" door 1\n", "DOOR", "door 7"], row, id="Doors-v0"
    )
    assert shown == "choose three doors"
    assert wrong == Reaction((), ({"role": "user", "content": "a wall"},), -1.0, None)
    assert told(odd).startswith("error: 'DOOR' is not in Text(")
    assert (odd.reward, odd.finish_reason) == (0.0, None)
    assert (right.reward, right.finish_reason, right.messages) == (1.0, "done", ())
    assert (outcome, rewards, info) == (0.0, True, {"tries": 1})


@pytest.mark.usefixtures("_gymnasium")
@pytest.mark.parametrize("wrapper", [in_words, f"{__name__}.in_words"])
def test_a_wrapper_makes_spaces_text(wrapper: str | Callable[[Any], Any]) -> None:
    options = {"max_episode_steps": 2}  # of gymnasium.make: the second step is truncated
    shown, odd, on, off, *_ = reactions(
        ["yes", "on", "off"], id="Switch-v0", wrapper=wrapper, options=options
    )
    assert shown == "it is off"
    assert (told(odd), odd.reward) == ("error: say on or off", 0.0)
    assert (told(on), on.reward, on.finish_reason) == ("it is on", 1.0, None)
    assert (off.reward, off.finish_reason) == (0.0, "done")


@pytest.mark.usefixtures("_gymnasium")
def test_spaces_that_are_no_text_are_named() -> None:
    with pytest.raises(
        EnvironmentFailure, match=r"observation space of Switch-v0 is Discrete\(2\)"
    ):
        reactions([], id="Switch-v0")

    def half(environment: Any) -> Any:
        return TransformObservation(environment, str, Text(1, charset="01"))

    with pytest.raises(EnvironmentFailure, match=r"action space of Switch-v0 is Discrete\(2\)"):
        reactions([], id="Switch-v0", wrapper=half)


# ------------------------------------------------------------------ TextArena


def guesses(seed: int) -> list[str]:
    """What the game says to 5, to no number, and to each number until it is found."""

    async def played() -> list[str]:
        async with opened("TextArenaEnvironment", {"seed": seed}, id="GuessTheNumber-v0-raw") as (
            game,
            shown,
            say,
        ):
            assert "guess the number between 1 and 20" in shown
            heard = [await say("[5]"), await say("five")]
            while heard[-1].finish_reason is None:
                heard.append(await say(f"[{len(heard) * 2}]"))
            assert [one.reward for one in heard] == [0.0] * len(heard)
            return [*map(told, heard[:-1]), str(await game.outcome())]

    return asyncio.run(played())


def test_a_game_tells_what_is_new() -> None:
    pytest.importorskip("textarena")
    random.seed(0)
    expected = random.Random(3).randint(1, 20)  # as the game draws it
    said = guesses(3)
    assert said[0] == f"The target number is {'lower' if expected < 5 else 'higher'}."
    assert said[1].startswith("You attempted an invalid move.")
    assert guesses(3) == said
    assert random.random() == random.Random(0).random()  # the run's own state is as it was


def test_games_draw_apart() -> None:
    pytest.importorskip("textarena")

    async def boards(*seeds: int) -> list[str]:
        async with contextlib.AsyncExitStack() as stack:
            games = [
                await stack.enter_async_context(
                    opened("TextArenaEnvironment", {"seed": seed}, id="2048-v0-raw")
                )
                for seed in seeds
            ]
            for _, _, say in games:
                await say("[left]")
            return [told(await say("[down]")) for _, _, say in games]

    alone = [asyncio.run(boards(seed))[0] for seed in (1, 2)]
    assert alone[0] != alone[1]
    assert asyncio.run(boards(1, 2)) == alone


@pytest.mark.parametrize(
    ("game", "problem"),
    [
        ("GuessTheNumber-v0", "take GuessTheNumber-v0-raw"),
        ("TicTacToe-v0-raw", "number of players has to be 2"),
        ("Tennis-v0-raw", "Tennis-v0-raw not found"),
    ],
)
def test_games_that_cannot_be_played(game: str, problem: str) -> None:
    pytest.importorskip("textarena")

    async def played() -> None:
        async with opened("TextArenaEnvironment", id=game):
            pass

    with pytest.raises(EnvironmentFailure, match=problem):
        asyncio.run(played())


# ------------------------------------------------------------------ OpenEnv


def test_an_openenv_server_reads_turns() -> None:
    pytest.importorskip("openenv")
    port = free_port()

    async def played(observation: str | None) -> list[Any]:
        async with opened(
            "OpenEnvEnvironment",
            {"options": {"word": "abc"}},
            url=f"http://127.0.0.1:{port}",
            action="guess",
            observation=observation,
        ) as (one, shown, say):
            heard = [await say("abd"), await say("abc")]
            return [shown, heard, await one.outcome()]

    with served(str(Path(__file__).with_name("openenv_word.py")), port):
        shown, (near, right), outcome = asyncio.run(played("text"))
        assert shown == "3 letters, seed 7"
        assert (told(near), near.reward, near.finish_reason) == ("2 letters are right", 0.5, None)
        assert (right.reward, right.finish_reason, outcome) == (1.0, "done", 0.0)
        shown, (near, _), _ = asyncio.run(played(None))
        assert json.loads(told(near)) == {"text": "2 letters are right", "letters": 2}
        with pytest.raises(
            EnvironmentFailure, match="'letters' is 0, no text; it has metadata, text, let"
        ):
            asyncio.run(played("letters"))
    with pytest.raises(EnvironmentFailure, match=rf"reset\(\) raised Conn.*{port}"):
        asyncio.run(played("text"))


def test_an_openenv_server_offers_tools() -> None:
    pytest.importorskip("openenv")
    port = free_port()

    async def played() -> list[Any]:
        url = f"http://127.0.0.1:{port}"
        async with opened("OpenEnvTools", url=url) as (one, shown, say):
            assert shown == ""
            assert [tool.name for tool in one.tools] == ["letters"]
            said = [await say(call) for call in ('letters {"word": "abc"}', 'letters {"word": ""}')]
            return [*said, await say('letters {"number": 3}')]

    with served(str(Path(__file__).with_name("openenv_letters.py")), port):
        counted, failed, wrong = asyncio.run(played())
    assert (told(counted), counted.reward) == ("3", 0.25)
    assert told(failed).startswith("error: ")
    assert "no word" in told(failed)
    assert told(wrong).startswith("error: wrong arguments: 'word' is missing")
