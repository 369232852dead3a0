"""One response in the making: the turns so far, and what is left of its limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lrlhf.environments.session import EpisodeSession, Reaction, TurnTokens
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
    session: EpisodeSession
    seed: int
    limit: int
    response: Response | None = None
    said: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """Of each turn that is over."""
    ends: list[int] = field(default_factory=list)
    """Behind the prompt, where each turn ends."""
    last_turn: TurnText = field(default_factory=lambda: TurnText("", ""))
    last_tokens: TurnTokens | None = None
    """Of the last turn."""
    finish_reason: str | None = None
    """None: the episode goes on."""
    failure: str = ""
    wrote_ids: list[tuple[str, list[int]]] = field(default_factory=list)
    """Every turn of the policy's, with special tokens, and its token ids."""
    beside_calls: list[tuple[int, str | None]] = field(default_factory=list)
    """See `Episode`."""
    turn_limit: int | None = None
    """Tokens of the next turn; None: as the run has it."""
    context: list[int] = field(init=False)
    """All tokens that the next turn goes on from."""
    _places: list[int] = field(init=False)
    """Where these stand in the row."""
    _next: dict[tuple[int, int], int] = field(init=False)
    """Place of the latest token of an id behind a place; before the first one is -1."""
    _fork: int = 0
    """Tokens of the row that what comes next does not follow."""

    def __post_init__(self) -> None:
        self.begins(self.prompt, self.prompt_ids)

    @property
    def turns(self) -> int:
        """Turns of the policy so far."""
        return len(self.ends)

    @property
    def used(self) -> int:
        """Tokens behind the prompt."""
        return 0 if self.response is None else len(self.response.token_ids)

    def begins(self, prompt: Prompt, ids: Sequence[int]) -> None:
        """Replace the prompt, before the first turn."""
        self.prompt, self.prompt_ids = prompt, [*ids]
        self.context, self._places, self._next = [], [], {}
        self._extend(0, ids)

    def wrote(self, turn: Response, text: TurnText) -> None:
        """Add a turn of the policy's."""
        self.last_turn = text
        ids = turn.token_ids.tolist()
        self.last_tokens = TurnTokens(len(self.context), len(ids), cut_off=turn.truncated)
        self.wrote_ids.append((text.raw, ids))
        self._extend(len(self.prompt_ids) + self.used, ids)
        self.response = turn if self.response is None else self.response.followed_by(turn)
        self.ends.append(self.used)
        self.rewards.append(0.0)
        self.said.append({"role": "assistant", "content": text.text})

    def heard(self, reaction: Reaction) -> None:
        """Note what the environment made of the last turn."""
        self.rewards[-1] += reaction.reward
        if reaction.calls:
            self.said[-1] = {**self.said[-1], "tool_calls": list(reaction.calls)}
            self.beside_calls.append((len(self.said) - 1, reaction.content))
        self.finish_reason = reaction.finish_reason

    def is_given(self, messages: Sequence[Message], tokens: Sequence[int]) -> None:
        """Add what the policy is given."""
        assert self.response is not None
        self.said.extend(messages)
        ids = torch.tensor(tokens, dtype=torch.long, device=self.response.token_ids.device)
        self._extend(len(self.prompt_ids) + self.used, tokens)
        self.response, self._fork = self.response.given(ids, fork=self._fork), 0

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, as the policy wrote it: calls stand in its own words."""
        opening = [] if isinstance(self.prompt, str) else self.prompt
        said = ({k: v for k, v in one.items() if k != "tool_calls"} for one in self.said)
        return [*opening, *said]

    def new_messages(self, conversation: Sequence[Message]) -> tuple[Message, ...]:
        """Return what a conversation adds to this one, from where the two part.

        Args:
            conversation: What the policy wrote may stand there in other words. Turns that somebody
                else wrote in its name are left out.
        """
        same = 0
        for one, other in zip(self.messages, conversation, strict=False):
            own = one["role"] == "assistant"
            alike = own or one.get("content") == other.get("content")
            if one["role"] != other["role"] or not alike:
                break
            same += 1
        return tuple(one for one in conversation[same:] if one["role"] != "assistant")

    def goes_on_from(self, prompt_ids: Sequence[int]) -> list[int]:
        """Make a prompt what the next turn goes on from.

        Args:
            prompt_ids: At least one.

        Returns:
            What of it no turn has seen yet, and its last token in any case, to be given now: that
            is where one turn ends and another begins.
        """
        places: list[int] = []
        for token in prompt_ids[:-1]:
            place = self._next.get((places[-1] if places else -1, token))
            if place is None:
                break
            places.append(place)
        if places != self._places:
            last = places[-1] if places else -1
            self._fork = len(self.prompt_ids) + self.used - 1 - last
            self.context, self._places = [*prompt_ids[: len(places)]], places
        return [*prompt_ids[len(places) :]]

    def _extend(self, start: int, ids: Sequence[int]) -> None:
        """Go on with tokens that stand in the row from a place on."""
        last = self._places[-1] if self._places else -1
        for place, token in enumerate(ids, start):
            self._next[last, token] = last = place
        self._places.extend(range(start, start + len(ids)))
        self.context.extend(ids)

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
            beside_calls=tuple(self.beside_calls),
        )
