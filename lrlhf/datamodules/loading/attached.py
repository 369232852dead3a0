"""What a data module takes from the trainer that it is attached to, if any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import lightning as L
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules.loading.loader import Ranks
from lrlhf.datamodules.rows.chat import ChatFormat
from lrlhf.datamodules.rows.media_rows import MediaReader
from lrlhf.media import MediaOptions, MediaProcessor
from lrlhf.models import load_config, load_processor, load_tokenizer


class Reader(NamedTuple):
    """What turns the texts, images and videos of rows into tokens."""

    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    media: MediaReader


@dataclass(frozen=True)
class ReaderOptions:
    """How texts and media are read, as the user set it.

    Args:
        tokenizer: Model folder, hub id or tokenizer; None: the LightningModule's.
        template: See `ChatFormat`.
        template_kwargs: See `ChatFormat`.
        tools: See `ChatFormat`.
        media: How images and videos are read.
        max_tokens: Longest row that can be used, and the setting that says so.
    """

    tokenizer: str | PreTrainedTokenizerBase | None
    template: str | None
    template_kwargs: Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any]] | None
    media: MediaOptions
    max_tokens: tuple[int | None, str]

    def attach(self, trainer: L.Trainer | None) -> Reader:
        """Take from the trainer's module what was not given.

        Raises:
            ValueError: There is no tokenizer, or it cannot pad.
        """
        if isinstance(self.tokenizer, str):
            tokenizer, processor = self._named
        else:
            own = self.tokenizer
            tokenizer = of_module(trainer, "tokenizer") if own is None else own
            processor = of_module(trainer, "processor")
        if tokenizer is None:
            raise ValueError(
                "the data module has no tokenizer, and the LightningModule it is used with has "
                "none either: give `tokenizer` (a model folder, a hub id or a tokenizer object)"
            )
        if tokenizer.pad_token_id is None:
            raise ValueError(
                f"the tokenizer {tokenizer.name_or_path!r} has no padding token: set its "
                "`pad_token`, or give the name of the model as `tokenizer`, then one is chosen"
            )
        chat = ChatFormat(tokenizer, self.template, dict(self.template_kwargs or {}), self.tools)
        return Reader(tokenizer, chat, MediaReader(processor, self.media, self.max_tokens))

    @cached_property
    def _named(self) -> tuple[PreTrainedTokenizerBase, MediaProcessor | None]:
        name = str(self.tokenizer)
        tokenizer, processor = load_tokenizer(name), load_processor(name)
        if processor is None:
            return tokenizer, None
        return tokenizer, MediaProcessor.of(processor, load_config(name))


def of_module(trainer: L.Trainer | None, name: str) -> Any:
    """Return an attribute of the trainer's module, or None."""
    module = trainer.lightning_module if trainer is not None else None
    return getattr(module, name, None)


def resolve_heads(given: Sequence[str] | None, trainer: L.Trainer | None) -> tuple[str, ...]:
    """Return the head names that were given, or the module's, or the single head ``reward``."""
    heads = of_module(trainer, "head_names") if given is None else given
    heads = ("reward",) if heads is None else tuple(heads)
    if not heads or len(set(heads)) < len(heads):
        raise ValueError(f"head_names={list(heads)!r}: give at least one name, each only once")
    return heads


def data_ranks(trainer: L.Trainer | None) -> Ranks:
    """Return which share of the data this process gets.

    Processes that share one model (tensor parallel) share their data too, which the strategy's
    own sampler arguments say.
    """
    arguments = trainer.distributed_sampler_kwargs if trainer is not None else None
    if not arguments:
        return Ranks()
    return Ranks(rank=arguments["rank"], world=arguments["num_replicas"])
