"""The state of one episode: turns so far, remaining limits, and the prefix tree of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from lrlhf.environments.session import EpisodeSession, Reaction, TurnTokens
from lrlhf.media.parts import without_images
from lrlhf.rewards.function import content_text
from lrlhf.rollout.responses import Response
from lrlhf.rollout.texts import TurnText
from lrlhf.types import Episode, Media, Message, Prompt

TRUNCATED = ("length", "max_turns")
"""Finish reasons of truncated episodes."""


class ContextTokens(NamedTuple):
    """Tokens of a context, and what some of them stand for."""

    ids: list[int]
    media: tuple[tuple[int, int, Media], ...] = ()
    """First token, number of tokens, and what they show, in order."""

    @property
    def keys(self) -> Sequence[Hashable]:
        """What the prefix tree tells tokens apart by: those of different images are different."""
        if not self.media:
            return self.ids
        keys: list[Hashable] = [*self.ids]
        for start, length, media in self.media:
            keys[start : start + length] = [(id(media), offset) for offset in range(length)]
        return keys

    def behind(self, start: int) -> ContextTokens:
        """Return the tokens from ``start`` on, which is in front of, or behind, what each shows."""
        media = ((at - start, length, each) for at, length, each in self.media if at >= start)
        return ContextTokens(self.ids[start:], tuple(media))

    @property
    def row_media(self) -> Media | None:
        """The media of a row of these tokens, with ids that have one token per image."""
        if not self.media:
            return None
        if self.media[0][1] == len(self.ids):  # a prompt as the data have it
            return self.media[0][2]
        short, end = list[int](), 0
        for start, length, media in self.media:
            short += [*self.ids[end:start], *media.prompt_ids]
            end = start + length
        return Media.joined([media for _, _, media in self.media], [*short, *self.ids[end:]])


@dataclass(eq=False)
class EpisodeState:
    """A row of a rollout while its episode runs.

    Args:
        number: Index of the row.
        prompt: The policy's prompt, with the first observation of the environment.
        prompt_tokens: Its tokens.
        row: The columns of the prompt, with the tools' descriptions for the chat template.
        session: The environment.
        seed: Seed of the response.
        limit: Most tokens behind the prompt.
    """

    number: int
    prompt: Prompt
    prompt_tokens: ContextTokens
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
    images: Sequence[Any] = ()
    """Images of the conversation, each once, in the order of its messages."""
    context: list[int] = field(init=False)
    """All tokens that the next turn continues."""
    _columns: list[int] = field(init=False)
    """Columns of the row with the tokens of the context."""
    _children: dict[tuple[int, Hashable], int] = field(init=False)
    """The prefix tree: the column of the latest token with a key after a column, -1 at the root."""
    _media: dict[int, tuple[int, Media]] = field(init=False)
    """By first column: the number of tokens of what the row shows, and what that is."""
    _fork: int = 0
    """Tokens at the end of the row that the next segment does not follow."""

    def __post_init__(self) -> None:
        self.set_prompt(self.prompt, self.prompt_tokens, self.images)

    @property
    def prompt_ids(self) -> list[int]:
        return self.prompt_tokens.ids

    @property
    def context_tokens(self) -> ContextTokens:
        """The context with what it shows."""
        shown = ((at, self._media.get(column)) for at, column in enumerate(self._columns))
        media = [(at, *own) for at, own in shown if own] if self._media else []
        return ContextTokens(self.context, tuple(media))

    @property
    def row_media(self) -> Media | None:
        """What the complete row shows, the prompt and each branch included; ids of the prompt."""
        own = [(column, *self._media[column]) for column in sorted(self._media)]
        if len(own) == 1 and own[0][1] == len(self.prompt_ids):
            return own[0][2]  # the media of the data, which the group's rows share
        prompt = self.prompt_tokens.row_media
        ids = self.prompt_ids if prompt is None else prompt.prompt_ids
        return Media.joined([media for _, _, media in own], ids) if own else None

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

    def set_prompt(self, prompt: Prompt, tokens: ContextTokens, images: Sequence[Any]) -> None:
        """Replace the prompt, before the first turn."""
        self.prompt, self.prompt_tokens, self.images = prompt, tokens, images
        self.context, self._columns, self._children, self._media = [], [], {}, {}
        self._extend(0, tokens)

    def add_turn(self, turn: Response, text: TurnText) -> None:
        """Append a turn of the policy."""
        self.last_turn = text
        ids = turn.token_ids.tolist()
        self.last_tokens = TurnTokens(len(self.context), len(ids), cut_off=turn.truncated)
        self.turn_ids.append((text.raw, ids))
        self._extend(len(self.prompt_ids) + self.used, ContextTokens(ids))
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

    def add_observation(self, messages: Sequence[Message], tokens: ContextTokens) -> None:
        """Append messages that the policy did not write, and their tokens."""
        assert self.response is not None
        self.history.extend(messages)
        self.images = [*self.images, *without_images(messages)[1]]
        ids = torch.tensor(tokens.ids, dtype=torch.long, device=self.response.token_ids.device)
        self._extend(len(self.prompt_ids) + self.used, tokens)
        self.response, self._fork = self.response.with_tokens(ids, fork=self._fork), 0

    def new_messages(self, conversation: Sequence[Message]) -> tuple[Message, ...]:
        """Return the messages of a conversation that are not in this one.

        Turns of the policy may differ in wording, and images may be missing. From where the
        conversations differ, messages behind the last turn are new whatever they say. Turns that
        somebody else wrote in the policy's role are left out.
        """
        own, same = self.messages, 0
        for one, other in zip(own, conversation, strict=False):
            if one["role"] != other["role"]:
                break
            if one["role"] != "assistant" and not _repeats(other, one):
                break
            same += 1
        turns = [at for at, each in enumerate(conversation) if each["role"] == "assistant"]
        return tuple(
            each
            for at, each in enumerate(conversation)
            if at >= same
            and each["role"] != "assistant"
            and (at > max(turns, default=-1) or not any(_repeats(each, one) for one in own))
        )

    def continue_from(self, prompt: ContextTokens) -> ContextTokens:
        """Make the longest known prefix of a prompt the context of the next turn.

        Args:
            prompt: At least one token, the last of which stands for nothing that is shown.

        Returns:
            The remaining tokens of the prompt, its last one in any case: it separates turns.
        """
        columns: list[int] = []
        for key in prompt.keys[:-1]:
            column = self._children.get((columns[-1] if columns else -1, key))
            if column is None:
                break
            columns.append(column)
        if columns != self._columns:
            last = columns[-1] if columns else -1
            self._fork = len(self.prompt_ids) + self.used - 1 - last
            self.context, self._columns = [*prompt.ids[: len(columns)]], columns
        return prompt.behind(len(columns))

    def _extend(self, start: int, tokens: ContextTokens) -> None:
        """Append tokens to the context, whose columns begin at ``start``."""
        last = self._columns[-1] if self._columns else -1
        for column, key in enumerate(tokens.keys, start):
            self._children[last, key] = last = column
        self._columns.extend(range(start, start + len(tokens.ids)))
        self.context.extend(tokens.ids)
        self._media |= {start + at: (length, media) for at, length, media in tokens.media}

    def truncate(self, reason: str) -> None:
        """End the episode at a limit, unless it has ended."""
        self.finish_reason = self.finish_reason or reason

    def fail(self, failure: str) -> None:
        """End the episode without a score; the first failure is recorded."""
        self.finish_reason, self.failure = "failed", self.failure or failure

    def episode(self, release: Callable[[], None]) -> Episode:
        """Return the result; ``release`` closes the environment."""
        prompt = self.prompt
        return Episode(
            prompt=prompt if isinstance(prompt, str) else without_images(prompt)[0],
            messages=without_images(self.history)[0],
            images=tuple(self.images),
            rewards=tuple(self.rewards) if self.session.has_rewards else None,
            finish_reason=self.finish_reason or "stop",
            failure=self.failure,
            environment=self.session.environment,
            release=release,
            call_contents=tuple(self.call_contents),
        )


def _repeats(message: Message, earlier: Message) -> bool:
    """Whether a message is an earlier one, some of whose images may be missing."""
    if message["role"] != earlier["role"]:
        return False
    if message.get("content") == earlier.get("content"):
        return True
    texts = [content_text(each.get("content")) for each in (message, earlier)]
    images, shown = (without_images((each,))[1] for each in (message, earlier))
    return bool(shown) and texts[0] == texts[1] and all(image in shown for image in images)
