"""Privileged context: what a teacher reads in its prompt, and the policy does not.

    D(π(· | x, y_<t), T(· | c(x), y_<t))        at each token of y ~ π(· | x)

c(x) may hold the right answer or a demonstration (OPSD, Zhao et al. 2026,
https://arxiv.org/abs/2601.18734; SDFT, Shenfeld et al. 2026, https://arxiv.org/abs/2601.19897), or
feedback and a correct response to the same prompt (SDPO, Hübotter et al. 2026,
https://arxiv.org/abs/2601.20802).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules.rows.bad_rows import BadRow, missing_column
from lrlhf.datamodules.rows.chat import ChatFormat, Text, tokenize_prompts
from lrlhf.datamodules.rows.prompt_rows import PromptTemplate
from lrlhf.functional.names import import_function
from lrlhf.rewards.function import content_text
from lrlhf.rollout.records import written_text
from lrlhf.rollout.responses import prompt_token_ids
from lrlhf.types import Media, Message, PrivilegedRows, Prompt, PromptBatch, Rollout

Record = Mapping[str, Any]
Context: TypeAlias = PromptTemplate | Callable[[Record], str | None]
logger = logging.getLogger(__name__)
_SETTING = "teacher.context"
_OF_RESPONSES = frozenset({"completion", "score", "feedback", "correct_response"})
_FIRST = 2
"""Iterations after which it is said that none had a context."""


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
        self._context = read_context(context)
        self._started = datetime.now().astimezone()
        self._seen: list[bool] = []

    def longest_prompt(self, prompts: PromptBatch, chat: ChatFormat) -> int:
        """Return the most tokens of a teacher's prompt, as far as known before the responses."""
        _refuse_media(prompts.media)
        longest = 0
        rows = zip(prompt_token_ids(prompts), prompts.prompts, prompts.columns, strict=True)
        for ids, prompt, columns in rows:
            turns = None if isinstance(prompt, str) else prompt
            own = self._prompt(ids.tolist(), turns, columns, chat)
            if written := written_before(self._context, own.text, columns):
                longest = max(longest, len(own.tokens(written)))
        return longest

    def rows(self, rollout: Rollout, records: Sequence[Record], chat: ChatFormat) -> PrivilegedRows:
        """Return the rows of a rollout as the teacher reads them.

        Args:
            rollout: Rows of tokens.
            records: Of the same responses.
            chat: How prompts are rendered.

        Raises:
            ValueError: They show images, their histories were rewritten, a prompt is not rendered
                again as it is, the context cannot be written, or it leaves no room for a response.
        """
        _refuse_media(rollout.media)
        if rollout.forks is not None:
            raise ValueError(
                f"{_SETTING} changes the prompt of a response, and these episodes had their "
                "history rewritten, so that each turn has another one: drop the context, or "
                "store rollouts without episodes.agent and history: template"
            )
        correct = self._correct_responses(records)
        ids, masks, informed = [], [], []
        known: dict[tuple[Any, ...], _Prompt] = {}
        for row, record in enumerate(records):
            attended = rollout.attention_mask[row]
            own, counts = rollout.input_ids[row, attended], rollout.response_mask[row, attended]
            start = len(own) - len(record["token_ids"])
            before, columns = own[:start], record["columns"]
            key = (record["group"], *before.tolist())
            if key not in known:
                known[key] = self._prompt([*key[1:]], record.get("messages"), columns, chat)
            values = {**columns, **record.get("extras", {})}
            _refuse_ambiguous(self._context, values)
            values |= {name: record[name] for name in ("completion", "score")}
            values |= {"feedback": _feedback(record), "correct_response": correct[row]}
            written = write(self._context, known[key].text, values)
            informed.append(written is not None)
            if written is not None:
                before = own.new_tensor(known[key].tokens(written))
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

    def observe(self, informed: Tensor) -> None:
        """Warn once if no response of the first two iterations of this process has context."""
        self._seen.append(bool(informed.any()))
        if len(self._seen) == _FIRST and not any(self._seen):
            logger.warning(
                "no response of the first %d steps has a context, so nothing was learnt from the "
                "teacher: look at what %s writes, and whether the rows have what it needs",
                *(_FIRST, _SETTING),
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
        self, ids: list[int], turns: Sequence[Message] | None, columns: Record, chat: ChatFormat
    ) -> _Prompt:
        """Return a prompt that another one can be written in the place of."""
        if turns is None:
            bos = self._tokenizer.bos_token_id
            # with its id there, decoders of SentencePiece keep the space that they put before texts
            bare = ids[1:] if bos is not None and ids[:1] == [bos] else ids
            text = str(self._tokenizer.decode(bare, clean_up_tokenization_spaces=False))
        else:
            text = _shown(turns)
            if chat.dated:  # prompts were rendered at the start, and a run may go past midnight
                kwargs = {"strftime_now": self._started.strftime, **chat.kwargs}
                chat = replace(chat, kwargs=kwargs)

        def tokens(text: str) -> list[int]:
            rendered = Text(text, complete=False)
            if turns is not None:
                last = _last_of_user(turns)
                changed = [*turns]
                changed[last] = {**turns[last], "content": text}
                rendered = Text(chat.render(changed, columns, prompt=True), complete=True)
            return list(map(int, tokenize_prompts(self._tokenizer, [rendered])[0]))

        if tokens(text) != ids:
            raise ValueError(
                f"{_SETTING} is put into a prompt that is rendered again, and without the context "
                "that does not give the tokens the policy has read (tools, chat_template_kwargs of "
                "rows, a chat_template that writes the time or differs from that of stored "
                "rollouts, or a tokenizer that does not give texts back): the teacher's prompt "
                f"would differ in more than the context. The prompt: {text!r:.200}"
            )
        return _Prompt(text, tokens)


