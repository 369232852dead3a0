"""Text to token ids, many rows at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

Tokens = NDArray[np.int32]

_CHUNK = 1024


class Text(NamedTuple):
    """Text to be tokenised."""

    text: str
    complete: bool
    """Rendered by a chat template, so that its special tokens are in the text already."""


class Affixes(NamedTuple):
    """How many special tokens a tokenizer puts around every text."""

    before: int
    after: int


def special_affixes(tokenizer: PreTrainedTokenizerBase) -> Affixes:
    """Count what the tokenizer itself puts before and after a text, such as one BOS before."""
    bare = _encode(tokenizer, ["a"], add_special_tokens=False)[0].tolist()
    full = _encode(tokenizer, ["a"], add_special_tokens=True)[0].tolist()
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return Affixes(start, len(full) - start - len(bare))
    raise ValueError(
        f"the tokenizer {tokenizer.name_or_path!r} tokenises the same text differently with and "
        "without special tokens; use another tokenizer"
    )


def tokenize(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text]) -> list[Tokens]:
    """Tokenise whole texts; plain ones get the tokenizer's own special tokens.

    A text that already begins with the BOS token, complete or not, gets no second one. Nothing
    is ever cut.
    """
    tokens: list[Tokens] = [np.empty(0, np.int32)] * len(texts)
    for complete in (False, True):
        rows = [row for row, text in enumerate(texts) if text.complete is complete]
        encoded = _encode(
            tokenizer, [texts[row].text for row in rows], add_special_tokens=not complete
        )
        for row, ids in zip(rows, encoded, strict=True):
            tokens[row] = _single_bos(ids, tokenizer.bos_token_id)
    return tokens


def tokenize_prompts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text]) -> list[Tokens]:
    """Tokenise texts that are to be continued: as `tokenize`, and nothing comes after the text.

    T5 and BERT tokenizers end every text with a special token, which would tell a policy that
    there is nothing left to say.
    """
    after = special_affixes(tokenizer).after
    return [
        ids if text.complete or after == 0 else ids[:-after]
        for text, ids in zip(texts, tokenize(tokenizer, texts), strict=True)
    ]


def common_prefix(first: Tokens, second: Tokens) -> int:
    """Number of leading ids that are equal."""
    shorter = min(len(first), len(second))
    different = np.nonzero(first[:shorter] != second[:shorter])[0]
    return int(different[0]) if len(different) else shorter


def _encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool
) -> list[Tokens]:
    encoded: list[Tokens] = []
    remaining = iter(texts)
    while chunk := list(islice(remaining, _CHUNK)):
        ids = tokenizer(
            chunk,
            add_special_tokens=add_special_tokens,
            padding=False,
            truncation=False,
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]
        encoded += [np.asarray(row, dtype=np.int32) for row in ids]
    return encoded


def _single_bos(ids: Tokens, bos: int | None) -> Tokens:
    doubled = bos is not None and len(ids) > 1 and ids[0] == bos and ids[1] == bos
    return ids[1:] if doubled else ids
