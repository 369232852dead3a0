"""One episode's environment: made, called with limits of time, and closed in every case."""

from __future__ import annotations

import asyncio
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Protocol

from lrlhf.background import in_background
from lrlhf.environments.tool_calls import (
    MalformedCall,
    ToolCall,
    ToolCallFormat,
    chat_call,
    content_outside_calls,
)
from lrlhf.environments.tools import (
    Tool,
    UnreadableResultError,
    result_content,
    result_text,
    tools_by_name,
    tools_of,
)
from lrlhf.media.decode import BadRow, MediaOptions
from lrlhf.types import Message

Content = str | list[Message]
"""Text, or parts of a message with images."""


class TextEnvironment(ABC):
    """An environment that reads the text of the policy's turns, instead of offering tools.

    For tasks of small models, which write ``guess: 42`` more reliably than a call in JSON. It may
    have ``reset``, ``reward``, ``get_reward``, ``done`` and ``close`` as any environment.
    """

    @abstractmethod
    def step(self, action: str) -> Any:
        """Answer a turn of the policy.

        Args:
            action: The turn, without special tokens and without the stop string that ended it.

        Returns:
            What the policy reads next, also awaited: text or images (see docs/environments.md) are
            the user's turn of a chat; in plain text they are put behind the policy's text as they
            are. None: the episode is over.
        """


class EnvironmentFailure(RuntimeError):  # noqa: N818  a state of an episode, as EngineFailure
    """An environment raised, took too long, or answered with what cannot be used."""


class TurnPrompt(NamedTuple):
    """The complete prompt of a turn, from what holds the conversation itself, such as an agent."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas, for the chat template."""
    max_tokens: int | None = None
    """Of the turn; None: the run's own limit alone."""


Shown = Content | TurnPrompt | None
"""What an environment begins with: content behind the prompt, a prompt of its own, or nothing."""


class TurnTokens(NamedTuple):
    """The number of tokens of a turn of the policy."""

    prompt: int
    written: int
    cut_off: bool
    """It reached a limit before its end."""


class Reaction(NamedTuple):
    """The answer of an environment to a turn."""

    calls: tuple[Mapping[str, Any], ...]
    """The calls in the turn, as chat templates and rewards take them."""
    messages: tuple[Message, ...]
    """What the policy reads next."""
    reward: float
    finish_reason: str | None
    """``stop`` or ``done``; None: the episode goes on."""
    next_prompt: TurnPrompt | None = None
    """The next turn's prompt, in place of ``messages`` behind the conversation so far."""
    content: str | None = None
    """The turn without ``calls``; None: the format does not locate them."""


class EpisodeSession(Protocol):
    """The environment or agent of one episode. Methods are awaited one after the other.

    All but ``open`` and ``close`` come after a turn. All raise `EnvironmentFailure` where the
    environment raises, takes too long, or answers with what cannot be used.
    """

    environment: Any
    """For the rewards, until it is closed."""

    @property
    def tools(self) -> list[Tool]:
        """What the policy can call; once it is open."""
        ...

    @property
    def has_rewards(self) -> bool:
        """Whether turns or the episode get a reward; at the end."""
        ...

    async def open(self, row: Mapping[str, Any]) -> Shown:
        """Begin an episode.

        Args:
            row: The columns of the prompt's row, of which functions get those that they name.
        """
        ...

    async def react(self, text: str, raw: str, tokens: TurnTokens | None = None) -> Reaction:
        """Answer a turn of the policy.

        Args:
            text: Without special tokens, and without the stop string that ended it.
            raw: With special tokens, which mark the calls of some models.
            tokens: Numbers for an agent; None: it gets none.
        """
        ...

    async def outcome(self) -> float:
        """Return the reward of the episode, on top of those of the turns; 0: none."""
        ...

    async def close(self) -> None:
        """End the episode, in every case."""
        ...


