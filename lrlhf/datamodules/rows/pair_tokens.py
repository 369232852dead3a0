"""Tokenising pairs, many at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules.rows.bad_rows import BadRow
from lrlhf.datamodules.rows.collate import Candidate, PairRow
from lrlhf.datamodules.rows.media_rows import Unread
from lrlhf.datamodules.rows.preference_rows import PairDraft, TextPair, TokenPair
from lrlhf.datamodules.rows.tokenizing import Text, Tokens, common_prefix, tokenize

_NOTHING = Text("", complete=True)


def tokenize_pairs(
    tokenizer: PreTrainedTokenizerBase, drafts: Sequence[PairDraft], *, max_tokens: int | None
) -> list[PairRow | BadRow]:
    """Tokenise both candidates of every pair.

    An answer begins where the ids of prompt and answer part from the ids of the prompt alone, so
    that a token which spans both counts as answer.

    Args:
        tokenizer: Of the model that will score the pairs.
        drafts: What was read from the rows.
        max_tokens: Pairs with a longer candidate are bad rows.
    """
    texts = [draft.pair for draft in drafts if isinstance(draft.pair, TextPair)]
    prompts = iter(tokenize(tokenizer, [pair.prompt for pair in texts]))
    first, second = (
        iter(_with_end(tokenizer, [pair.candidates[index] for pair in texts])) for index in (0, 1)
    )
    rows: list[PairRow | BadRow] = []
    for draft in drafts:
        if isinstance(draft.pair, TextPair):
            prompt = next(prompts)
            ids = (next(first), next(second))
            starts = tuple(common_prefix(prompt, candidate) for candidate in ids)
        else:
            one, other = draft.pair.candidates
            ids = (np.asarray(one, np.int32), np.asarray(other, np.int32))
            shared = common_prefix(*ids)
            # where one is the beginning of the other, its last token stands for its answer
            starts = tuple(min(shared, len(candidate) - 1) for candidate in ids)
        rows.append(_row(draft, ids, starts, max_tokens, str(tokenizer.eos_token or "")))
    return rows


def _row(
    draft: PairDraft,
    ids: tuple[Tokens, Tokens],
    starts: Sequence[int],
    max_tokens: int | None,
    end: str,
) -> PairRow | BadRow:
    for name, candidate, start in zip(("first", "second"), ids, starts, strict=True):
        if start >= len(candidate):
            return BadRow("empty text", f"the {name} candidate's answer has no token")
        if max_tokens is not None and len(candidate) > max_tokens:
            return BadRow(
                "too long",
                f"the {name} candidate has {len(candidate)} tokens with its prompt, "
                f"max_tokens={max_tokens}",
                remedy="raise max_tokens",
            )
    return PairRow(
        candidate0=Candidate(ids[0], starts[0], _unread(draft.pair, 0, end)),
        candidate1=Candidate(ids[1], starts[1], _unread(draft.pair, 1, end)),
        labels=draft.labels,
        margin=draft.margin,
        keys=tuple(_digest(key) for key in draft.keys),
        info=draft.info,
    )


def _unread(pair: TextPair | TokenPair, index: int, end: str) -> Unread | None:
    """Keep what a candidate shows, and its text as `_with_end` ends it."""
    if not isinstance(pair, TextPair) or not pair.refs[index]:
        return None
    text = pair.candidates[index]
    if not text.complete:
        text = text._replace(text=text.text.removesuffix(end) + end)
    alone = not pair.prompt.text or len(pair.refs[index]) == len(pair.prompt_refs)
    prompt = None if alone else Unread(pair.prompt, pair.prompt_refs)
    return Unread(text, pair.refs[index], prompt)


def _with_end(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text]) -> list[Tokens]:
    """Tokenise, and end plain text with the end-of-sequence token unless it does already."""
    end = tokenizer.eos_token_id
    return [
        ids
        if text.complete or end is None or (len(ids) and ids[-1] == end)
        else np.append(ids, np.int32(end))
        for text, ids in zip(texts, tokenize(tokenizer, texts), strict=True)
    ]


def _digest(key: str) -> str:
    """Stand for a long text where only equality matters."""
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
