"""What a data module takes from the trainer that it is attached to, if any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import lightning as L
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules.loading.loader import Ranks
from lrlhf.media import MediaProcessor
from lrlhf.models import load_config, load_processor, load_tokenizer


@runtime_checkable
class HasTokenizer(Protocol):
    """A module that knows how its model reads text."""

    tokenizer: PreTrainedTokenizerBase


@runtime_checkable
class HasProcessor(Protocol):
    """A module that knows how its model sees images."""

    processor: MediaProcessor | None


@runtime_checkable
class HasHeads(Protocol):
    """A module that scores with named heads."""

    head_names: Sequence[str]


def resolve_tokenizer(
    given: str | PreTrainedTokenizerBase | None, trainer: L.Trainer | None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer that was given, or the module's.

    Raises:
        ValueError: There is neither, or it cannot pad.
    """
    if isinstance(given, str):
        return load_tokenizer(given)
    tokenizer = given
    if tokenizer is None:
        module = trainer.lightning_module if trainer is not None else None
        tokenizer = module.tokenizer if isinstance(module, HasTokenizer) else None
    if tokenizer is None:
        raise ValueError(
            "the data module has no tokenizer, and the LightningModule it is used with has none "
            "either: give `tokenizer` (a model folder, a hub id or a tokenizer object)"
        )
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no padding token: set its `pad_token`, "
            "or give the name of the model as `tokenizer`, then one is chosen"
        )
    return tokenizer


def resolve_processor(
    given: str | PreTrainedTokenizerBase | None, trainer: L.Trainer | None
) -> MediaProcessor | None:
    """Return what reads images and videos for the model; None: it reads text only.

    Args:
        given: What the data module was given as ``tokenizer``.
        trainer: Its module has the processor, unless ``given`` names another model.
    """
    if isinstance(given, str):
        processor = load_processor(given)
        return None if processor is None else MediaProcessor.of(processor, load_config(given))
    module = trainer.lightning_module if trainer is not None else None
    return module.processor if isinstance(module, HasProcessor) else None


def resolve_heads(given: Sequence[str] | None, trainer: L.Trainer | None) -> tuple[str, ...]:
    """Return the head names that were given, or the module's, or the single head ``reward``."""
    if given is None:
        module = trainer.lightning_module if trainer is not None else None
        given = tuple(module.head_names) if isinstance(module, HasHeads) else ("reward",)
    if not given or len(set(given)) < len(given):
        raise ValueError(f"head_names={list(given)!r}: give at least one name, each only once")
    return tuple(given)


def data_ranks(trainer: L.Trainer | None) -> Ranks:
    """Return which share of the data this process gets.

    Processes that share one model (tensor parallel) share their data too, which the strategy's
    own sampler arguments tell.
    """
    arguments = trainer.distributed_sampler_kwargs if trainer is not None else None
    if not arguments:
        return Ranks()
    return Ranks(rank=arguments["rank"], world=arguments["num_replicas"])