class Session:
    """The environment of one episode; see `EpisodeSession`.

    Args:
        make: Makes the environment; None: there are tools only.
        tools: What the policy can call besides the environment's own.
        read_calls: Finds calls in a turn of the policy.
        timeout: Seconds for each call.
        reset_timeout: Seconds for making and resetting the environment.
        media: How images are read; None: the policy reads text only.
    """

    def __init__(
        self,
        make: Callable[[], Any] | None,
        tools: Sequence[Tool],
        read_calls: ToolCallFormat,
        *,
        timeout: float,
        reset_timeout: float,
        media: MediaOptions | None = None,
    ) -> None:
        self._media = media
        self._make = make
        self._tools = {tool.name: tool for tool in tools}
        self._read_calls = read_calls
        self._timeout = timeout
        self._reset_timeout = reset_timeout
        self._number = 0
        self.environment: Any = None

    @property
    def tools(self) -> list[Tool]:
        return list(self._tools.values())

    @property
    def has_rewards(self) -> bool:
        methods = ("reward", "get_reward")
        return any(callable(getattr(self.environment, name, None)) for name in methods)

    async def open(self, row: Mapping[str, Any]) -> Shown:
        if self._make is None:
            return None
        name = getattr(self._make, "__name__", "environment")
        self.environment = await call_within(
            name, self._make, self._reset_timeout, late=_close_late
        )
        shown = None
        if (reset := getattr(self.environment, "reset", None)) is not None:
            begin = partial(reset, **accepted_columns(reset, row))
            shown = await call_within("reset()", begin, self._reset_timeout)
        if not isinstance(self.environment, TextEnvironment):
            # after the reset, which may be what finds them
            self._tools = tools_by_name([*self._tools.values(), *tools_of(self.environment)])
        return await self._content_or_none(shown, "reset()")

    async def react(self, text: str, raw: str, tokens: TurnTokens | None = None) -> Reaction:
        del tokens
        calls: tuple[Mapping[str, Any], ...] = ()
        content = None
        if isinstance(self.environment, TextEnvironment):
            answer = await self._call("step()", self.environment.step, text)
            shown = await self._content_or_none(answer, "step()")
            messages: list[Message] = []
            if shown is not None:
                messages.append({"role": "user", "content": shown})
            reason = "done" if shown is None else None
        else:
            attempts = self._read_calls(raw)
            messages = [await self._tool_message(call) for call in attempts]
            calls = tuple(chat_call(call) for call in attempts if isinstance(call, ToolCall))
            content = (
                content_outside_calls(attempts, text, raw, self._read_calls) if calls else None
            )
            reason = None if attempts else "stop"
        reward = await self._reward("reward")
        if await self._call("done", self._is_done):
            reason = "done"
        messages = [] if reason else messages
        return Reaction(calls, tuple(messages), reward, reason, content=content)

    async def outcome(self) -> float:
        return await self._reward("get_reward")

    async def close(self) -> None:
        environment, self.environment = self.environment, None
        if callable(close := getattr(environment, "close", None)):
            await self._call("close()", close)

    async def _tool_message(self, call: ToolCall | MalformedCall) -> Message:
        self._number += 1
        message: dict[str, Any] = {"role": "tool", "tool_call_id": f"call{self._number:05d}"}
        if isinstance(call, MalformedCall):
            content: Content = f"error: {call.problem}"
            if callable(answer := getattr(self.environment, "malformed_call", None)):
                result = await self._call("malformed_call()", answer, call.text, call.problem)
                content = await self._content("malformed_call()", result)
            return {**message, "content": content}
        message["name"] = call.name
        if (tool := self._tools.get(call.name)) is None:
            known = ", ".join(self._tools) or "none"
            return {**message, "content": f"error: no tool {call.name!r}; there are: {known}"}
        try:
            result = await within(self._timeout, partial(tool.call, call.arguments))
        except OutOfTimeError as error:
            raise EnvironmentFailure(
                f"{call.name}() took longer than {self._timeout:g} s"
            ) from error
        except Exception as error:  # noqa: BLE001  for the policy to read
            return {**message, "content": f"error: {str(error) or type(error).__name__}"}
        return {**message, "content": await self._content(f"{call.name}()", result)}

    async def _content_or_none(self, value: Any, name: str) -> Content | None:
        if value is None or isinstance(value, str):
            return value and result_text(value)  # which no tokenizer refuses
        if self._media is not None:
            content = await self._content(name, value)
            if isinstance(content, list):
                return content
        what = "text or None" if self._media is None else "text, images or None"
        raise EnvironmentFailure(f"{name} returned a {type(value).__name__}, not {what}")

    async def _content(self, name: str, value: Any) -> Content:
        """Return a result as the policy reads it.

        Raises:
            EnvironmentFailure: There is no form for all of it, or an image cannot be read.
        """
        try:
            if self._media is None or isinstance(value, str):
                return result_text(value)
            # in a thread: images take their time
            read = partial(result_content, value, self._media)
            content: Content = await within(self._timeout, read)
            return content
        except OutOfTimeError as error:
            raise EnvironmentFailure(f"reading what {name} returned took too long") from error
        except UnreadableResultError as error:
            raise EnvironmentFailure(f"{name} returned {error}") from error
        except BadRow as error:
            raise EnvironmentFailure(f"{name} returned what cannot be shown: {error}") from error

    async def _reward(self, name: str) -> float:
        method = getattr(self.environment, name, None)
        if not callable(method):
            return 0.0
        return finite_reward(await self._call(f"{name}()", method), f"{name}()")

    async def _is_done(self) -> bool:
        done = getattr(self.environment, "done", False)
        if callable(done):
            done = await within(self._timeout, done)
        return bool(done)

    async def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        return await call_within(name, partial(function, *arguments), self._timeout)


