"""Environments of OpenEnv, with its client and servers."""

import asyncio
import json
from typing import Any

import pytest

from lrlhf.environments.session import EnvironmentFailure
from lrlhf.media import MediaOptions
from tests.environments.adapters.sessions import free_port, opened, served, told

pytest.importorskip("openenv")


def test_an_openenv_server_reads_turns() -> None:
    port = free_port()

    async def played(observation: str | None, **options: Any) -> list[Any]:
        async with opened(
            "OpenEnvEnvironment",
            {"options": {"word": "abc"}},
            url=f"http://127.0.0.1:{port}",
            action="guess",
            observation=observation,
            **options,
        ) as (one, shown, say):
            heard = [await say("abd"), await say("abc")]
            return [shown, heard, await one.outcome()]

    with served("openenv_word.py", port):
        shown, (near, right), outcome = asyncio.run(played("text"))
        assert shown == "3 letters, seed 7"
        assert (told(near), near.reward, near.finish_reason) == ("2 letters are right", 0.5, None)
        assert (right.reward, right.finish_reason, outcome) == (1.0, "done", 0.0)
        shown, (near, _), _ = asyncio.run(played(None))
        fields = json.loads(told(near))
        assert (fields.pop("drawn")[:4], fields) == (
            "iVBO",
            {"text": "2 letters are right", "letters": 2},
        )
        shown, (near, _), _ = asyncio.run(played("text", image="drawn", media=MediaOptions()))
        for text, image in (shown, near.messages[0]["content"]):
            assert text["text"] in ("3 letters, seed 7", "2 letters are right")
            assert image["image"].getpixel((0, 0)) == (255, 0, 0)
        with pytest.raises(
            EnvironmentFailure, match="'letters' is 0, no text; it has metadata, text, let"
        ):
            asyncio.run(played("letters"))
    with pytest.raises(EnvironmentFailure, match=rf"reset\(\) raised Conn.*{port}"):
        asyncio.run(played("text"))


def test_an_openenv_server_offers_tools() -> None:
    port = free_port()

    async def played() -> list[Any]:
        url = f"http://127.0.0.1:{port}"
        async with opened("OpenEnvTools", url=url) as (one, shown, say):
            assert shown == ""
            assert [tool.name for tool in one.tools] == ["letters"]
            said = [await say(call) for call in ('letters {"word": "abc"}', 'letters {"word": ""}')]
            return [*said, await say('letters {"number": 3}')]

    with served("openenv_letters.py", port):
        counted, failed, wrong = asyncio.run(played())
    assert (told(counted), counted.reward) == ("3", 0.25)
    assert told(failed).startswith("error: ")
    assert "no word" in told(failed)
    assert told(wrong).startswith("error: wrong arguments: 'word' is missing")
