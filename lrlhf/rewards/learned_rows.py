"""Responses with their prompts, as a reward model reads them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from lrlhf.media import MediaRefs
from lrlhf.models import TEMPLATE_ERRORS, context_of, reader_of, rejoined, split_messages
from lrlhf.models.chat_messages import readable_messages
from lrlhf.rewards.function import Completion, RewardError, completion_text, content_text
from lrlhf.types import Media, Message, Prompt, SequenceBatch

SpecialTokens = Literal["with_eos", "tokenizer", "none"]
"""What stands around a plain text: the tokenizer's marks and an end, these marks, or nothing."""
_NO_LIMIT = 10**9  # tokenizers without a limit name one of 30 digits


class Row(NamedTuple):
    """One response with its prompt, as the reward model reads it."""

    input_ids: Sequence[int]
    media: Media | None = None
    prompt: int = 0
    """Number that rows with the same prompt have in common."""


def sharing(
    rows: Sequence[Row | None],
    prompts: Sequence[Prompt],
    shown: Sequence[MediaRefs] | None = None,
) -> list[Row | None]:
    """Give rows that show the same objects the same `Media`, so that the model looks once."""
    known: dict[tuple[int, ...], Media] = {}
    numbers: dict[str, int] = {}
    shared: list[Row | None] = []
    shown = shown or [MediaRefs()] * len(rows)
    for row, prompt, refs in zip(rows, prompts, shown, strict=True):
        if row is not None:
            text = prompt if isinstance(prompt, str) else repr(prompt)
            row = row._replace(prompt=numbers.setdefault(text, len(numbers)))
        if row is not None and row.media is not None:
            key = tuple(map(id, refs.everything))
            row = row._replace(media=known.setdefault(key, row.media))
        shared.append(row)
    return shared


def text_without_marks(text: str, marks: Sequence[str]) -> str:
    """Remove marks, also those that the removal of others leaves."""
    pattern = re.compile("|".join(map(re.escape, marks)))
    while (left := pattern.sub("", text)) != text:
        text = left
    return text


def without_marks(completion: Completion, marks: Sequence[str]) -> Completion:
    """Remove what the reward model would read as media: a policy can spell it by letters."""
    if not marks:
        return completion
    if isinstance(completion, str):
        return text_without_marks(completion, marks)
    return [_cleaned(turn, marks) for turn in completion]


def _cleaned(value: Any, marks: Sequence[str]) -> Any:
    """Remove marks from all texts in a value of JSON, such as a turn with calls."""
    if isinstance(value, str):
        return text_without_marks(value, marks)
    if isinstance(value, Mapping):
        return {name: _cleaned(inner, marks) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(inner, marks) for inner in value]
    return value


def as_text(turn: Message) -> Message:
    """Leave of content that comes in parts what a text model reads."""
    content = turn.get("content")
    return {**turn, "content": content_text(content)} if isinstance(content, list) else turn


def encoded(tokenizer: PreTrainedTokenizerBase, text: str, *, specials: bool) -> list[int]:
    """Tokenize a text; a token that begins texts is not said twice."""
    reader = reader_of(tokenizer, text)
    ids: list[int] = reader(text, add_special_tokens=specials, verbose=False)["input_ids"]
    bos = tokenizer.bos_token_id
    doubled = bos is not None and ids[:2] == [bos, bos]
    return ids[1:] if doubled else ids


def check_special_tokens(value: str) -> None:
    """Refuse what is none of `SpecialTokens`.

    Raises:
        ValueError: It is none.
    """
    if value not in (known := get_args(SpecialTokens)):
        raise ValueError(f"special_tokens is {value!r}; it must be one of {', '.join(known)}")


def text_ids(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    chat: bool,
    special_tokens: SpecialTokens = "with_eos",
) -> list[int]:
    """Tokenize prompt and response; a chat has its special tokens from its template.

    Args:
        tokenizer: The reward model's.
        text: Of both.
        chat: Whether a template has rendered it.
        special_tokens: Of other text; the default is what ``RewardModel`` trains on.
    """
    ids = encoded(tokenizer, text, specials=not chat and special_tokens != "none")
    end = tokenizer.eos_token_id
    ended = chat or special_tokens != "with_eos" or end is None or ids[-1:] == [end]
    return ids if ended else [*ids, end]


def written(
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    prompt: Prompt,
    completion: Completion,
    *,
    source: str,
) -> str:
    """Return prompt and response as one text; see `rendered`."""
    if isinstance(prompt, str):
        # a text with all that the policy was given in between, as it has read it
        return prompt + (completion if isinstance(completion, str) else completion_text(completion))
    turns = (
        [{"role": "assistant", "content": completion}]
        if isinstance(completion, str)
        else completion
    )
    return rendered(tokenizer, template, (*prompt, *turns), source=source)


