"""Data modules whose rows are texts and messages, perhaps with images and videos."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import lightning as L
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules.core import RowDataModule, RowKind
from lrlhf.datamodules.loading.sources import Data
from lrlhf.datamodules.loading.validation import Validation
from lrlhf.datamodules.rows.chat import ChatFormat
from lrlhf.datamodules.rows.media_rows import MediaReader
from lrlhf.media import MediaOptions, MediaProcessor
from lrlhf.models import load_config, load_processor, load_tokenizer

RowT = TypeVar("RowT")
BatchT = TypeVar("BatchT")


class Reader(NamedTuple):
    """What turns the texts, images and videos of rows into tokens."""

    tokenizer: PreTrainedTokenizerBase
    chat: ChatFormat
    media: MediaReader


class TextDataModule(RowDataModule[RowT, BatchT]):
    """Base class of the data modules that tokenize text.

    Args:
        kind: See `RowDataModule`.
        train: See `RowDataModule`.
        val: See `RowDataModule`.
        tokenizer: Model folder, hub id or tokenizer; None: the LightningModule's.
        chat_template: File or text of a template to use instead of the tokenizer's.
        chat_template_kwargs: Passed to the template, such as ``{enable_thinking: false}``.
        tools: Tool descriptions for rows that have none of their own.
        split_special_tokens: What turns of chats say is text: a special token in it, such as
            ``<|im_end|>``, is read as the letters that it is written with. False: as the token, for
            data sets that mean them. Plain texts, which may be rendered already, keep theirs.
        media: How images and videos are read.
        **loading: See `RowDataModule`.
    """

    def __init__(  # noqa: PLR0913  the keys of a user's config
        self,
        kind: Callable[..., RowKind[Any, RowT, BatchT]],
        train: Data,
        val: Validation | None = None,
        *,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        split_special_tokens: bool = True,
        media: MediaOptions = MediaOptions(),  # noqa: B008  frozen
        **loading: Any,
    ) -> None:
        super().__init__(kind, train, val, **loading)
        self._tokenizer = tokenizer
        self._template = (
            chat_template,
            dict(chat_template_kwargs or {}),
            tools,
            split_special_tokens,
        )
        self._media = media

    @property
    def learnt_ends(self) -> frozenset[int]:
        """Token ids that end what is learnt of the train rows, once they are loaded."""
        rows: Any = () if self._splits is None else self._splits[0].values
        return frozenset(end for row in rows for text in row.texts for end in text.ends)

    def reader(self, trainer: L.Trainer | None) -> Reader:
        """Return what reads rows, taken from the trainer's module as far as it was not given.

        Raises:
            ValueError: There is no tokenizer, or it cannot pad.
        """
        if isinstance(self._tokenizer, str):
            tokenizer, processor = self._named
        else:
            own = self._tokenizer
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
        chat = ChatFormat(tokenizer, *self._template)
        return Reader(tokenizer, chat, MediaReader(processor, self._media))

    @cached_property
    def _named(self) -> tuple[PreTrainedTokenizerBase, MediaProcessor | None]:
        name = str(self._tokenizer)
        tokenizer, processor = load_tokenizer(name), load_processor(name)
        if processor is None:
            return tokenizer, None
        return tokenizer, MediaProcessor.of(processor, load_config(name))


def of_module(trainer: L.Trainer | None, name: str) -> Any:
    """Return an attribute of the trainer's module, or None."""
    module = trainer.lightning_module if trainer is not None else None
    return getattr(module, name, None)
