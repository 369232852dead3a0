"""One episode's environment: made, asked, limited in time, and closed in every case."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from lrlhf.environments.limited_calls import (
    EnvironmentFailure,
    OutOfTimeError,
    answer_of,
    contained,
    finite_reward,
    taken_by,
    too_slow,
    within,
)
from lrlhf.environments.text_environment import TextEnvironment
from lrlhf.environments.tool_calls import MalformedCall, ToolCall, ToolCallFormat
from lrlhf.environments.tools import (
    Tool,
    UnreadableResultError,
    result_text,
    tools_by_name,
    tools_of,
)
from lrlhf.environments.turn_message import beside_calls, described
from lrlhf.types import Message


class Asked(NamedTuple):
    """The whole prompt of a turn, from somebody who keeps the conversation, such as an agent."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas, for the chat template."""
    max_tokens: int | None = None
    """Of the turn; None: the run's own limit alone."""


Shown = str | Asked | None
"""What an environment begins with: text behind the prompt, a prompt of its own, or nothing."""


class TurnTokens(NamedTuple):
    """How many tokens a turn of the policy's took."""

    prompt: int
    written: int
    cut_off: bool
    """It reached a limit before its end."""


class Reaction(NamedTuple):
    """What an environment makes of a turn."""

    calls: tuple[Mapping[str, Any], ...]
    """The calls that were found, as chat templates and rewards take them."""
    messages: tuple[Message, ...]
    """What the policy reads next."""
    reward: float
    finish_reason: str | None
    """``stop`` or ``done``; None: the episode goes on."""
    asked: Asked | None = None
    """The next turn's prompt, in place of ``messages`` behind all that was said."""
    content: str | None = None
    """What the turn says beside ``calls``; None: nobody can tell."""


class EpisodeSession(Protocol):
    """Whom the policy talks to in one episode. Methods are awaited one after the other.

    All but ``open`` and ``close`` come after a turn. They raise `EnvironmentFailure`.
    """

    environment: Any
    """For the rewards, until it is closed."""

    @property
    def tools(self) -> list[Tool]:
        """What the policy can call; once it is open."""
        ...

    @property
    def gives_rewards(self) -> bool:
        """Whether turns or the whole are judged; at the end."""
        ...

    async def open(self, row: Mapping[str, Any]) -> Shown:
        """Begin an episode with the columns of a prompt's row."""
        ...

    async def react(self, text: str, raw: str, tokens: TurnTokens | None = None) -> Reaction:
        """Take a turn of the policy's, without and with special tokens."""
        ...

    async def outcome(self) -> float:
        """Return the reward of the whole."""
        ...

    async def close(self) -> None:
        """End the episode, in every case."""
        ...


