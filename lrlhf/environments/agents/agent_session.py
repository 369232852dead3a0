"""One episode of an agent: a program that asks the policy over HTTP as it would ask any model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from lrlhf.environments.agents.chat_protocol import ChatAnswer
from lrlhf.environments.agents.endpoint import MODEL, ChatEndpoint, Question
from lrlhf.environments.limited_calls import (
    EnvironmentFailure,
    call,
    failed,
    finite_reward,
    taken_by,
)
from lrlhf.environments.session import Asked, Reaction, TurnTokens
from lrlhf.environments.tool_calls import ToolCallFormat
from lrlhf.environments.tools import Tool
from lrlhf.environments.turn_message import call_ids, turn_message


class AgentSession:
    """The conversation with an agent. Its methods are awaited one after the other.

    What the agent asks at the same time is answered one after the other.

    Args:
        agent: Called once, with those columns of the row that its signature names, and with
            ``base_url``, ``api_key`` and ``model`` where it names them. It returns the reward of
            the whole, or None.
        endpoint: What it can ask the policy through.
        read_calls: Finds calls in what the policy writes.
        timeout: Seconds from an answer to the next question, or to the end.
        reset_timeout: Seconds to the first question.
    """

    environment: Any = None

    def __init__(
        self,
        agent: Callable[..., Any],
        endpoint: ChatEndpoint,
        read_calls: ToolCallFormat,
        *,
        timeout: float,
        reset_timeout: float,
    ) -> None:
        self._agent = agent
        self._name = f"{getattr(agent, '__name__', type(agent).__name__)}()"
        self._endpoint = endpoint
        self._read_calls = read_calls
        self._timeout = timeout
        self._reset_timeout = reset_timeout
        self._call_ids = call_ids()
        self._key: str | None = None
        self._running: asyncio.Task[Any] | None = None
        self._question: Question | None = None
        self._reward: float | None = 0.0

    @property
    def tools(self) -> list[Tool]:
        """None: the agent calls its own, and tells of them when it asks."""
        return []

    @property
    def gives_rewards(self) -> bool:
        """Whether the agent has returned a reward, or was stopped before it could."""
        return self._reward is not None

    async def open(self, row: Mapping[str, Any]) -> Asked:
        """Start the agent.

        Args:
            row: The columns of the prompt's row.

        Returns:
            What it asks first.

        Raises:
            EnvironmentFailure: It asks nothing.
        """
        self._questions: asyncio.Queue[Question] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        questions = self._questions
        base_url, self._key = self._endpoint.enter(
            lambda question: loop.call_soon_threadsafe(questions.put_nowait, question)
        )
        given = {**row, "base_url": base_url, "api_key": self._key, "model": MODEL}
        threads: list[Future[Any]] = []
        function = partial(self._agent, **taken_by(self._agent, given))
        self._running = asyncio.ensure_future(call(function, threads))
        asked = await self._next(self._reset_timeout)
        if asked is None:
            raise EnvironmentFailure(f"{self._name} ended without asking the policy anything")
        return asked

    async def react(self, text: str, raw: str, tokens: TurnTokens | None = None) -> Reaction:
        """Answer the agent with a turn of the policy's.

        Args:
            text: Without special tokens, and without the stop string that ended it.
            raw: With special tokens, which mark the calls of some models.
            tokens: How many there were; None: the agent is not told.

        Returns:
            What the agent asks next, or that it has ended.

        Raises:
            EnvironmentFailure: It raised, or neither asked nor ended in time.
        """
        assert self._question is not None
        read_calls = self._read_calls if self._question.asked.tools else None
        message = turn_message(text, raw, read_calls, self._call_ids)
        self._question.answer(ChatAnswer(message, tokens))
        calls = tuple(
            {"type": "function", "function": one["function"]}
            for one in message.get("tool_calls", ())
        )
        asked = await self._next(self._timeout)
        reason = "stop" if asked is None else None
        return Reaction(calls, (), 0.0, reason, asked, message["content"])

    async def outcome(self) -> float:
        """Return the reward of the whole, which is what the agent returned; 0: nothing yet."""
        return self._reward or 0.0

    async def close(self) -> None:
        """End the agent: nobody answers it any more.

        Raises:
            EnvironmentFailure: It is async, and does not let itself be cancelled.
        """
        if self._key is not None:
            self._endpoint.leave(self._key)
        running, self._running = self._running, None
        if running is None or running.done():
            return
        running.cancel()
        await asyncio.wait({running}, timeout=self._timeout)
        if not running.done():
            raise EnvironmentFailure(f"{self._name} does not let itself be cancelled")
        if not running.cancelled():
            running.exception()  # it is nobody's any more

    async def _next(self, limit: float) -> Asked | None:
        """Wait for a question; None: the agent has ended."""
        assert self._running is not None
        try:
            async with asyncio.timeout(limit):
                while not self._running.done():
                    question = await self._question_or_end(self._running)
                    if question is not None and question.taken():
                        self._question = question
                        return question.asked
        except TimeoutError as error:
            what = f"{self._name} neither asked nor ended within {limit:g} s"
            raise EnvironmentFailure(what) from error
        if self._running.cancelled():
            raise EnvironmentFailure(f"{self._name} cancelled itself")
        if (raised := self._running.exception()) is not None:
            raise failed(self._name, raised) from raised
        returned = self._running.result()
        self._reward = None if returned is None else finite_reward(returned, self._name)
        return None

    async def _question_or_end(self, running: asyncio.Task[Any]) -> Question | None:
        question = asyncio.ensure_future(self._questions.get())
        try:
            await asyncio.wait({question, running}, return_when=asyncio.FIRST_COMPLETED)
            return question.result() if question.done() else None
        finally:
            question.cancel()
