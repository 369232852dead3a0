"""Privileged context: what a teacher reads in its prompt, and the policy does not.

    D(π(· | x, y_<t), T(· | c(x), y_<t))        at each token of y ~ π(· | x)

c(x) may hold the right answer or a demonstration (OPSD, Zhao et al. 2026,
https://arxiv.org/abs/2601.18734; SDFT, Shenfeld et al. 2026, https://arxiv.org/abs/2601.19897), or
feedback and a correct response to the same prompt (SDPO, Hübotter et al. 2026,
https://arxiv.org/abs/2601.20802).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules.rows.bad_rows import BadRow
from lrlhf.datamodules.rows.chat import ChatFormat, Text, tokenize_prompts
from lrlhf.datamodules.rows.prompt_rows import PromptTemplate
from lrlhf.functional.names import import_function
from lrlhf.rewards.function import content_text
from lrlhf.rollout.records import written_text
from lrlhf.rollout.responses import prompt_token_ids
from lrlhf.types import Media, Message, PrivilegedRows, PromptBatch, Rollout

Record = Mapping[str, Any]
_SETTING = "teacher.context"


class PrivilegedContext:
    """Writes the prompts of a teacher, see `Teacher.context`.

    Args:
        context: A template, a function, or the dotted path of one.
        tokenizer: Of the policy.
        threshold: Score from which on a response is correct.
        limit: Tokens that the teacher reads; None: any number.

    Raises:
        ValueError: The template cannot be read, or the path leads to no function.
    """

    def __init__(
        self,
        context: str | Callable[[Record], str | None],
        tokenizer: PreTrainedTokenizerBase,
        threshold: float,
        limit: int | None,
    ) -> None:
        self._tokenizer, self._threshold, self._limit = tokenizer, threshold, limit
        self._template: PromptTemplate | None = None
        if not isinstance(context, str):
            self._write = context
        elif "{{" in context or "{%" in context:
            self._template = PromptTemplate(context, setting=_SETTING, finalize=_not_empty)
            self._write = self._rendered
        else:
            self._write = import_function(_SETTING, context, ["a template with {{ prompt }}"])

    def longest_prompt(self, prompts: PromptBatch, chat: ChatFormat) -> int:
        """Return the most tokens of a teacher's prompt, as far as known before the responses."""
        _refuse_media(prompts.media)
        longest = 0
        rows = zip(prompt_token_ids(prompts), prompts.prompts, prompts.columns, strict=True)
        for ids, prompt, columns in rows:
            turns = None if isinstance(prompt, str) else prompt
            if self._template is not None and {*self._template.columns} <= {"prompt", *columns}:
                longest = max(longest, len(self._prompt(ids.tolist(), turns, columns, chat) or ()))
        return longest

    def rows(self, rollout: Rollout, records: Sequence[Record], chat: ChatFormat) -> PrivilegedRows:
        """Return the rows of a rollout as the teacher reads them.

        Args:
            rollout: Rows of tokens.
            records: Of the same responses.
            chat: How prompts are rendered.

        Raises:
            ValueError: They show images, a prompt is not rendered again as it is, the context
                cannot be written, or it leaves no room for a response.
        """
        _refuse_media(rollout.media)
        assert rollout.forks is None, "settings refuse rewritten histories"
        correct = self._correct_responses(records)
        ids, masks, informed = [], [], []
        for row, record in enumerate(records):
            attended = rollout.attention_mask[row]
            own, counts = rollout.input_ids[row, attended], rollout.response_mask[row, attended]
            start = len(own) - len(record["token_ids"])
            values = {
                **{name: record[name] for name in ("completion", "score")},
                "feedback": _feedback(record),
                "correct_response": correct[row],
                **record["columns"],
                **record.get("extras", {}),
            }
            prompt = self._prompt(own[:start].tolist(), record.get("messages"), values, chat)
            informed.append(prompt is not None)
            before = own[:start] if prompt is None else own.new_tensor(prompt)
            ids.append(torch.cat([before, own[start:]]))
            masks.append(torch.cat([counts.new_zeros(len(before)), counts[start:]]))
            if self._limit is not None and len(ids[-1]) > self._limit:
                raise ValueError(
                    f"with {_SETTING} a prompt and its response have {len(ids[-1])} tokens, and "
                    f"the teacher reads {self._limit}: shorten what the context writes, as with "
                    "{{ feedback[:1000] }}, or lower max_new_tokens"
                )
        return PrivilegedRows(
            input_ids=pad_sequence(ids, batch_first=True),
            attention_mask=pad_sequence([torch.ones_like(m) for m in masks], batch_first=True),
            response_mask=pad_sequence(masks, batch_first=True),
            group_ids=rollout.group_ids,
            informed=torch.tensor(informed, device=rollout.input_ids.device),
        )

    def _correct_responses(self, records: Sequence[Record]) -> list[str | None]:
        """Return for each response the best other one to its prompt, if that is correct."""
        best: list[str | None] = []
        scored = [one for one in records if one["score"] is not None]
        right = [one for one in scored if one["score"] >= self._threshold]
        right.sort(key=lambda one: -float(one["score"]))
        for own in records:
            others = (one for one in right if one["group"] == own["group"] and one is not own)
            best.append(next(map(written_text, others), None))
        return best

    def _prompt(
        self, ids: list[int], turns: Sequence[Message] | None, values: Record, chat: ChatFormat
    ) -> list[int] | None:
        """Return the teacher's prompt in the place of ``ids``; None: there is no context."""
        if turns is None:
            text = str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))
            text = text.removeprefix(str(self._tokenizer.bos_token or ""))
            last = -1
        else:
            last = max((n for n, turn in enumerate(turns) if turn["role"] == "user"), default=-1)
            text = content_text(turns[last].get("content"))

        def tokens(text: str) -> list[int]:
            rendered = Text(text, complete=False)
            if turns is not None:
                changed = [*turns]
                changed[last] = {**turns[last], "content": text}
                rendered = Text(chat.render(changed, values, prompt=True), complete=True)
            return list(map(int, tokenize_prompts(self._tokenizer, [rendered])[0]))

        written = self._write({**values, "prompt": text})
        if written is None or written == text:
            return None
        if tokens(text) != ids:
            raise ValueError(
                f"{_SETTING} is put into a prompt that is rendered again, and without the context "
                "that does not give the tokens the policy has read (tools, chat_template_kwargs of "
                "rows, or a tokenizer that does not give texts back): the teacher's prompt would "
                f"differ in more than the context. The prompt: {text!r:.200}"
            )
        return tokens(written)

    def _rendered(self, values: Record) -> str | None:
        assert self._template is not None
        try:
            return self._template.render(values)
        except _EmptyValue:
            return None
        except BadRow as error:
            raise ValueError(f"{_SETTING}: {error}") from error


class _EmptyValue(Exception):  # noqa: N818  no error: there is no context
    """A template writes a value that is null, or empty text."""


def _not_empty(value: Any) -> Any:
    if value is None or (isinstance(value, str) and not value.strip()):
        raise _EmptyValue
    return value


def _feedback(record: Record) -> str:
    """Return what the environment has said behind the prompt."""
    turns = (turn for turn in record.get("episode", ()) if turn["role"] != "assistant")
    return "\n".join(content_text(turn.get("content")).strip() for turn in turns)


def _refuse_media(media: Sequence[Media | None] | None) -> None:
    if media is not None and any(media):
        raise ValueError(
            f"{_SETTING} changes the text of prompts, and these show images, videos or audio, "
            "whose places would have to be found again: drop the context, or train on text"
        )
