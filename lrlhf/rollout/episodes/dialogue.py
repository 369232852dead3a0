"""Tokenisation of observations between the policy's turns, which are never tokenised again."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from PIL import Image
from transformers import PreTrainedTokenizerBase

from lrlhf.environments.session import Content, Reaction, Shown, TurnPrompt
from lrlhf.environments.settings import Episodes
from lrlhf.media import Encoded, MediaError, MediaProcessor, MediaRefs
from lrlhf.media.decode import BadRow
from lrlhf.media.parts import without_images
from lrlhf.media.refs import image_name
from lrlhf.models import reader_of, unsplit, unsplit_places
from lrlhf.rollout.engines.engine import RendersChat
from lrlhf.rollout.episodes.episode_state import ContextTokens, EpisodeState
from lrlhf.types import Message, Prompt, PromptBatch

logger = logging.getLogger(__name__)

_MARK = "LRLHF-TURN-5E1D"
"""Placeholder of the policy's text in a rendered template."""
_ANCHOR = "\n"
"""Prefix of texts to tokenise: some tokenizers put a space before the first word."""


_encoded_images: ContextVar[dict[str | int, tuple[Encoded, Image.Image]]] = ContextVar(
    "encoded_images"
)
"""By what they show, and by object, of which agents and histories show the same in every turn."""


@contextmanager
def encoded_once() -> Iterator[None]:
    """Encode equal images of the block's episodes once, so that their rows share them."""
    token = _encoded_images.set({})
    try:
        yield
    finally:
        _encoded_images.reset(token)


class RefusedTurnsError(Exception):
    """The chat template refuses a conversation."""