def padded(rows: Sequence[Row]) -> SequenceBatch:
    """Pad at the right; the id does not matter, as the mask says what counts."""
    lengths = torch.tensor([len(row.input_ids) for row in rows])
    input_ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row.input_ids) for row in rows], True)
    mask = torch.arange(input_ids.shape[1]) < lengths[:, None]
    return SequenceBatch(
        input_ids=input_ids,
        attention_mask=mask,
        response_mask=mask,
        media=tuple(row.media for row in rows),
        group_ids=torch.tensor([row.prompt for row in rows]),
    )


def rendered(
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    turns: Sequence[Message],
    *,
    source: str,
    open_turn: bool = False,
) -> str:
    """Render a chat as the reward model reads it; special tokens in what turns say are split.

    Calls become text if its template leaves them out.

    Args:
        tokenizer: The reward model's.
        template: Jinja text; None: the tokenizer's.
        turns: Of the chat.
        source: The reward model, for messages.
        open_turn: End where the assistant is to answer.

    Raises:
        RewardError: There is no template, or it refuses the turns.
    """
    if template is None and tokenizer.chat_template is None:
        raise RewardError(f"the prompts are chats, and {no_template(tokenizer, source, open_turn)}")

    def render(turns: Sequence[Message]) -> str:
        return _rendered(tokenizer, template, turns, source=source, open_turn=open_turn)

    text = render(turns)
    if any(turn.get("tool_calls") for turn in turns):
        other = {"type": "function", "function": {"name": "LRLHF-CALL-5E1D", "arguments": {}}}
        marked = [
            {**turn, "tool_calls": [other]} if turn.get("tool_calls") else turn for turn in turns
        ]
        if render(marked) == text:
            return render([_calls_as_text(turn) for turn in turns])
    return text


def _calls_as_text(turn: Message) -> Message:
    """Put calls into the content, for templates that have no place for them."""
    calls = [
        f"<tool_call>\n{_call_text(one)}\n</tool_call>" for one in turn.get("tool_calls") or ()
    ]
    said = [text for text in (content_text(turn.get("content")), *calls) if text]
    return {**turn, "content": "\n".join(said)} if calls else turn


def _call_text(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    told = {"name": function.get("name"), "arguments": function.get("arguments")}
    return json.dumps(told, ensure_ascii=False, default=str)


def _rendered(
    tokenizer: PreTrainedTokenizerBase,
    template: str | None,
    turns: Sequence[Message],
    *,
    source: str,
    open_turn: bool,
) -> str:
    try:
        text = tokenizer.apply_chat_template(
            readable_messages(
                split_messages(tokenizer, turns, template), tokenizer.get_chat_template(template)
            ),
            chat_template=template,
            tokenize=False,
            add_generation_prompt=open_turn,
        )
    except TEMPLATE_ERRORS as error:
        raise RewardError(
            f"the chat template of {source!r} refuses the messages: {error}; give chat_template"
        ) from error
    return rejoined(str(text))


def no_template(tokenizer: PreTrainedTokenizerBase, source: str, open_turn: bool) -> str:
    """Say that a tokenizer cannot render chats, and which option of its reward helps."""
    return (
        f"the tokenizer of {source!r} has no chat template: give chat_template; for a model that "
        f"was trained on plain texts chat_template: {plain_template(tokenizer, open_turn)!r}"
    )


def plain_template(tokenizer: PreTrainedTokenizerBase, open_turn: bool) -> str:
    """Return the template that renders a chat as plain text is encoded: turn after turn.

    It writes the marks around plain text out, as those are for a chat's template to say.

    Args:
        tokenizer: The reward model's.
        open_turn: The text goes on, so that nothing ends it.
    """
    bare, ids = (text_ids(tokenizer, "a", chat=chat) for chat in (True, False))
    starts = [i for i in range(len(ids)) if ids[i : i + len(bare)] == bare]
    start = starts[0] if starts else 0
    before, after = ids[:start], ids[start + len(bare) :]
    first, last = ("".join(tokenizer.convert_ids_to_tokens(part)) for part in (before, after))
    turns = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return f"{first}{turns}{'' if open_turn else last}"


def token_limit(
    max_tokens: int | None, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> int | None:
    """Return how many tokens an input may have; None: nothing limits it."""
    limits = [max_tokens, context_of(config)]
    if tokenizer.model_max_length < _NO_LIMIT:
        limits.append(int(tokenizer.model_max_length))
    return min((limit for limit in limits if limit is not None), default=None)


def resolve_device(device: str) -> torch.device:
    """Return a device by its name, ``auto`` being the process's current GPU, if any."""
    if device != "auto":
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@contextlib.contextmanager
def in_place(network: nn.Module, device: torch.device, *, offload: bool) -> Iterator[None]:
    """Have a network on its device inside, and with ``offload`` not longer."""
    # threads do not inherit the process's current GPU
    current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with current:
        if not offload:
            yield
            return
        network.to(device)
        try:
            yield
        finally:
            network.to("cpu")
