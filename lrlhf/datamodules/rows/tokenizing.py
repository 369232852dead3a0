"""Text to token ids, many rows at a time."""

from __future__ import annotations

from collections.abc import Sequence
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
    after = _specials_after(tokenizer)
    return [
        ids if text.complete or after == 0 else ids[:-after]
        for text, ids in zip(texts, tokenize(tokenizer, texts), strict=True)
    ]


def _specials_after(tokenizer: PreTrainedTokenizerBase) -> int:
    """Count the special tokens that the tokenizer itself puts after a text."""
    bare, full = (
        _encode(tokenizer, ["a"], add_special_tokens=special)[0].tolist()
        for special in (False, True)
    )
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return len(full) - start - len(bare)
    raise ValueError(
        f"the tokenizer {tokenizer.name_or_path!r} tokenises the same text differently with and "
        "without special tokens; use another tokenizer"
    )


def common_prefix(first: Tokens, second: Tokens) -> int:
    """Number of leading ids that are equal."""
    shorter = min(len(first), len(second))
    different = np.nonzero(first[:shorter] != second[:shorter])[0]
    return int(different[0]) if len(different) else shorter


def _encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool
) -> list[Tokens]:
    encoded: list[Tokens] = []
    for start in range(0, len(texts), _CHUNK):
        ids = tokenizer(
            list(texts[start : start + _CHUNK]),
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            verbose=False,
        )["input_ids"]
        encoded += [np.asarray(row, dtype=np.int32) for row in ids]
    return encoded


def _single_bos(ids: Tokens, bos: int | None) -> Tokens:
    doubled = bos is not None and len(ids) > 1 and ids[0] == bos and ids[1] == bos
    return ids[1:] if doubled else ids