def _close_late(environment: Any) -> None:
    """Close an environment that was made after its time was up."""
    result = environment.close() if callable(getattr(environment, "close", None)) else None
    if inspect.isawaitable(result):
        asyncio.run(_awaited(result))


class OutOfTimeError(TimeoutError):
    """As opposed to a ``TimeoutError`` of the function's own."""


async def call_within(
    name: str,
    function: Callable[[], Any],
    limit: float,
    *,
    late: Callable[[Any], None] | None = None,
) -> Any:
    """Call a function, see `within`; its errors are the environment's.

    Raises:
        EnvironmentFailure: It raised or took too long.
    """
    try:
        return await within(limit, function, late=late)
    except OutOfTimeError as error:
        raise EnvironmentFailure(f"{name} took longer than {limit:g} s") from error
    except Exception as error:
        raise failure_of(name, error) from error


async def within(
    limit: float, function: Callable[[], Any], *, late: Callable[[Any], None] | None = None
) -> Any:
    """Call a function, see `call`, and wait for what it returns.

    A thread that is too slow is left behind: it cannot be stopped.

    Args:
        limit: In seconds.
        function: Without its arguments.
        late: Called with what such a thread returns.

    Raises:
        OutOfTimeError: It took longer. Whatever else is raised is the function's own.
    """
    threads: list[Future[Any]] = []
    task = asyncio.ensure_future(call(function, threads))
    # wait_for would wait for a task that does not let itself be cancelled
    ended, _ = await asyncio.wait({task}, timeout=limit)
    if not ended:
        task.cancel()
        if late is not None and threads:
            threads[0].add_done_callback(
                lambda thread: None if thread.exception() else late(thread.result())
            )
        raise OutOfTimeError
    if task.cancelled():
        raise RuntimeError("it cancelled itself")
    return task.result()


_ENDINGS = (SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration)
"""What would end an event loop or a thread, and becomes an error like others."""


async def call(function: Callable[[], Any], threads: list[Future[Any]]) -> Any:
    """Call a function, in a thread unless it is async.

    Args:
        function: Without its arguments.
        threads: Gets the future of the thread, if there is one.
    """

    def guarded() -> Any:
        try:
            return function()
        except _ENDINGS as error:
            raise RuntimeError(_summary(error)) from error

    if inspect.iscoroutinefunction(function):
        return await _awaited(function())
    threads.append(in_background(guarded, name="environment"))
    result = await asyncio.wrap_future(threads[0])
    return await _awaited(result) if inspect.isawaitable(result) else result


async def _awaited(result: Awaitable[Any]) -> Any:
    try:
        return await result
    except _ENDINGS as error:
        raise RuntimeError(_summary(error)) from error


def accepted_columns(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row that a function's signature names, or all with ``**``."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return dict(row)
    return {each.name: row[each.name] for each in parameters if each.name in row}


def finite_reward(value: Any, name: str) -> float:
    """Return a reward as a number; None is 0.

    Raises:
        EnvironmentFailure: It is no finite number.
    """
    try:
        reward = 0.0 if value is None else float(value)
    except (TypeError, ValueError):
        reward = math.nan
    if not math.isfinite(reward):
        raise EnvironmentFailure(f"{name} returned {value!r:.80}, not a finite number")
    return reward


def failure_of(name: str, error: BaseException) -> EnvironmentFailure:
    """Return the failure of a function that raised an error."""
    return EnvironmentFailure(f"{name} raised {_summary(error)}")


def _summary(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
