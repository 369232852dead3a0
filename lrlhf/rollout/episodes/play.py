"""One response in the making: the turns so far, and what is left of its limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lrlhf.environments.session import Reaction, Session
from lrlhf.rollout.responses import Response
from lrlhf.rollout.texts import TurnText
from lrlhf.types import Episode, Message, Prompt

CUT_OFF = ("length", "max_turns")
"""Reasons that end an episode before its time."""


@dataclass(eq=False)
class Play:
    """A row of a rollout while its episode goes on.

    Args:
        number: Of the row.
        prompt: That the policy reads, what the environment showed at the start included.
        prompt_ids: Its tokens.
        row: The columns of the prompt, with the tools' descriptions for the chat template.
        session: The environment.
        seed: Of the response.
        limit: Tokens behind the prompt.
    """

    number: int
    prompt: Prompt
    prompt_ids: list[int]
    row: Mapping[str, Any]
    session: Session
    seed: int
    limit: int
    response: Response | None = None
    said: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """Of each turn that is over."""
    ends: list[int] = field(default_factory=list)
    """Behind the prompt, where each turn ends."""
    last_turn: TurnText = field(default_factory=lambda: TurnText("", ""))
    finish_reason: str | None = None
    """None: the episode goes on."""
    failure: str = ""

    @property
    def turns(self) -> int:
        """Turns of the policy so far."""
        return len(self.ends)

    @property
    def used(self) -> int:
        """Tokens behind the prompt."""
        return 0 if self.response is None else len(self.response.token_ids)

    @property
    def context(self) -> list[int]:
        """All tokens so far."""
        behind = [] if self.response is None else self.response.token_ids.tolist()
        return [*self.prompt_ids, *behind]

    def wrote(self, turn: Response, text: TurnText) -> None:
        """Add a turn of the policy's."""
        self.last_turn = text
        self.response = turn if self.response is None else self.response.followed_by(turn)
        self.ends.append(self.used)
        self.rewards.append(0.0)
        self.said.append({"role": "assistant", "content": text.text})

    def heard(self, reaction: Reaction) -> None:
        """Note what the environment made of the last turn."""
        self.rewards[-1] += reaction.reward
        if reaction.calls:
            self.said[-1] = {**self.said[-1], "tool_calls": list(reaction.calls)}
        self.finish_reason = reaction.finish_reason

    def is_given(self, messages: Sequence[Message], tokens: Sequence[int]) -> None:
        """Add what the policy is given."""
        assert self.response is not None
        self.said.extend(messages)
        ids = torch.tensor(tokens, dtype=torch.long, device=self.response.token_ids.device)
        self.response = self.response.given(ids)

    def cut_off(self, reason: str) -> None:
        """End the episode at a limit, unless it is over."""
        self.finish_reason = self.finish_reason or reason

    @property
    def whole(self) -> Response:
        """All that follows the prompt."""
        assert self.response is not None
        return replace(self.response, truncated=self.finish_reason in CUT_OFF)

    def fail(self, failure: str) -> None:
        """End the episode without a score; the first reason counts."""
        self.finish_reason, self.failure = "failed", self.failure or failure

    def episode(self, release: Callable[[], None]) -> Episode:
        """Return what happened.

        Args:
            release: Closes the environment.
        """
        return Episode(
            prompt=self.prompt,
            messages=tuple(self.said),
            rewards=tuple(self.rewards) if self.session.gives_rewards else None,
            finish_reason=self.finish_reason or "stop",
            failure=self.failure,
            environment=self.session.environment,
            release=release,
        )
