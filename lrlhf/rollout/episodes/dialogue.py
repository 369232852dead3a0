"""Tokenisation of observations between the policy's turns, which are never tokenised again."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lrlhf.environments.session import Reaction, Shown, TurnPrompt
from lrlhf.environments.settings import Episodes
from lrlhf.media.decode import BadRow
from lrlhf.models import reader_of, unsplit, unsplit_places
from lrlhf.rollout.engines.engine import RendersChat
from lrlhf.rollout.episodes.episode_state import EpisodeState
from lrlhf.types import Message, Prompt, PromptBatch

logger = logging.getLogger(__name__)

_MARK = "LRLHF-TURN-5E1D"
"""Placeholder of the policy's text in a rendered template."""
_ANCHOR = "\n"
"""Prefix of texts to tokenise: some tokenizers put a space before the first word."""


class RefusedTurnsError(Exception):
    """The chat template refuses a conversation."""


class DialogueTokenizer:
    """Tokenises the observations of environments.

    In chats special tokens in observations are read as text; in plain text, where the environment
    writes the markup, they are special. Without ``chat`` all prompts are plain text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: RendersChat | None) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._checked: set[str] = set()
        self._marks = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        """Special tokens, which a template writes undivided."""

    def prompt_ids(
        self, prompt: Prompt, observation: str | None, row: Mapping[str, Any], ids: Sequence[int]
    ) -> tuple[Prompt, list[int]]:
        """Return a prompt with the first observation of its environment, and its tokens.

        The observation is appended to a plain prompt, or to the last turn of the user of a chat.

        Args:
            prompt: The prompt of the data.
            observation: First observation; None: none.
            row: The columns of the prompt, for the template: its ``tools`` above all.
            ids: The tokens of the prompt alone.
        """
        if isinstance(prompt, str):
            text = observation or ""
            return prompt + text, [*ids, *self._continuation(text)]
        if observation is None and not row.get("tools"):
            return prompt, list(ids)
        messages = prompt if observation is None else _with_observation(prompt, observation)
        return messages, self._encoded(self._rendered(messages, row))

    def observation_ids(
        self,
        prompt: Prompt,
        history: Sequence[Message],
        new: Sequence[Message],
        row: Mapping[str, Any],
        last_token: int,
    ) -> list[int]:
        """Return the tokens from the end of the policy's turn to the beginning of its next one.

        Args:
            prompt: The prompt of the episode.
            history: The messages that followed, with the policy's last turn.
            new: The observations.
            row: See `prompt_ids`.
            last_token: Last token of the policy's turn, which is not repeated if it ends the turn.

        Raises:
            ValueError: The chat template does not show the policy's turn, or the observation.
            RefusedTurnsError: It refuses this conversation.
        """
        if isinstance(prompt, str):
            return self._continuation("".join(str(message["content"]) for message in new))
        before = [*prompt, *history[:-1], {"role": "assistant", "content": _MARK}]
        text = self._rendered([*before, *new], row)
        if text.count(_MARK) != 1:
            raise ValueError(
                "the chat template does not repeat what the assistant wrote, so nothing can be "
                "put behind it: give another chat_template"
            )
        if not self._checked:
            thought = {"role": "assistant", "content": f"<think>\n{_MARK}\n</think>\n\nyes"}
            if _MARK not in self._rendered([*before[:-1], thought, *new], row):
                logger.warning(
                    "the chat template drops the reasoning of earlier turns; here the policy keeps "
                    "seeing what it wrote, token by token, and is trained on what it saw. With "
                    "episodes.history: template it sees what the template shows"
                )
        self.check_roles(before, new, row)
        observation = text.rpartition(_MARK)[2]
        # any other token is the last of a truncated turn, and does not end it
        end = str(self._tokenizer.decode([last_token])).strip()
        if last_token in self._marks and end:
            # some templates end a turn with two tokens, of which this is the second
            first, match, remaining = observation.partition(end)
            if match and self._marks.issuperset(self._encoded(first.strip())):
                observation = remaining
        return self._continuation(observation)

    def conversation_ids(
        self,
        messages: Sequence[Message],
        row: Mapping[str, Any],
        turns: Sequence[tuple[str, Sequence[int]]],
    ) -> list[int]:
        """Return the tokens of a complete conversation as the chat template renders it.

        A turn that is in the text as the policy wrote it keeps the policy's tokens, which the
        tokenizer may not reproduce.

        Args:
            messages: The conversation.
            row: See `prompt_ids`.
            turns: Text with special tokens, and token ids, of the policy's turns.

        Raises:
            RefusedTurnsError: The chat template refuses the conversation.
        """
        split, start = self._rendered(messages, row), 0
        if not split:
            raise RefusedTurnsError("the chat template makes nothing of the turns")
        text, positions = unsplit(split), unsplit_places(split)
        # with a mark in place of the policy's messages the text in between is known
        marked = [
            {"role": "assistant", "content": _MARK} if each["role"] == "assistant" else each
            for each in messages
        ]
        known = [turn for each in reversed(turns) for turn in self._with_and_without_end(*each)]
        ids: list[int] = []
        try:
            begin, *others = unsplit(self._rendered(marked, row)).split(_MARK)
        except RefusedTurnsError:  # some templates require calls before results of calls
            begin, others = "", []
        if not text.startswith(begin):
            others = []
        position = len(begin)
        for behind in others:
            match = next(
                (turn for turn in known if text.startswith(turn[0] + behind, position)), None
            )
            if match is None:
                position = text.find(behind, position)
                if position < 0:
                    break
            else:
                written, tokens = match
                piece = split[positions[start] : positions[position]]
                ids += self._continuation(piece) if ids else self._encoded(piece)
                ids += tokens
                start = position = position + len(written)
            position += len(behind)
        remaining = split[positions[start] :]
        return [*ids, *(self._continuation(remaining) if ids else self._encoded(split))]

    def _with_and_without_end(
        self, written: str, tokens: Sequence[int]
    ) -> Iterator[tuple[str, Sequence[int]]]:
        """Yield a turn, and the turn without its end-of-turn token, which the template may add."""
        yield written, tokens
        last = str(self._tokenizer.decode(list(tokens[-1:])))
        if tokens and tokens[-1] in self._marks and written.endswith(last):
            yield written.removesuffix(last), tokens[:-1]

    def check_roles(
        self, before: Sequence[Message], new: Sequence[Message], row: Mapping[str, Any]
    ) -> None:
        """Check once for each role of ``new`` that the template shows its messages.

        Raises:
            ValueError: The template leaves them out.
        """
        roles = {str(message["role"]) for message in new} - self._checked
        for role in roles:
            first = next(message for message in new if message["role"] == role)
            one, other = (
                self._rendered([*before, {**first, "content": content}], row)
                for content in ("0", "1")
            )
            if one == other:
                raise ValueError(
                    f"the chat template leaves out what the role {role!r} says, so the policy "
                    "would never read the environment's answers: give another chat_template"
                )
        self._checked |= roles

    def _rendered(self, messages: Sequence[Message], row: Mapping[str, Any]) -> str:
        if self._chat is None:
            raise ValueError(
                "the prompts are chats, but there is no chat template for the turns behind them: "
                "train with a data module such as PromptDataModule"
            )
        try:
            return self._chat.render(messages, row, prompt=True)
        except BadRow as error:
            raise RefusedTurnsError(f"the chat template refuses the turns: {error}") from error

    def _encoded(self, text: str) -> list[int]:
        reader = reader_of(self._tokenizer, text)
        ids: list[int] = reader(text, add_special_tokens=False)["input_ids"]
        return ids

    def _continuation(self, text: str) -> list[int]:
        """Tokenise a text that continues another."""
        if not text:
            return []
        anchor, both = self._encoded(_ANCHOR), self._encoded(_ANCHOR + text)
        if both[: len(anchor)] == anchor:
            return both[len(anchor) :]
        return self._encoded(text)  # the two are one token: the text begins with white space


def _with_observation(prompt: Sequence[Message], observation: str) -> tuple[Message, ...]:
    last = prompt[-1] if prompt else {}
    if last.get("role") != "user":
        return (*prompt, {"role": "user", "content": observation})
    content = last["content"]
    if isinstance(content, str):
        return (*prompt[:-1], {**last, "content": content + observation})
    return (*prompt[:-1], {**last, "content": [*content, {"type": "text", "text": observation}]})


class ContextUpdater:
    """Adds observations of environments, and prompts of agents, to the contexts of episodes."""

    def __init__(
        self, episodes: Episodes, tokenizer: PreTrainedTokenizerBase, chat: RendersChat | None
    ) -> None:
        self._dialogue = DialogueTokenizer(tokenizer, chat)
        self._agent = episodes.agent is not None
        self._rewrites = self._agent or episodes.history == "template"

    def check(self, prompts: PromptBatch) -> None:
        """Raise ``ValueError`` for media or plain text in prompts that are rendered again."""
        if not self._rewrites:
            return
        option = "agent" if self._agent else "history: template"
        if any(media is not None for media in prompts.media or ()):
            raise ValueError(
                f"episodes.{option} renders conversations again, and prompts with images or videos "
                "are not rendered twice: train on texts"
            )
        if not self._agent and any(isinstance(prompt, str) for prompt in prompts.prompts):
            raise ValueError(
                "episodes.history is template, and some prompts are plain text, which no chat "
                "template renders: drop history, or give chats"
            )

    def begin(self, state: EpisodeState, first: Shown, longest: int | None) -> None:
        """Set the prompt of an episode with the first observation of its environment.

        The episode fails where the template refuses the prompt, or it has at least ``longest``
        tokens.
        """
        try:
            if isinstance(first, TurnPrompt):
                state.set_prompt(first.messages, self._agent_prompt(state, first))
            else:
                if tools := [tool.schema for tool in state.session.tools]:
                    state.row = {**state.row, "tools": tools}
                state.set_prompt(
                    *self._dialogue.prompt_ids(state.prompt, first, state.row, state.prompt_ids)
                )
        except RefusedTurnsError as error:
            state.fail(str(error))
        if longest is not None and len(state.context) >= longest:
            state.fail(f"the prompt has {len(state.context)} tokens, and the model reads {longest}")
            state.set_prompt(state.prompt, state.prompt_ids[:1])

    def extend(self, state: EpisodeState, reaction: Reaction, longest: int | None) -> bool:
        """Append the reaction to the policy's last turn, and return whether a further turn follows.

        The episode fails where the template refuses the turns, and is truncated at its limit.
        """
        messages = reaction.messages
        try:
            if reaction.next_prompt is not None:
                messages = state.new_messages(reaction.next_prompt.messages)
                tokens = state.continue_from(self._agent_prompt(state, reaction.next_prompt))
            elif self._rewrites:
                tokens = state.continue_from(self._rewritten(state, reaction))
            else:
                tokens = self._dialogue.observation_ids(
                    state.prompt, state.history, messages, state.row, state.context[-1]
                )
        except RefusedTurnsError as error:
            state.fail(str(error))
            return False
        fits = longest is None or len(state.context) + len(tokens) < longest
        if not fits or state.used + len(tokens) >= state.limit:
            state.truncate("length")
            return False
        state.add_observation(messages, tokens)
        return True

    def _agent_prompt(self, state: EpisodeState, prompt: TurnPrompt) -> list[int]:
        """Return the tokens of an agent's prompt, which replaces the conversation."""
        state.row = {**state.row, "tools": list(prompt.tools)}
        state.turn_limit = prompt.max_tokens
        for index, message in enumerate(prompt.messages):
            if message["role"] == "tool":
                self._dialogue.check_roles(prompt.messages[:index], [message], state.row)
        return self._dialogue.conversation_ids(prompt.messages, state.row, state.turn_ids)

    def _rewritten(self, state: EpisodeState, reaction: Reaction) -> Sequence[int]:
        """Return the tokens of the conversation as the template renders its history."""
        text, raw = state.last_turn
        if reaction.calls and not raw.startswith(text):
            raise ValueError(
                "special tokens mark the calls of this model, and episodes.history: template shows "
                "turns without special tokens: drop history"
            )
        self._dialogue.check_roles(state.messages, reaction.messages, state.row)
        messages = [*state.messages, *reaction.messages]
        return self._dialogue.conversation_ids(messages, state.row, state.turn_ids)