class ImageTokenizer:
    """Puts the tokens of images in the place of their marks, as the model's processor makes them.

    Args:
        processor: Of the model; None: it sees nothing.
        tokenizer: Of the model.
    """

    def __init__(
        self, processor: MediaProcessor | None, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._processor = processor
        self._mark, self._marks = -1, set[int]()
        if processor is not None:
            kinds = {marker: kind for kind, marker in processor.markers.items()}
            ids: Any = tokenizer.convert_tokens_to_ids([*kinds])
            self._marks = {*ids, *processor.placeholders.values()}
            self._mark = dict(zip(kinds.values(), ids, strict=True)).get("image", -1)

    @property
    def follows(self) -> bool:
        """Whether images of a text can be encoded one by one."""
        return self._processor is not None and self._processor.encodes_images_alone

    def tokens(self, ids: list[int], images: Sequence[Image.Image]) -> ContextTokens:
        """Return tokens in which each image has as many as the model reads of it.

        Args:
            ids: One token for each image.
            images: In order; equal ones are encoded once.

        Raises:
            MediaError: There is not one mark for each image, or one cannot be encoded.
        """
        if not images and self._marks.isdisjoint(ids):
            return ContextTokens(ids)
        marks = [token for token in ids if token in self._marks]
        if marks != [self._mark] * len(images):
            remedy = (
                "a chat template that shows only the newest images goes with episodes.history: "
                "tokens, or with an agent that leaves the others out itself; else give one that "
                "shows those of every role"
                if len(marks) < len(images)
                else "leave the model's marks out of plain text, and show videos and audio only in "
                "prompts to which nothing is added"
            )
            raise MediaError(
                "placeholder count",
                f"the text has {len(marks)} marks of media for {len(images)} images",
                remedy=remedy,
            )
        waiting, expanded, media = iter(images), list[int](), []
        for token in ids:
            if token != self._mark:
                expanded.append(token)
                continue
            own, shown = self._encoded(next(waiting))
            media.append((len(expanded), len(own), shown))
            expanded += own
        if expanded[-1] in self._marks:
            raise MediaError("placeholder count", "an image is the last that the policy reads")
        return ContextTokens(expanded, tuple(media))

    def _encoded(self, image: Image.Image) -> Encoded:
        known = _encoded_images.get()
        if id(image) in known:
            return known[id(image)][0]
        key = MediaRefs((image,)).key
        if key not in known:
            assert self._processor is not None  # else there are no marks
            if not self.follows:
                raise MediaError(
                    "images of several turns",
                    self._processor.not_alone,
                    remedy="show images in the prompts of the data only, and list the "
                    "descriptions of tools in data.tools",
                )
            encoded = self._processor.encode(
                self._processor.markers["image"],
                [image],
                [],
                prompt_ids=[self._mark],
                names=(image_name(image, key),),
            )
            known[key] = encoded, image
        known[id(image)] = known[key][0], image  # which keeps its id
        return known[key][0]


class DialogueTokenizer:
    """Tokenises the observations of environments.

    In chats special tokens in observations are read as text; in plain text, where the environment
    writes the markup, they are special. Without ``chat`` all prompts are plain text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat: RendersChat | None,
        processor: MediaProcessor | None = None,
    ) -> None:
        self.images = ImageTokenizer(processor, tokenizer)
        self._tokenizer = tokenizer
        self._chat = chat
        self._checked: set[str] = set()
        self._marks = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        """Special tokens, which a template writes undivided."""

    def prompt_tokens(
        self,
        prompt: Prompt,
        observation: Content | None,
        row: Mapping[str, Any],
        tokens: ContextTokens,
    ) -> tuple[Prompt, ContextTokens]:
        """Return a prompt with the first observation of its environment, and its tokens.

        The observation is appended to a plain prompt, or to the last turn of the user of a chat.

        Args:
            prompt: The prompt of the data.
            observation: First observation; None: none.
            row: The columns of the prompt, for the template: its ``tools`` above all.
            tokens: Those of the prompt alone.

        Raises:
            RefusedTurnsError: The chat template refuses the prompt.
            MediaError: See `ImageTokenizer.tokens`.
        """
        if isinstance(prompt, str):
            text = _plain_text(observation or "")
            more = self.images.tokens(self._continuation(text), ())
            return prompt + text, ContextTokens([*tokens.ids, *more.ids], tokens.media)
        fixed = any(media.videos or media.audios for _, _, media in tokens.media)
        fixed |= bool(tokens.media) and not self.images.follows
        if observation is None and (fixed or not row.get("tools")):
            return prompt, tokens
        messages = prompt if observation is None else _with_observation(prompt, observation)
        ids = self._encoded(self._rendered(messages, row))
        return messages, self.images.tokens(ids, without_images(messages)[1])

    def observation_tokens(
        self,
        prompt: Prompt,
        history: Sequence[Message],
        new: Sequence[Message],
        row: Mapping[str, Any],
        last_token: int,
    ) -> ContextTokens:
        """Return the tokens from the end of the policy's turn to the beginning of its next one.

        Args:
            prompt: The prompt of the episode.
            history: The messages that followed, with the policy's last turn.
            new: The observations.
            row: See `prompt_tokens`.
            last_token: Last token of the policy's turn, which is not repeated if it ends the turn.

        Raises:
            ValueError: The chat template does not show the policy's turn, or the observation.
            RefusedTurnsError: It refuses this conversation.
            MediaError: See `ImageTokenizer.tokens`.
        """
        if isinstance(prompt, str):
            text = "".join(_plain_text(message["content"]) for message in new)
            return self.images.tokens(self._continuation(text), ())
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
        return self.images.tokens(self._continuation(observation), without_images(new)[1])

    def conversation_tokens(
        self,
        messages: Sequence[Message],
        row: Mapping[str, Any],
        turns: Sequence[tuple[str, Sequence[int]]],
    ) -> ContextTokens:
        """Return the tokens of a complete conversation as the chat template renders it.

        A turn that is in the text as the policy wrote it keeps the policy's tokens, which the
        tokenizer may not reproduce.

        Args:
            messages: The conversation.
            row: See `prompt_tokens`.
            turns: Text with special tokens, and token ids, of the policy's turns.

        Raises:
            RefusedTurnsError: The chat template refuses the conversation.
            MediaError: See `ImageTokenizer.tokens`.
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
        ids += self._continuation(remaining) if ids else self._encoded(split)
        return self.images.tokens(ids, without_images(messages)[1])

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
            return self._chat.render(without_images(messages)[0], row, prompt=True)
        except BadRow as error:
            raise RefusedTurnsError(f"the chat template refuses the turns: {error}") from error

    def _encoded(self, text: str) -> list[int]:
        reader = reader_of(self._tokenizer, text)
        ids: list[int] = reader(text, add_special_tokens=False)["input_ids"]
        return ids

    def _continuation(self, text: str) -> list[int]:
        if not text:
            return []
        anchor, both = self._encoded(_ANCHOR), self._encoded(_ANCHOR + text)
        if both[: len(anchor)] == anchor:
            return both[len(anchor) :]
        return self._encoded(text)  # the two are one token: the text begins with white space


def _with_observation(prompt: Sequence[Message], observation: Content) -> tuple[Message, ...]:
    last = prompt[-1] if prompt else {}
    if last.get("role") != "user":
        return (*prompt, {"role": "user", "content": observation})
    content = last["content"]
    if isinstance(content, str) and isinstance(observation, str):
        return (*prompt[:-1], {**last, "content": content + observation})
    return (*prompt[:-1], {**last, "content": [*_as_parts(content), *_as_parts(observation)]})


def _plain_text(content: Content) -> str:
    if isinstance(content, str):
        return content
    raise MediaError(
        "images behind plain text",
        "an environment shows an image behind a prompt that is plain text",
        remedy="give chats (data.as_chat: true)",
    )


def _as_parts(content: Content) -> list[Message]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else [*content]


class ContextUpdater:
    """Adds observations of environments, and prompts of agents, to the contexts of episodes."""

    def __init__(
        self,
        episodes: Episodes,
        tokenizer: PreTrainedTokenizerBase,
        chat: RendersChat | None,
        processor: MediaProcessor | None,
    ) -> None:
        self._dialogue = DialogueTokenizer(tokenizer, chat, processor)
        self._agent = episodes.agent is not None
        self._rewrites = self._agent or episodes.history == "template"

    def check(self, prompts: PromptBatch) -> None:
        """Raise ``ValueError`` for prompts that cannot be rendered again."""
        if not self._rewrites:
            return
        option = "agent" if self._agent else "history: template"
        shown = [media for media in prompts.media or () if media is not None]
        if any(media.videos or media.audios or not media.images for media in shown):
            raise ValueError(
                f"episodes.{option} renders conversations again, and prompts with videos or audio "
                "are not rendered twice: train on images and texts"
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
                prompt: Prompt = first.messages
                tokens, images = self._agent_prompt(state, first), without_images(first.messages)[1]
            else:
                if tools := [tool.schema for tool in state.session.tools]:
                    state.row = {**state.row, "tools": tools}
                prompt, tokens = self._dialogue.prompt_tokens(
                    state.prompt, first, state.row, state.prompt_tokens
                )
                if self._rewrites and not isinstance(prompt, str) and tokens.media:
                    # image by image, as it will be rendered again
                    tokens = self._dialogue.conversation_tokens(prompt, state.row, [])
                shown = without_images([{"role": "user", "content": first or ""}])[1]
                images = (*state.images, *shown)
            state.set_prompt(prompt, tokens, images)
        except (RefusedTurnsError, MediaError) as error:
            state.fail(_with_remedy(error))
        if longest is not None and len(state.context) >= longest:
            state.fail(f"the prompt has {len(state.context)} tokens, and the model reads {longest}")
            # the last token: the first may stand for an image
            state.set_prompt(state.prompt, ContextTokens(state.prompt_ids[-1:]), state.images)

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
                tokens = self._dialogue.observation_tokens(
                    state.prompt, state.history, messages, state.row, state.context[-1]
                )
        except (RefusedTurnsError, MediaError) as error:
            state.fail(_with_remedy(error))
            return False
        length = len(tokens.ids)
        fits = longest is None or len(state.context) + length < longest
        if not fits or state.used + length >= state.limit:
            state.truncate("length")
            return False
        state.add_observation(messages, tokens)
        return True

    def _agent_prompt(self, state: EpisodeState, prompt: TurnPrompt) -> ContextTokens:
        """Return the tokens of an agent's prompt, which replaces the conversation."""
        state.row = {**state.row, "tools": list(prompt.tools)}
        state.turn_limit = prompt.max_tokens
        for index, message in enumerate(prompt.messages):
            if message["role"] == "tool":
                self._dialogue.check_roles(prompt.messages[:index], [message], state.row)
        return self._dialogue.conversation_tokens(prompt.messages, state.row, state.turn_ids)

    def _rewritten(self, state: EpisodeState, reaction: Reaction) -> ContextTokens:
        """Return the tokens of the conversation as the template renders its history."""
        text, raw = state.last_turn
        if reaction.calls and not raw.startswith(text):
            raise ValueError(
                "special tokens mark the calls of this model, and episodes.history: template shows "
                "turns without special tokens: drop history"
            )
        self._dialogue.check_roles(state.messages, reaction.messages, state.row)
        messages = [*state.messages, *reaction.messages]
        return self._dialogue.conversation_tokens(messages, state.row, state.turn_ids)


def _with_remedy(error: RefusedTurnsError | MediaError) -> str:
    remedy = error.remedy if isinstance(error, MediaError) else ""
    return f"{error}; {remedy}" if remedy else str(error)
