"""The options of episodes: environment, tools or agent, and where a turn ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

from lrlhf.environments.session import TextEnvironment
from lrlhf.environments.tool_calls import tool_call_format
from lrlhf.environments.tools import Tool, schemas_of, tools_of_functions
from lrlhf.functional.names import import_function
from lrlhf.options.conversion import settings


@settings
@dataclass(frozen=True, kw_only=True)
class Episodes:
    """Turns of a policy with an environment or with tools, in place of single responses.

    ``sampling.max_new_tokens`` limits all that follows the prompt, observations of the environment
    included. With ``sampling.stop`` a turn ends at these strings too.

    Args:
        environment: Import path of the class of the environments (from Python the class itself);
            one is made for each episode. docs/environments.md says what it may have. None: there
            are tools only.
        options: Keyword arguments of that class.
        agent: Import path of a function that runs a complete episode by itself, and calls the
            policy with any OpenAI-compatible client: its arguments are those columns of the row
            that it names, and ``base_url``, ``api_key`` and ``model``. It returns the reward. In
            place of an environment and tools.
        tools: Functions that the policy can call, by import path, besides the environment's own.
        tool_calls: How the policy writes calls: a name from
            `lrlhf.environments.TOOL_CALL_FORMATS`, or the import path of a function that reads a
            turn's text. None: as the chat template has it.
        max_turns: Turns of the policy in an episode.
        max_turn_tokens: Tokens of one turn; None: those that the episode has left.
        timeout: Seconds for each call of the environment or a tool.
        reset_timeout: Seconds for making and resetting an environment.
        history: Earlier turns in the policy's context. "tokens": all of them, token by token.
            "template": as the chat template renders them at every turn, such as answers without
            the reasoning before them; what it rewrites is a fork, and the policy is trained on
            each turn in the context in which it was generated.
        wait_for: When the next turns are generated. "all": once every environment has answered,
            which gives the same batches in every run. "any": as soon as one has, without waiting
            for the slowest. None: "any" for an engine that computes elsewhere, else "all".
    """

    environment: str | Callable[..., Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    agent: str | Callable[..., Any] | None = None
    tools: list[str | Callable[..., Any]] = field(default_factory=list)
    tool_calls: str | Callable[..., Any] | None = None
    max_turns: int = 8
    max_turn_tokens: int | None = None
    timeout: float = 60.0
    reset_timeout: float = 300.0
    history: Literal["tokens", "template"] = "tokens"
    wait_for: Literal["all", "any"] | None = None

    def __post_init__(self) -> None:
        if self.environment is None and not self.tools and self.agent is None:
            raise ValueError(
                "episodes has neither an environment nor tools nor an agent: give one of them, or "
                "drop episodes"
            )
        if self.agent is not None and (self.environment is not None or self.options or self.tools):
            raise ValueError(
                "episodes has an agent beside environment, options or tools: an agent brings its "
                "own, so drop either"
            )
        for name in ("max_turns", "max_turn_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"episodes.{name} is {value}; it must be 1 or more")
        for name in ("timeout", "reset_timeout"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"episodes.{name} is {value}; give seconds above 0")


class ResolvedEpisodes(NamedTuple):
    """What the names in `Episodes` stand for."""

    make: Callable[[], Any] | None
    """Makes an environment; None: there are tools only."""
    tools: list[Tool]
    """Besides the environment's own."""
    agent: Callable[..., Any] | None = None
    """Runs an episode by itself."""


def resolve(episodes: Episodes) -> ResolvedEpisodes:
    """Import the environment, the tools or the agent, and check them as far as possible.

    Raises:
        ValueError: One cannot be imported, or a tool cannot be described to the policy.
    """
    tools = tools_of_functions(episodes.tools)
    if episodes.tool_calls is not None:
        tool_call_format(episodes.tool_calls)
    if (agent := episodes.agent) is not None:
        agent = import_function("agent", agent, ()) if isinstance(agent, str) else agent
        return ResolvedEpisodes(None, [], agent)
    environment = episodes.environment
    if isinstance(environment, str):
        environment = import_function("environment", environment, ())
    if environment is None:
        return ResolvedEpisodes(None, tools)
    if isinstance(environment, type) and issubclass(environment, TextEnvironment):
        if tools:
            raise ValueError(
                f"episodes.tools are for environments whose tools are called, and "
                f"{environment.__name__} reads text: call them in its step(), and drop tools"
            )
    elif isinstance(environment, type):
        schemas_of(environment)
    make = partial(environment, **episodes.options)
    # its name in messages
    make.__name__ = getattr(environment, "__name__", "environment")  # type: ignore[attr-defined]
    return ResolvedEpisodes(make, tools)
