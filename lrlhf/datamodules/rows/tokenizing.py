"""Text to token ids, many rows at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

Tokens = NDArray[np.int32]
Mask = NDArray[np.bool_]

_CHUNK = 1024
_TELLING = "Ab é\n\n(don't)"


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


def loses_text(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether ids cannot be read as the text that they are of, as those of most encoders.

    They leave capitals, accents or line breaks out, so that people are to be shown the text itself.
    """
    ids = tokenizer(_TELLING, add_special_tokens=False, verbose=False)["input_ids"]
    return str(tokenizer.decode(ids)) != _TELLING


def with_end(tokenizer: PreTrainedTokenizerBase, text: Text) -> Text:
    """Return a plain text with one end-of-sequence token behind it; others have theirs."""
    end = str(tokenizer.eos_token or "")
    return text if text.complete else text._replace(text=text.text.removesuffix(end) + end)


def tokenize_ended(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text]) -> list[Tokens]:
    """Tokenise, and end plain text with the end-of-sequence token unless it does already."""
    end = tokenizer.eos_token_id
    return [
        ids
        if text.complete or end is None or (len(ids) and ids[-1] == end)
        else np.append(ids, np.int32(end))
        for text, ids in zip(texts, tokenize(tokenizer, texts), strict=True)
    ]


def tokenize_spans(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    spans: Sequence[Sequence[tuple[int, int]]],
) -> list[tuple[Tokens, Mask]]:
    """Tokenise complete texts, and tell which tokens have a character in one of the spans.

    Args:
        tokenizer: A fast one, which knows the characters of its tokens.
        texts: As a chat template renders them.
        spans: Of each text, first character and the one behind the last, in order.

    Raises:
        ValueError: The tokenizer does not know the characters of its tokens.
    """
    if texts and not tokenizer.is_fast:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} does not tell which characters a token has, "
            "which the turns of the assistant are found by: take its fast version, or set "
            "`loss_on` to completion or all"
        )
    found: list[tuple[Tokens, Mask]] = []
    for start in range(0, len(texts), _CHUNK):
        encoded = tokenizer(
            list(texts[start : start + _CHUNK]),
            add_special_tokens=False,
            return_attention_mask=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        columns = zip(
            encoded["input_ids"],
            encoded["offset_mapping"],
            spans[start : start + _CHUNK],
            strict=True,
        )
        for row, offsets, own in columns:
            begins, ends = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
            inside = np.zeros(len(row), dtype=np.bool_)
            for first, last in own:
                inside |= (begins < last) & (ends > first)
            ids = _single_bos(np.asarray(row, dtype=np.int32), tokenizer.bos_token_id)
            found.append((ids, inside[len(inside) - len(ids) :]))
    return found


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
