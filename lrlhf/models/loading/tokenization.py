"""Tokenizers that can pad, and the token ids that end a response."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer, pre_tokenizers
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

import lrlhf.bounded_templates  # noqa: F401  the chat templates of tokenizers are bounded
from lrlhf.models.chat_templates import template_constants
from lrlhf.models.loading.model_sources import (
    explained,
    load_config,
    resolve_source,
    warn_of_remote_code,
)
from lrlhf.models.media_inputs import placeholder_ids
from lrlhf.models.transformers_internals import before_splitting, set_backend

logger = logging.getLogger(__name__)


def load_tokenizer(
    source: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``source``, able to pad at the right.

    Args:
        source: As in :func:`lrlhf.models.resolve_source`.
        revision: Branch, tag or commit of a hub id.
        trust_remote_code: Run Python code that comes with the tokenizer.

    Raises:
        ValueError: There is no tokenizer, or it has neither a padding nor an end token.
    """
    location = resolve_source(source)
    if trust_remote_code:
        warn_of_remote_code(source)
    with explained(source):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            location, revision=revision, trust_remote_code=trust_remote_code
        )
    tokenizer.padding_side = "right"
    pad, rows = tokenizer.pad_token_id, None
    if pad is not None and pad >= tokenizer.vocab_size:  # it was added
        config = load_config(source, revision=revision, trust_remote_code=trust_remote_code)
        rows = config.get_text_config().to_dict().get("vocab_size")
    pad_within(tokenizer, rows, source)
    return tokenizer


def load_processor(
    source: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> ProcessorMixin | None:
    """Load what turns images, videos and audio into the input of the model ``source``.

    Args:
        source: As in :func:`lrlhf.models.resolve_source`.
        revision: Branch, tag or commit of a hub id.
        trust_remote_code: Run Python code that comes with the processor.

    Returns:
        What does so; None where the model reads text only.

    Raises:
        ValueError: The model takes media, and its processor cannot be loaded.
    """
    config = load_config(source, revision=revision, trust_remote_code=trust_remote_code)
    if not placeholder_ids(config):
        return None
    reason: Exception | None = None
    processor: Any = None
    with explained(source):
        try:
            processor = AutoProcessor.from_pretrained(  # type: ignore[no-untyped-call]
                resolve_source(source), revision=revision, trust_remote_code=trust_remote_code
            )
        except (ImportError, ValueError, AttributeError) as error:
            reason = error
    if not isinstance(processor, ProcessorMixin):
        raise ValueError(
            f"source {source!r} is a multimodal model without a usable processor "
            f"({reason or f'it has a {type(processor).__name__} only'}); put its "
            "preprocessor_config.json and processor_config.json beside the model, and install "
            "what it may need: pip install 'lrlhf[vision,audio]'"
        ) from reason
    return processor


def pad_within(tokenizer: PreTrainedTokenizerBase, vocabulary: int | None, source: str) -> None:
    """Pad with the end token where there is no padding token, or one that the model does not have.

    Args:
        tokenizer: Changed in place.
        vocabulary: Rows of the model's embedding; None: not known.
        source: Where the model comes from, for messages.

    Raises:
        ValueError: There is no end token either.
    """
    pad = tokenizer.pad_token_id
    if pad is not None and (vocabulary is None or pad < vocabulary):
        return
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"source {source!r}: its tokenizer has neither a pad_token nor an eos_token. Set one "
            "of them in its tokenizer_config.json."
        )
    lack = "has no padding token" if pad is None else f"has no embedding of {tokenizer.pad_token!r}"
    tokenizer.pad_token = tokenizer.eos_token
    logger.info("%s %s: padding with %r.", source, lack, tokenizer.eos_token)


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id that ends a response: of the generation config, the config and the tokenizer.

    Chat models often end their turns with another token than the tokenizer's ``eos_token``, and
    only the generation config knows; an engine stops at any of them.

    Args:
        model: A causal language model, with or without adapters.
        tokenizer: Its tokenizer.

    Raises:
        ValueError: None of the ids is a token of the tokenizer.
    """
    ids = declared_ends(model.generation_config, model.config, tokenizer)
    if not any(0 <= token < len(tokenizer) for token in ids):
        raise ValueError(
            f"No end-of-sequence token: the generation config, the config and the tokenizer "
            f"declare {sorted(ids)}, and the tokenizer has {len(tokenizer)} tokens. Set "
            "eos_token_id in the model's generation_config.json."
        )
    return ids


def declared_ends(
    generation: GenerationConfig | None,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
) -> frozenset[int]:
    """Return the ids that a model's files say end a response; see `eos_token_ids`."""
    declared = (
        None if generation is None else generation.eos_token_id,
        _of_config(config),
        tokenizer.eos_token_id,
    )
    return frozenset[int]().union(*map(_listed, declared))


def stop_at(model: PreTrainedModel, ends: Iterable[int] | int | None) -> None:
    """Have the generation config of a model declare further ids that end a response."""
    generation = model.generation_config
    if generation is None:
        return
    known = {*_listed(generation.eos_token_id)} or {*_listed(_of_config(model.config))}
    if missing := {*_listed(ends)} - known:
        generation.eos_token_id = sorted(known | missing)


