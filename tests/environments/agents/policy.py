"""The policy's side of an agent's episode, without an engine."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lrlhf.environments import TOOL_CALL_FORMATS
from lrlhf.environments.agents import AgentSession, ChatEndpoint
from lrlhf.environments.session import Reaction, TurnPrompt

Policy = Callable[[TurnPrompt], str]
"""From a prompt to the policy's turn."""

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@contextmanager
def serving() -> Iterator[ChatEndpoint]:
    endpoint = ChatEndpoint()
    try:
        yield endpoint
    finally:
        endpoint.close()


def session_of(
    agent: Callable[..., Any], endpoint: ChatEndpoint, form: str = "hermes", **limits: float
) -> AgentSession:
    limits = {"timeout": 10.0, "reset_timeout": 10.0, **limits}
    return AgentSession(agent, endpoint, TOOL_CALL_FORMATS[form], **limits)


async def played(session: AgentSession, policy: Policy, **row: Any) -> list[Any]:
    """Play an episode; returns what was asked, with the reaction to the last turn at the end."""
    asked: TurnPrompt | None = await session.open(row)
    heard: list[Any] = []
    while asked is not None:
        heard.append(asked)
        text = policy(asked)
        reaction = await session.react(text, f"{text}<|im_end|>")
        asked = reaction.next_prompt
    return [*heard, reaction]


def play(
    agent: Callable[..., Any], policy: Policy, **row: Any
) -> tuple[list[TurnPrompt], Reaction, float]:
    """Play an episode: what was asked, how it ended, the reward."""

    async def whole() -> tuple[list[Any], float]:
        session = session_of(agent, endpoint)
        try:
            heard = await played(session, policy, **row)
            return heard, await session.outcome()
        finally:
            await session.close()

    with serving() as endpoint:
        (*asked, end), reward = asyncio.run(whole())
    return asked, end, reward
