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
    turn_limit: int | None = None
    """Tokens of the next turn; None: as the run has it."""
    contexts: list[list[int]] = field(init=False)
    """The tokens, by place behind one another in the row, of every prompt that a turn had, with
    what was said behind it; the last one goes on."""
    _fork: int = 0
    """Tokens of the row that what comes next does not follow."""

    def __post_init__(self) -> None:
        self.contexts = [[*range(len(self.prompt_ids))]]

    @property
    def turns(self) -> int:
        """Turns of the policy so far."""
        return len(self.ends)

    @property
    def used(self) -> int:
        """Tokens behind the prompt."""
        return 0 if self.response is None else len(self.response.token_ids)

    @property
    def row_ids(self) -> list[int]:
        """All tokens, in the order in which they came."""
        behind = [] if self.response is None else self.response.token_ids.tolist()
        return [*self.prompt_ids, *behind]

    @property
    def context(self) -> list[int]:
        """All tokens that the next turn goes on from."""
        ids = self.row_ids
        return [ids[place] for place in self.contexts[-1]]

    def begins(self, prompt: Prompt, ids: Sequence[int]) -> None:
        """Replace the prompt, before the first turn."""
        self.prompt, self.prompt_ids = prompt, [*ids]
        self.contexts = [[*range(len(ids))]]

    def wrote(self, turn: Response, text: TurnText) -> None:
        """Add a turn of the policy's."""
        self.last_turn = text
        prompt, written = len(self.contexts[-1]), len(turn.token_ids)
        self.last_tokens = TurnTokens(prompt, written, cut_off=turn.truncated)
        self.wrote_ids.append((text.raw, turn.token_ids.tolist()))
        self._extend(len(turn.token_ids))
        if self.response is None:
            self.response = turn
        else:
            self.response = self.response.followed_by(turn, fork=self._fork)
        self._fork = 0
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
        if not tokens:
            return
        ids = torch.tensor(tokens, dtype=torch.long, device=self.response.token_ids.device)
        self._extend(len(ids))
        self.response, self._fork = self.response.given(ids, fork=self._fork), 0

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, as the policy wrote it: calls stand in its own words.

        Raises:
            ValueError: It is plain text.
        """
        if isinstance(self.prompt, str):
            raise ValueError(
                "episodes.history is template, and the prompts are plain text, which no chat "
                "template renders: drop history, or give chats"
            )
        said = ({k: v for k, v in one.items() if k != "tool_calls"} for one in self.said)
        return [*self.prompt, *said]

    def new_messages(self, conversation: Sequence[Message]) -> tuple[Message, ...]:
        """Return the messages of a conversation from the first on that is not part of this one.

        Args:
            conversation: What the policy wrote may stand there in other words.
        """
        same = 0
        for one, other in zip(self.messages, conversation, strict=False):
            own = one["role"] == "assistant"
            if one["role"] != other["role"] or not (own or one["content"] == other["content"]):
                break
            same += 1
        return tuple(conversation[same:])

    def goes_on_from(self, prompt_ids: Sequence[int]) -> list[int]:
        """Make a prompt what the next turn goes on from.

        Returns:
            What of it no turn has seen yet, and its last token in any case, to be given now: that
            is where one turn ends and another begins.
        """
        ids = self.row_ids
        known = prompt_ids[:-1]
        shared = [_common([ids[place] for place in one], known) for one in self.contexts]
        latest = max(range(len(shared)), key=lambda number: (shared[number], number))
        kept = self.contexts[latest][: shared[latest]]
        if kept != self.contexts[-1]:
            self.contexts.append(kept)
            self._fork = len(ids) - 1 - (kept[-1] if kept else -1)
        return [*prompt_ids[len(kept) :]]

    def _extend(self, tokens: int) -> None:
        start = len(self.prompt_ids) + self.used
        self.contexts[-1].extend(range(start, start + tokens))

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


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens that two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))