def _of_config(config: PreTrainedConfig) -> int | list[int] | None:
    ids: int | list[int] | None = config.get_text_config().to_dict().get("eos_token_id")
    return ids


def _listed(ids: Iterable[int] | int | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else [*ids]


TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
"""What templates raise at messages that they were not written for: they are programs."""
_ESCAPE = "\ufdd0"
"""No character: Unicode leaves it to programs, and no text should hold it."""
_SEPARATOR = f"{_ESCAPE}\ufdd1"
_ESCAPED = f"{_ESCAPE}\ufdd2"
"""The escape, where a text holds it all the same."""
_USER_TURN, _ANSWERED = ({"role": role, "content": "a"} for role in ("user", "assistant"))
_MEDIA = [{"type": kind} for kind in ("image", "video", "audio")]
_SHOWN = {"role": "user", "content": [*_MEDIA, {"type": "text", "text": "a"}]}
_QUESTIONS: Sequence[list[dict[str, Any]]] = ([_USER_TURN], [_SHOWN])
_PLAIN_CHATS: Sequence[list[dict[str, Any]]] = (
    [_USER_TURN, _ANSWERED, _USER_TURN],
    [{"role": "system", "content": "a"}, _USER_TURN, _ANSWERED, _USER_TURN],
    [_SHOWN, _ANSWERED, _USER_TURN],
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
        content = message.get("content")
        if isinstance(content, list):
            message = {**message, "content": _without_seams(pattern, content)}
        message_pattern = pattern
        if message.get("role") == "assistant" and _is_special(pattern, message):
            source = f"{template or tokenizer.chat_template or ''}"
            message_pattern = _pattern_of_answers(tokenizer, known, source)
        split.append(_split(message_pattern, message))
    return split


def _without_seams(pattern: re.Pattern[str], parts: list[Any]) -> list[Any]:
    """Join neighbouring text parts where a special token begins in one and ends in a later one.

    Templates write parts one after another, so that the token would stand in the text.
    """
    joined: list[Any] = []
    for _, neighbours in itertools.groupby(parts, lambda part: _text_of(part) is None):
        run = list(neighbours)
        texts = [text for text in map(_text_of, run) if text is not None]
        if len(pattern.findall("".join(texts))) > sum(len(pattern.findall(text)) for text in texts):
            run = [{**run[0], "text": "".join(texts)}]
        joined += run
    return joined


def _text_of(part: Any) -> str | None:
    """Return the text of a part; None: it is none."""
    if not isinstance(part, Mapping) or part.get("type", "text") != "text":
        return None
    text = part.get("text")
    return text if isinstance(text, str) else None


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


def _is_special(pattern: re.Pattern[str], value: Any) -> bool:
    if isinstance(value, str):
        return pattern.search(value) is not None
    if isinstance(value, Mapping):
        return any(_is_special(pattern, entry) for pair in value.items() for entry in pair)
    return isinstance(value, list | tuple) and any(_is_special(pattern, part) for part in value)


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
    added = {str(each) for each in tokenizer.added_tokens_decoder.values() if each.special}
    return added | {*map(str, tokenizer.all_special_tokens)}


@lru_cache(maxsize=16)
def _pattern(
    tokenizer: PreTrainedTokenizerBase, known: _Known, retained: frozenset[str] = frozenset()
) -> re.Pattern[str]:
    """Match the first letter of every special token, also of those that overlap."""
    del known
    rest: dict[str, list[str]] = {}
    for token in sorted(special_tokens(tokenizer) - retained):
        if len(token) > 1:  # nothing can be put into a single letter
            rest.setdefault(token[0], []).append(re.escape(token[1:]))
    firsts = [f"{re.escape(first)}(?={'|'.join(others)})" for first, others in rest.items()]
    return re.compile("|".join([_ESCAPE, *firsts]))


def _separated(match: re.Match[str]) -> str:
    return _ESCAPED if match[0] == _ESCAPE else f"{match[0]}{_SEPARATOR}"


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
    retained = (named - never - {*around(_PLAIN_CHATS)}) | (sought - never)
    return _pattern(tokenizer, known, frozenset(retained))


@lru_cache(maxsize=4)
def _splitting(tokenizer: PreTrainedTokenizerBase, known: _Known) -> PreTrainedTokenizerBase:
    """Return a copy that finds the special tokens that are whole, and reads over separators."""
    splitting = copy.copy(tokenizer)
    if not tokenizer.is_fast:
        before_splitting(splitting, unsplit)
        return splitting
    tokenize: Any = tokenizer
    set_backend(splitting, _over_separators(tokenize.backend_tokenizer, between_words=False))
    if _finds_special(splitting, _pattern(tokenizer, known)):
        # Unigram and word-level models know special tokens as words too
        set_backend(splitting, _over_separators(tokenize.backend_tokenizer, between_words=True))
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
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return any(
        tokenizer.convert_tokens_to_ids(token) in ids
        for token, ids in zip(tokens, encoded, strict=True)
    )
