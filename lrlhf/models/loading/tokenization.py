"""Tokenizers that can pad, and the token ids that end a response."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

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
from lrlhf.models.loading.model_sources import (
    explained,
    load_config,
    resolve_source,
    warn_of_remote_code,
)
from lrlhf.models.media_inputs import placeholder_ids

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
