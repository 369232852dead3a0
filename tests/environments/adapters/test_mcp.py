"""Tools of MCP servers, with the SDK and a server of its own."""

import asyncio
import sys
from typing import Any

import psutil
import pytest

from lrlhf.environments.session import EnvironmentFailure
from lrlhf.media import MediaOptions
from lrlhf.rollout import Sampling
from tests.environments.adapters.sessions import free_port, opened, program, served, told
from tests.rollout.scripted_engine import ScriptedEngine
from tests.rollout.test_episodes import play, prompt_batch, text_of

SHOP = program("mcp_shop.py")


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
        ("look", r"look\(\) returned bytes, which JSON has no form for"),
        ("listen", "listen gave content of type audio"),
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


def test_a_policy_that_sees_images_is_shown_those_of_tools() -> None:
    async def played() -> Any:
        servers = [{"command": SHOP}]
        async with opened("McpTools", servers=servers, media=MediaOptions()) as (_, _, say):
            with pytest.raises(EnvironmentFailure, match=r"look\(\) returned what cannot"):
                await say("look")
            (message,) = (await say("watch")).messages
            return message

    message = asyncio.run(played())
    text, image = message["content"]
    assert (message["role"], text) == ("tool", {"type": "text", "text": "a square:"})
    assert image["image"].size == (3, 2)
    assert image["image"].getpixel((2, 1)) == (255, 0, 0)


def test_a_server_behind_http() -> None:
    port = free_port()
    server = {"url": f"http://127.0.0.1:{port}/mcp", "headers": {"X-Customer": "Ada"}}

    async def played() -> str:
        async with opened("McpTools", servers=[server]) as (_, _, say):
            answer = told(await say("customer"))
            with pytest.raises(EnvironmentFailure, match="the MCP server of crash is gone"):
                await say("crash")
            return answer

    with served("mcp_shop.py", port):
        assert asyncio.run(played()) == "Ada"


def test_a_server_with_many_tools_lists_them_on_pages() -> None:
    async def played() -> list[str]:
        servers = [{"command": program("mcp_pages.py")}, {"command": SHOP}]
        async with opened("McpTools", servers=servers) as (one, _, say):
            assert [tool.name for tool in one.tools][:3] == ["one", "two", "buy"]
            return [told(await say(call)) for call in ("one", "two", 'buy {"item": "tea"}')]

    assert asyncio.run(played()) == ['{"n": 1}', "2", "tea"]


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


def test_a_policy_plays_with_a_server() -> None:
    call = '<tool_call>{"name": "buy", "arguments": {"item": "tea"}}</tool_call>'
    engine = ScriptedEngine(lambda text: call if text.count(call) < 2 else "done")
    prompts = prompt_batch("Shop: ")
    path = "lrlhf.environments.adapters.McpTools"
    options = {"servers": [{"command": SHOP}]}
    before = children()
    rollout, episodes = play(
        engine,
        path,
        prompts,
        num_generations=2,
        sampling=Sampling(max_new_tokens=300),
        options=options,
    )
    episodes.close()
    assert children() == before
    for row in range(2):
        assert text_of(rollout, row) == f"Shop: {call}tea{call}tea teadone"
        assert text_of(rollout, row, sampled=True) == f"{call}{call}done"
