"""The tokens that a policy is given between its turns; its own are never tokenised again."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lrlhf.environments.session import Asked, Reaction, Shown
from lrlhf.environments.settings import Episodes
from lrlhf.media.decode import BadRow
from lrlhf.models import reader_of, unsplit, unsplit_places
from lrlhf.rollout.engines.engine import RendersChat
from lrlhf.rollout.episodes.play import Play
from lrlhf.types import Message, Prompt, PromptBatch

logger = logging.getLogger(__name__)

_MARK = "LRLHF-TURN-5E1D"
"""Stands for what the policy wrote where a template is rendered."""
_ANCHOR = "\n"
"""Behind which texts are tokenised: some tokenizers put a space before the first word."""


class RefusedTurnsError(Exception):
    """The chat template refuses a conversation."""


class Dialogue:
    """Turns what an environment says into tokens.

    In chats special tokens of what it says are read as text, in plain text, of which it writes the
    marks itself, as the tokens.

    Args:
        tokenizer: The policy's.
        chat: Renders chats; None: all prompts are plain text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: RendersChat | None) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._checked: set[str] = set()
        self._marks = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        """Tokens that a template writes as a whole."""

    def opened(
        self, prompt: Prompt, shown: str | None, row: Mapping[str, Any], ids: Sequence[int]
    ) -> tuple[Prompt, list[int]]:
        """Return a prompt with what its environment shows at the start, and its tokens.

        Text is put behind a plain prompt, and to the end of the last user's turn of a chat.

        Args:
            prompt: As the data has it.
            shown: What the environment shows; None: nothing.
            row: The columns of the prompt, for the template: its ``tools`` above all.
            ids: The tokens of the prompt alone.
        """
        if isinstance(prompt, str):
            said = shown or ""
            return prompt + said, [*ids, *self._behind(said)]
        if shown is None and not row.get("tools"):
            return prompt, list(ids)
        messages = prompt if shown is None else _with_observation(prompt, shown)
        return messages, self._encoded(self._rendered(messages, row))

    def between(
        self,
        prompt: Prompt,
        said: Sequence[Message],
        new: Sequence[Message],
        row: Mapping[str, Any],
        last_token: int,
    ) -> list[int]:
        """Return the tokens from the end of the policy's turn to the beginning of its next one.

        Args:
            prompt: That the episode began with.
            said: What followed, the policy's last turn included.
            new: What it is given now.
            row: See `opened`.
            last_token: Of the policy's turn: one that ends it is not given a second time.

        Raises:
            ValueError: The chat template cannot say what environments say.
            RefusedTurnsError: It refuses this conversation.
        """
        if isinstance(prompt, str):
            return self._behind("".join(str(message["content"]) for message in new))
        before = [*prompt, *said[:-1], {"role": "assistant", "content": _MARK}]
        text = self._rendered([*before, *new], row)
        if text.count(_MARK) != 1:
            raise ValueError(
                "the chat template does not repeat what the assistant wrote, so nothing can be "
                "put behind it: give another chat_template"
            )
        if not self._checked:
            self._warn_of_rewriting(before, new, row)
        self.check_roles(before, new, row)
        given = text.rpartition(_MARK)[2]
        # any other token is the last of a turn that was cut off, and no part of what ends it
        ending = str(self._tokenizer.decode([last_token])).strip()
        if last_token in self._marks and ending:
            # some templates end a turn with two tokens, of which this is the second
            before_it, found, behind = given.partition(ending)
            if found and self._marks.issuperset(self._encoded(before_it.strip())):
                given = behind
        return self._behind(given)

    def whole(
        self,
        messages: Sequence[Message],
        row: Mapping[str, Any],
        turns: Sequence[tuple[str, Sequence[int]]],
    ) -> list[int]:
        """Return the tokens of a conversation as the chat template renders it.

        A turn that stands there as the policy wrote it has the tokens that the policy wrote, which
        a tokenizer may cut otherwise.

        Args:
            messages: The conversation.
            row: See `opened`.
            turns: What the policy wrote, with special tokens, and its token ids.

        Raises:
            RefusedTurnsError: The chat template refuses the conversation.
        """
        split, at = self._rendered(messages, row), 0
        if not split:
            raise RefusedTurnsError("the chat template makes nothing of the turns")
        text, places = unsplit(split), unsplit_places(split)
        # the same with a mark for each of the policy's messages: where they are, and what is not
        marked = [
            {"role": "assistant", "content": _MARK} if one["role"] == "assistant" else one
            for one in messages
        ]
        own = [one for turn in reversed(turns) for one in self._with_and_without_end(*turn)]
        ids: list[int] = []
        try:
            begin, *others = unsplit(self._rendered(marked, row)).split(_MARK)
        except RefusedTurnsError:  # some templates want the results of calls behind calls
            begin, others = "", []
        if not text.startswith(begin):
            others = []
        place = len(begin)
        for behind in others:
            found = next((one for one in own if text.startswith(one[0] + behind, place)), None)
            if found is None:
                place = text.find(behind, place)
                if place < 0:
                    break
            else:
                written, tokens = found
                piece = split[places[at] : places[place]]
                ids += self._behind(piece) if ids else self._encoded(piece)
                ids += tokens
                at = place = place + len(written)
            place += len(behind)
        return [*ids, *(self._behind(split[places[at] :]) if ids else self._encoded(split))]

    def _with_and_without_end(
        self, written: str, tokens: Sequence[int]
    ) -> Iterator[tuple[str, Sequence[int]]]:
        """Yield a turn, and the same without the token that ended it, if the template writes it."""
        yield written, tokens
        last = str(self._tokenizer.decode(list(tokens[-1:])))
        if tokens and tokens[-1] in self._marks and written.endswith(last):
            yield written.removesuffix(last), tokens[:-1]

    def check_roles(
        self, before: Sequence[Message], new: Sequence[Message], row: Mapping[str, Any]
    ) -> None:
        """Once for each role: what is said in it must reach the policy.

        Raises:
            ValueError: The template leaves it out.
        """
        roles = {str(message["role"]) for message in new} - self._checked
        for role in roles:
            silent, loud = (
                self._rendered([*before, {**_first(new, role), "content": content}], row)
                for content in ("0", "1")
            )
            if silent == loud:
                raise ValueError(
                    f"the chat template leaves out what the role {role!r} says, so the policy "
                    "would never read the environment's answers: give another chat_template"
                )
        self._checked |= roles

    def _warn_of_rewriting(
        self, before: Sequence[Message], new: Sequence[Message], row: Mapping[str, Any]
    ) -> None:
        thought = {"role": "assistant", "content": f"<think>\n{_MARK}\n</think>\n\nyes"}
        kept = self._rendered([*before[:-1], thought, *new], row)
        if _MARK not in kept:
            logger.warning(
                "the chat template drops the reasoning of earlier turns; here the policy keeps "
                "seeing what it wrote, token by token, and is trained on what it saw. With "
                "episodes.history: template it sees what the template shows"
            )

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

    def _behind(self, text: str) -> list[int]:
        if not text:
            return []
        anchor, both = self._encoded(_ANCHOR), self._encoded(_ANCHOR + text)
        if both[: len(anchor)] == anchor:
            return both[len(anchor) :]
        return self._encoded(text)  # the two are one token: the text begins with white space