class Session:
    """The environment of one episode. Its methods are awaited one after the other.

    Args:
        make: Makes the environment; None: there are tools only.
        tools: What the policy can call beside the environment's own.
        read_calls: Finds calls in what the policy writes.
        timeout: Seconds for each call.
        reset_timeout: Seconds for making and resetting the environment.
    """

    def __init__(
        self,
        make: Callable[[], Any] | None,
        tools: Sequence[Tool],
        read_calls: ToolCallFormat,
        *,
        timeout: float,
        reset_timeout: float,
    ) -> None:
        self._make = make
        self._tools = {tool.name: tool for tool in tools}
        self._read_calls = read_calls
        self._timeout = timeout
        self._reset_timeout = reset_timeout
        self._number = 0
        self.environment: Any = None

    @property
    def tools(self) -> list[Tool]:
        """What the policy can call; of the environment once it is open."""
        return list(self._tools.values())

    @property
    def gives_rewards(self) -> bool:
        """Whether the environment judges turns or the whole."""
        return any(callable(getattr(self.environment, name, None)) for name in _JUDGES)

    async def open(self, row: Mapping[str, Any]) -> Shown:
        """Make the environment and begin an episode.

        Args:
            row: The columns of the prompt's row, from which ``reset`` takes what its signature
                names.

        Returns:
            What it shows at the start.

        Raises:
            EnvironmentFailure: It could not be made or reset.
        """
        if self._make is None:
            return None
        name = getattr(self._make, "__name__", "environment")
        self.environment = await answer_of(name, self._make, self._reset_timeout, late=_close_late)
        shown = None
        if (reset := getattr(self.environment, "reset", None)) is not None:
            begin = partial(reset, **taken_by(reset, row))
            shown = await answer_of("reset()", begin, self._reset_timeout)
        if not isinstance(self.environment, TextEnvironment):
            # after the reset, which may be what finds out about them
            self._tools = tools_by_name([*self._tools.values(), *tools_of(self.environment)])
        return _text_or_none(shown, "reset()")

    async def react(self, text: str, raw: str, tokens: TurnTokens | None = None) -> Reaction:
        """Give a turn of the policy's to the environment.

        Args:
            text: Without special tokens, and without the stop string that ended it.
            raw: With special tokens, which mark the calls of some models.
            tokens: Not asked for.

        Raises:
            EnvironmentFailure: It raised, took too long, or answered with what cannot be used.
        """
        del tokens
        calls: tuple[Mapping[str, Any], ...] = ()
        content = None
        if isinstance(self.environment, TextEnvironment):
            answer = await self._ask("step()", self.environment.step, text)
            said = _text_or_none(answer, "step()")
            messages: list[Message] = [] if said is None else [{"role": "user", "content": said}]
            reason = "done" if said is None else None
        else:
            found = self._read_calls(raw)
            messages = [await self._used(call) for call in found]
            calls = tuple(described(call) for call in found if isinstance(call, ToolCall))
            content = beside_calls(found, text, raw, self._read_calls) if calls else None
            reason = None if found else "stop"
        reward = await self._judged("reward")
        if await self._ask("done", self._is_done):
            reason = "done"
        messages = [] if reason else messages
        return Reaction(calls, tuple(messages), reward, reason, content=content)

    async def outcome(self) -> float:
        """Return the reward of the whole, which comes on top of those of the turns; 0: none.

        Raises:
            EnvironmentFailure: It cannot be told.
        """
        return await self._judged("get_reward")

    async def close(self) -> None:
        """Close the environment.

        Raises:
            EnvironmentFailure: It raised or took too long.
        """
        environment, self.environment = self.environment, None
        if callable(close := getattr(environment, "close", None)):
            await self._ask("close()", close)

    async def _used(self, call: ToolCall | MalformedCall) -> Message:
        """Make a call, and return what the policy is told."""
        self._number += 1
        identity = {"tool_call_id": f"call{self._number:05d}"}
        if isinstance(call, MalformedCall):
            answer = getattr(self.environment, "malformed_call", None)
            told = _error(f"{call.problem}")
            if callable(answer):
                given = await self._ask("malformed_call()", answer, call.text, call.problem)
                told = _read_of("malformed_call()", given)
            return {"role": "tool", "content": told, **identity}
        tool = self._tools.get(call.name)
        message = {"role": "tool", "name": call.name, **identity}
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return {**message, "content": _error(f"no tool {call.name!r}; there are: {known}")}
        try:
            result = await within(self._timeout, partial(tool.call, call.arguments))
        except OutOfTimeError as error:
            raise too_slow(f"{call.name}()", self._timeout) from error
        except Exception as error:  # noqa: BLE001  the policy is to learn of it
            return {**message, "content": _error(str(error) or type(error).__name__)}
        return {**message, "content": _read_of(f"{call.name}()", result)}

    async def _judged(self, name: str) -> float:
        judge = getattr(self.environment, name, None)
        if not callable(judge):
            return 0.0
        return finite_reward(await self._ask(f"{name}()", judge), f"{name}()")

    async def _is_done(self) -> bool:
        done = getattr(self.environment, "done", False)
        if callable(done):
            done = await within(self._timeout, done)
        return bool(done)

    async def _ask(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        call = partial(function, *arguments) if arguments else function
        return await answer_of(name, call, self._timeout)


def _close_late(environment: Any) -> None:
    """Close an environment that was made after nobody waited for it any more."""
    result = environment.close() if callable(getattr(environment, "close", None)) else None
    if inspect.isawaitable(result):
        asyncio.run(contained(result))


_JUDGES = ("reward", "get_reward")


def _text_or_none(value: Any, name: str) -> str | None:
    if value is None or isinstance(value, str):
        return value and result_text(value)  # which no tokenizer refuses
    raise EnvironmentFailure(f"{name} returned a {type(value).__name__}, not text or None")


def _read_of(name: str, value: Any) -> str:
    """Return what the policy reads of a value.

    Raises:
        EnvironmentFailure: It cannot read all of it.
    """
    try:
        return result_text(value)
    except UnreadableResultError as error:
        raise EnvironmentFailure(f"{name} returned {error}") from error


def _error(text: str) -> str:
    return f"error: {text}"
