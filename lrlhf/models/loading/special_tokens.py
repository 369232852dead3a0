"""Special tokens in the contents of a chat: text that somebody wrote, not marks of the template.

`split_messages` puts a separator into each special token of a content before a template is
rendered. The tokenizer that `readers_of` returns for such texts finds the special tokens that are
whole, which are the template's own, and reads the others as if nothing were in between.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerBase

from lrlhf.models.chat_templates import template_constants

TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
"""What templates raise at messages that they were not written for: they are programs."""
_ESCAPE = "\ufdd0"
"""No character: Unicode leaves it to programs, and no text should hold it."""
_SEPARATOR = f"{_ESCAPE}\ufdd1"
_ESCAPED = f"{_ESCAPE}\ufdd2"
"""The escape, where a text holds it all the same."""
_ASKED, _ANSWERED = ({"role": role, "content": "a"} for role in ("user", "assistant"))
_MEDIA = [{"type": kind} for kind in ("image", "video", "audio")]
_SHOWN = {"role": "user", "content": [*_MEDIA, {"type": "text", "text": "a"}]}
_QUESTIONS: Sequence[list[dict[str, Any]]] = ([_ASKED], [_SHOWN])
_PLAIN_CHATS: Sequence[list[dict[str, Any]]] = (
    [_ASKED, _ANSWERED, _ASKED],
    [{"role": "system", "content": "a"}, _ASKED, _ANSWERED, _ASKED],
    [_SHOWN, _ANSWERED, _ASKED],
)


def split_messages(
    tokenizer: PreTrainedTokenizerBase,
    messages: Iterable[Mapping[str, Any]],
    template: str | None = None,
) -> list[dict[str, Any]]:
    """Return messages whose special tokens are read as the letters that they are written with.

    The assistant's turns keep what the template looks for in turns, or names and does not write
    around plain ones, such as marks of thoughts and calls; never what ends a turn or stands for
    media.

    Args:
        tokenizer: Will read them.
        messages: Not rendered yet.
        template: Renders them; None: the tokenizer's.
    """
    known = _known(tokenizer)
    pattern = _pattern(tokenizer, known)
    split: list[dict[str, Any]] = []
    for message in messages:
        found = pattern
        if message.get("role") == "assistant" and _is_found(pattern, message):
            source = f"{template or tokenizer.chat_template or ''}"
            found = _pattern_of_answers(tokenizer, known, source)
        split.append(_split(found, message))
    return split


def split_text(tokenizer: PreTrainedTokenizerBase, value: Any) -> Any:
    """Return a text, or what holds texts at any depth, with its special tokens split."""
    return _split(_pattern(tokenizer, _known(tokenizer)), value)


def _split(pattern: re.Pattern[str], value: Any) -> Any:
    if isinstance(value, str):
        return pattern.sub(_separated, value)
    if isinstance(value, Mapping):
        return {_split(pattern, key): _split(pattern, entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_split(pattern, entry) for entry in value]
    return value


def _is_found(pattern: re.Pattern[str], value: Any) -> bool:
    if isinstance(value, str):
        return pattern.search(value) is not None
    if isinstance(value, Mapping):
        return any(_is_found(pattern, entry) for pair in value.items() for entry in pair)
    return isinstance(value, list | tuple) and any(_is_found(pattern, one) for one in value)


def rejoined(text: str) -> str:
    """Undo how Python and JSON write separators, in the text of a template that shows values so."""
    for mark in (_SEPARATOR, _ESCAPED):
        text = text.replace(ascii(mark)[1:-1], mark)
    return text


def is_split(text: str) -> bool:
    """Whether special tokens of a text are split."""
    return _SEPARATOR in text


def unsplit(text: str) -> str:
    """Return a text as it was written."""
    return text.replace(_SEPARATOR, "").replace(_ESCAPED, _ESCAPE)


def unsplit_places(text: str) -> Sequence[int]:
    """Return where each letter of the text as it was written stands in it, and where it ends."""
    if _ESCAPE not in text:
        return range(len(text) + 1)
    letters = re.finditer(f"(?s){_SEPARATOR}|({_ESCAPED}|.)", text)
    return [*(letter.start() for letter in letters if letter[1]), len(text)]


def readers_of(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]
) -> Iterator[tuple[PreTrainedTokenizerBase, list[int]]]:
    """Yield the tokenizer with the numbers of the texts that it reads, and one for the others.

    Offsets are those of the text as it is given.
    """
    split = [number for number, text in enumerate(texts) if _ESCAPE in text]
    if len(split) < len(texts):
        yield tokenizer, sorted({*range(len(texts))} - {*split})
    if split:
        yield _splitting(tokenizer, _known(tokenizer)), split


def reader_of(tokenizer: PreTrainedTokenizerBase, text: str) -> PreTrainedTokenizerBase:
    """Return what reads a text: the tokenizer, unless special tokens of the text are split."""
    ((reader, _),) = readers_of(tokenizer, [text])
    return reader


_Known = tuple[int, str]
"""Changes with the special tokens of a tokenizer."""


def _known(tokenizer: PreTrainedTokenizerBase) -> _Known:
    return len(tokenizer), str(tokenizer.special_tokens_map)


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """Return the tokens that text is searched for before it is cut into ordinary ones."""
    added = {str(one) for one in tokenizer.added_tokens_decoder.values() if one.special}
    return added | {*map(str, tokenizer.all_special_tokens)}


@lru_cache(maxsize=16)
def _pattern(
    tokenizer: PreTrainedTokenizerBase, known: _Known, kept: frozenset[str] = frozenset()
) -> re.Pattern[str]:
    """Match the first letter of every special token, also of those that overlap."""
    del known
    rest: dict[str, list[str]] = {}
    for token in sorted(special_tokens(tokenizer) - kept):
        if len(token) > 1:  # nothing can be put into a single letter
            rest.setdefault(token[0], []).append(re.escape(token[1:]))
    firsts = [f"{re.escape(first)}(?={'|'.join(others)})" for first, others in rest.items()]
    return re.compile("|".join([_ESCAPE, *firsts]))


def _separated(found: re.Match[str]) -> str:
    return _ESCAPED if found[0] == _ESCAPE else f"{found[0]}{_SEPARATOR}"


@lru_cache(maxsize=16)
def _pattern_of_answers(
    tokenizer: PreTrainedTokenizerBase, known: _Known, template: str
) -> re.Pattern[str]:
    """Leave the tokens out that the template knows in an assistant's turn."""
    named = {token for token in special_tokens(tokenizer) if token in template}
    source = None if template == f"{tokenizer.chat_template}" else template

    def around(chats: Iterable[list[dict[str, Any]]]) -> Iterator[str]:
        for chat in chats:
            with contextlib.suppress(*TEMPLATE_ERRORS):
                text = tokenizer.apply_chat_template(chat, chat_template=source, tokenize=False)
                yield from (token for token in named if token in str(text))

    ends = {str(token) for token in (tokenizer.eos_token, tokenizer.bos_token)}
    never = {*ends, *around(_QUESTIONS)}
    # marks of an empty thought may stand before each answer
    sought = {
        token for token in named for mark in template_constants(template).marks if token in mark
    }
    kept = (named - never - {*around(_PLAIN_CHATS)}) | (sought - never)
    return _pattern(tokenizer, known, frozenset(kept))


