"""The state of one episode: turns so far, remaining limits, and the prefix tree of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lrlhf.environments.session import EpisodeSession, Reaction, TurnTokens
from lrlhf.rollout.responses import Response
from lrlhf.rollout.texts import TurnText
from lrlhf.types import Episode, Message, Prompt

TRUNCATED = ("length", "max_turns")
"""Finish reasons of truncated episodes."""


@dataclass(eq=False)
class EpisodeState:
    """A row of a rollout while its episode runs.

    Args:
        number: Index of the row.
        prompt: The policy's prompt, with the first observation of the environment.
        prompt_ids: Its tokens.
        row: The columns of the prompt, with the tools' descriptions for the chat template.
        session: The environment.
        seed: Seed of the response.
        limit: Most tokens behind the prompt.
    """

    number: int
    prompt: Prompt
    prompt_ids: list[int]
    row: Mapping[str, Any]
    session: EpisodeSession
    seed: int
    limit: int
    response: Response | None = None
    history: list[Message] = field(default_factory=list)
    """Messages behind the prompt."""
    rewards: list[float] = field(default_factory=list)
    """Reward of each completed turn."""
    ends: list[int] = field(default_factory=list)
    """Number of tokens behind the prompt at the end of each turn."""
    last_turn: TurnText = field(default_factory=lambda: TurnText("", ""))
    last_tokens: TurnTokens | None = None
    """Position of the last turn in its context."""
    finish_reason: str | None = None
    """None: the episode runs."""
    failure: str = ""
    turn_ids: list[tuple[str, list[int]]] = field(default_factory=list)
    """Text with special tokens, and token ids, of every turn of the policy."""
    call_contents: list[tuple[int, str | None]] = field(default_factory=list)
    """See `Episode`."""
    turn_limit: int | None = None
    """Most tokens of the next turn; None: the run's limit."""
    context: list[int] = field(init=False)
    """All tokens that the next turn continues."""
    _columns: list[int] = field(init=False)
    """Columns of the row with the tokens of the context."""
    _children: dict[tuple[int, int], int] = field(init=False)
    """The prefix tree: the column of the latest token with an id after a column, -1 at the root."""
    _fork: int = 0
    """Tokens at the end of the row that the next segment does not follow."""

    def __post_init__(self) -> None:
        self.set_prompt(self.prompt, self.prompt_ids)

    @property
    def turns(self) -> int:
        """Number of turns of the policy."""
        return len(self.ends)

    @property
    def used(self) -> int:
        """Number of tokens behind the prompt."""
        return 0 if self.response is None else len(self.response.token_ids)

    @property
    def messages(self) -> list[Message]:
        """The conversation as the policy wrote it: calls as text, not parsed."""
        opening = [] if isinstance(self.prompt, str) else self.prompt
        history = (
            {key: value for key, value in message.items() if key != "tool_calls"}
            for message in self.history
        )
        return [*opening, *history]

    @property
    def final_response(self) -> Response:
        """The complete response."""
        assert self.response is not None
        return replace(self.response, truncated=self.finish_reason in TRUNCATED)

    def set_prompt(self, prompt: Prompt, ids: Sequence[int]) -> None:
        """Replace the prompt, before the first turn."""
        self.prompt, self.prompt_ids = prompt, [*ids]
        self.context, self._columns, self._children = [], [], {}
        self._extend(0, ids)

    def add_turn(self, turn: Response, text: TurnText) -> None:
        """Append a turn of the policy."""
        self.last_turn = text
        ids = turn.token_ids.tolist()
        self.last_tokens = TurnTokens(len(self.context), len(ids), cut_off=turn.truncated)
        self.turn_ids.append((text.raw, ids))
        self._extend(len(self.prompt_ids) + self.used, ids)
        self.response = turn if self.response is None else self.response.followed_by(turn)
        self.ends.append(self.used)
        self.rewards.append(0.0)
        self.history.append({"role": "assistant", "content": text.text})

    def add_reaction(self, reaction: Reaction) -> None:
        """Record reward, calls and finish reason of the environment's reaction to a turn."""
        self.rewards[-1] += reaction.reward
        if reaction.calls:
            self.history[-1] = {**self.history[-1], "tool_calls": list(reaction.calls)}
            self.call_contents.append((len(self.history) - 1, reaction.content))
        self.finish_reason = reaction.finish_reason

    def add_observation(self, messages: Sequence[Message], tokens: Sequence[int]) -> None:
        """Append messages that the policy did not write, and their tokens."""
        assert self.response is not None
        self.history.extend(messages)
        ids = torch.tensor(tokens, dtype=torch.long, device=self.response.token_ids.device)
        self._extend(len(self.prompt_ids) + self.used, tokens)
        self.response, self._fork = self.response.with_tokens(ids, fork=self._fork), 0

    def new_messages(self, conversation: Sequence[Message]) -> tuple[Message, ...]:
        """Return the messages of a conversation from where it differs from this one.

        Turns of the policy may differ in wording. Turns that somebody else wrote in its role are
        left out.
        """
        same = 0
        for own, other in zip(self.messages, conversation, strict=False):
            alike = own["role"] == "assistant" or own.get("content") == other.get("content")
            if own["role"] != other["role"] or not alike:
                break
            same += 1
        return tuple(message for message in conversation[same:] if message["role"] != "assistant")

    def continue_from(self, prompt_ids: Sequence[int]) -> list[int]:
        """Make the longest known prefix of a prompt the context of the next turn.

        Args:
            prompt_ids: At least one.

        Returns:
            The remaining tokens of the prompt, its last one in any case: it separates turns.
        """
        columns: list[int] = []
        for token in prompt_ids[:-1]:
            column = self._children.get((columns[-1] if columns else -1, token))
            if column is None:
                break
            columns.append(column)
        if columns != self._columns:
            last = columns[-1] if columns else -1
            self._fork = len(self.prompt_ids) + self.used - 1 - last
            self.context, self._columns = [*prompt_ids[: len(columns)]], columns
        return [*prompt_ids[len(columns) :]]

    def _extend(self, start: int, ids: Sequence[int]) -> None:
        """Append tokens to the context, whose columns begin at ``start``."""
        last = self._columns[-1] if self._columns else -1
        for column, token in enumerate(ids, start):
            self._children[last, token] = last = column
        self._columns.extend(range(start, start + len(ids)))
        self.context.extend(ids)

    def truncate(self, reason: str) -> None:
        """End the episode at a limit, unless it has ended."""
        self.finish_reason = self.finish_reason or reason

    def fail(self, failure: str) -> None:
        """End the episode without a score; the first failure is recorded."""
        self.finish_reason, self.failure = "failed", self.failure or failure

    def episode(self, release: Callable[[], None]) -> Episode:
        """Return the result; ``release`` closes the environment."""
        return Episode(
            prompt=self.prompt,
            messages=tuple(self.history),
            rewards=tuple(self.rewards) if self.session.has_rewards else None,
            finish_reason=self.finish_reason or "stop",
            failure=self.failure,
            environment=self.session.environment,
            release=release,
            call_contents=tuple(self.call_contents),
        )