def _with_observation(prompt: Sequence[Message], shown: str) -> tuple[Message, ...]:
    last = prompt[-1] if prompt else {}
    if last.get("role") != "user":
        return (*prompt, {"role": "user", "content": shown})
    content = last["content"]
    if isinstance(content, str):
        return (*prompt[:-1], {**last, "content": content + shown})
    return (*prompt[:-1], {**last, "content": [*content, {"type": "text", "text": shown}]})


def _first(messages: Sequence[Message], role: str) -> Message:
    return next(message for message in messages if message["role"] == role)


class Prompting:
    """Adds what environments and agents say to their episodes.

    Args:
        episodes: How earlier turns are shown.
        tokenizer: The policy's.
        chat: Renders chats; None: all prompts are plain text.
    """

    def __init__(
        self, episodes: Episodes, tokenizer: PreTrainedTokenizerBase, chat: RendersChat | None
    ) -> None:
        self._dialogue = Dialogue(tokenizer, chat)
        self._agent = episodes.agent is not None
        self._rewrites = self._agent or episodes.history == "template"

    def check(self, prompts: PromptBatch) -> None:
        """Refuse prompts that cannot be rendered again.

        Raises:
            ValueError: They show something, or are no chats.
        """
        if not self._rewrites:
            return
        option = "agent" if self._agent else "history: template"
        if any(media is not None for media in prompts.media or ()):
            raise ValueError(
                f"episodes.{option} renders conversations again, and prompts with images or videos "
                "are not rendered twice: train on texts"
            )
        if not self._agent and any(isinstance(one, str) for one in prompts.prompts):
            raise ValueError(
                "episodes.history is template, and some prompts are plain text, which no chat "
                "template renders: drop history, or give chats"
            )

    def begin(self, play: Play, shown: Shown, longest: int | None) -> None:
        """Put what an environment begins with before the first turn.

        Args:
            play: Fails where the template refuses it, or the model cannot read all of it.
            shown: What it begins with.
            longest: Tokens that the model reads; None: not known.
        """
        try:
            self._open(play, shown)
        except RefusedTurnsError as error:
            play.fail(str(error))
        if longest is not None and len(play.context) >= longest:
            play.fail(f"the prompt has {len(play.context)} tokens, and the model reads {longest}")
            play.begins(play.prompt, play.prompt_ids[:1])

    def go_on(self, play: Play, reaction: Reaction, longest: int | None) -> bool:
        """Give the policy what somebody made of its last turn.

        Args:
            play: Fails where the template refuses the turns, and is cut off at its length.
            reaction: What was made of it.
            longest: See `begin`.

        Returns:
            Whether the policy is to go on.
        """
        messages = reaction.messages
        try:
            if reaction.asked is not None:
                messages = play.new_messages(reaction.asked.messages)
                tokens = play.goes_on_from(self._asked(play, reaction.asked))
            elif self._rewrites:
                tokens = play.goes_on_from(self._rendered(play, reaction))
            else:
                tokens = self._dialogue.between(
                    play.prompt, play.said, messages, play.row, play.context[-1]
                )
        except RefusedTurnsError as error:
            play.fail(str(error))
            return False
        fits = longest is None or len(play.context) + len(tokens) < longest
        if not fits or play.used + len(tokens) >= play.limit:
            play.cut_off("length")
            return False
        play.is_given(messages, tokens)
        return True

    def _open(self, play: Play, shown: Shown) -> None:
        if isinstance(shown, Asked):
            play.begins(shown.messages, self._asked(play, shown))
            return
        if tools := [tool.schema for tool in play.session.tools]:
            play.row = {**play.row, "tools": tools}
        play.begins(*self._dialogue.opened(play.prompt, shown, play.row, play.prompt_ids))

    def _asked(self, play: Play, asked: Asked) -> list[int]:
        """Return the tokens of a prompt that replaces all that was said."""
        play.row = {**play.row, "tools": list(asked.tools)}
        play.turn_limit = asked.max_tokens
        for place, message in enumerate(asked.messages):
            if message["role"] == "tool":
                self._dialogue.check_roles(asked.messages[:place], [message], play.row)
        return self._dialogue.whole(asked.messages, play.row, play.wrote_ids)

    def _rendered(self, play: Play, reaction: Reaction) -> Sequence[int]:
        text, raw = play.last_turn
        if reaction.calls and not raw.startswith(text):
            raise ValueError(
                "special tokens mark the calls of this model, and episodes.history: template shows "
                "turns without special tokens: drop history"
            )
        self._dialogue.check_roles(play.messages, reaction.messages, play.row)
        told = [*play.messages, *reaction.messages]
        return self._dialogue.whole(told, play.row, play.wrote_ids)