@lru_cache(maxsize=4)
def _splitting(tokenizer: PreTrainedTokenizerBase, known: _Known) -> PreTrainedTokenizerBase:
    """Return a copy that finds the special tokens that are whole, and reads over separators."""
    splitting = copy.copy(tokenizer)
    inner: Any = splitting
    if not tokenizer.is_fast:
        cut = inner._tokenize
        inner._tokenize = lambda text, **options: cut(unsplit(text), **options)
        return splitting
    whole: Any = tokenizer
    inner._tokenizer = _over_separators(whole.backend_tokenizer, between_words=False)
    if _finds_special(splitting, _pattern(tokenizer, known)):
        # Unigram and word-level models know special tokens as words too
        inner._tokenizer = _over_separators(whole.backend_tokenizer, between_words=True)
    return splitting


def _over_separators(backend: Tokenizer, *, between_words: bool) -> Tokenizer:
    """Drop separators in front of the normalizer, or ``between_words`` behind the pre-tokenizer."""
    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        # else it is searched for where the separators are gone
        token["normalized"] = token["normalized"] and not token["special"]
    escaped = {"type": "Replace", "pattern": {"String": _ESCAPED}, "content": _ESCAPE}
    gone = {"type": "Replace", "pattern": {"String": _SEPARATOR}, "content": ""}
    first = [escaped] if between_words else [gone, escaped]
    before = [state["normalizer"]] if state["normalizer"] else []
    state["normalizer"] = {"type": "Sequence", "normalizers": [*first, *before]}
    if between_words:
        ((as_bytes, _),) = pre_tokenizers.ByteLevel(
            add_prefix_space=False, use_regex=False
        ).pre_tokenize_str(_SEPARATOR)
        cuts = {
            "type": "Split",
            "pattern": {"Regex": f"{_SEPARATOR}|{re.escape(as_bytes)}"},
            "behavior": "Removed",
            "invert": False,
        }
        before = [state["pre_tokenizer"]] if state["pre_tokenizer"] else []
        state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*before, cuts]}
    return Tokenizer.from_str(json.dumps(state))


def _finds_special(tokenizer: PreTrainedTokenizerBase, pattern: re.Pattern[str]) -> bool:
    """Whether a special token is found where it is split."""
    tokens = sorted(special_tokens(tokenizer))
    texts = [pattern.sub(_separated, f"a{token}a") for token in tokens]
    found = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return any(
        tokenizer.convert_tokens_to_ids(token) in ids
        for token, ids in zip(tokens, found, strict=True)
    )