class _Prompt(NamedTuple):
    text: str
    """What the context is put around: a plain prompt, or the last turn of the user."""
    tokens: Callable[[str], list[int]]
    """Of the prompt with another text in its place."""


def read_context(context: str | Callable[[Record], str | None]) -> Context:
    """Parse a template, or import the function that a path leads to.

    Raises:
        ValueError: The template cannot be read, or the path leads to no function.
    """
    if not isinstance(context, str):
        return context
    if "{{" in context or "{%" in context:
        return PromptTemplate(context, setting=_SETTING, finalize=_not_empty)
    return import_function(_SETTING, context, ["a template with {{ prompt }}"])


def names_in(context: Context) -> frozenset[str]:
    """Return the names that a template reads; of a function they are not known."""
    return frozenset(context.columns if isinstance(context, PromptTemplate) else ())


def check_filled(context: Context, rows: Iterable[tuple[Prompt, Record]], *, scored: bool) -> None:
    """Refuse a template that cannot be filled from prompts and their columns.

    Raises:
        ValueError: It reads what nothing provides, or fails. Rewards (``scored``) may log extras of
            any name.
    """
    for prompt, columns in rows:
        missing = names_in(context) - {"prompt", *_OF_RESPONSES, *columns}
        if missing and not scored:
            raise ValueError(
                f"{_SETTING}: {missing_column(min(missing), columns, setting=_SETTING)}"
            )
        written_before(context, prompt if isinstance(prompt, str) else _shown(prompt), columns)


def written_before(context: Context, prompt: str, columns: Record) -> str | None:
    """Write a context that reads columns alone; None: there is none, or it needs the response."""
    _refuse_ambiguous(context, columns)
    if isinstance(context, PromptTemplate) and names_in(context) <= {"prompt", *columns}:
        return write(context, prompt, columns)
    return None


def write(context: Context, prompt: str, values: Record) -> str | None:
    """Write the teacher's prompt; None: there is no context.

    Raises:
        ValueError: The template fails, or the function returns no text.
    """
    values = {**values, "prompt": prompt}
    written: Any
    if not isinstance(context, PromptTemplate):
        written = context(values)
        if not isinstance(written, str | None):
            name = getattr(context, "__qualname__", type(context).__name__)
            raise ValueError(
                f"{_SETTING}: the function {name} returned a {type(written).__name__}, "
                f"{written!r:.100}; it must return the teacher's prompt as text, or None"
            )
    elif "score" in names_in(context) and values.get("score") is None:
        return None  # nothing can be compared with it
    else:
        try:
            written = context.render(values)
        except _EmptyValue:
            return None
        except BadRow as error:
            raise ValueError(f"{_SETTING}: {error}") from error
    return written if written and written.strip() and written != prompt else None


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


def _shown(turns: Sequence[Message]) -> str:
    return content_text(turns[_last_of_user(turns)].get("content"))


def _last_of_user(turns: Sequence[Message]) -> int:
    numbers = [number for number, turn in enumerate(turns) if turn["role"] == "user"]
    if not numbers:
        raise ValueError(
            f"{_SETTING} is put into the last turn of the user, and a chat has none (its turns: "
            f"{', '.join(turn['role'] for turn in turns)}): leave such rows or the context out"
        )
    return numbers[-1]


def _refuse_ambiguous(context: Context, names: Iterable[str]) -> None:
    for name in sorted(names_in(context) & _OF_RESPONSES & {*names}):
        raise ValueError(
            f"{_SETTING} reads {name!r}, which every response has and which is also a column of "
            "the data or an extra of a reward function: give the column or the extra another name"
        )
