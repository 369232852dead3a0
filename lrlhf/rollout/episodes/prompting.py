"""What the policy is given before each of its turns."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from lrlhf.environments.session import Asked, Reaction, Shown
from lrlhf.environments.settings import Episodes
from lrlhf.rollout.engines.engine import RendersChat
from lrlhf.rollout.episodes.dialogue import Dialogue, RefusedTurnsError
from lrlhf.rollout.episodes.play import Play
from lrlhf.types import PromptBatch


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
