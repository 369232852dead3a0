"""Text to token ids, many rows at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from lrlhf.models import readers_of, special_tokens

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
        for row, (ids,) in zip(rows, encoded, strict=True):
            tokens[row] = _single_bos(np.asarray(ids, dtype=np.int32), tokenizer.bos_token_id)
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
    encoded = _encode(tokenizer, texts, add_special_tokens=False, return_offsets_mapping=True)
    found: list[tuple[Tokens, Mask]] = []
    for (row, offsets), own in zip(encoded, spans, strict=True):
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
        _encode(tokenizer, ["a"], add_special_tokens=special)[0][0] for special in (False, True)
    )
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return len(full) - start - len(bare)
    raise ValueError(
        f"the tokenizer {tokenizer.name_or_path!r} tokenises the same text differently with and "
        "without special tokens; use another tokenizer"
    )


class _Ends(Protocol):
    @property
    def ends(self) -> tuple[int, ...]: ...


class _Learnt(Protocol):
    @property
    def texts(self) -> Sequence[_Ends]: ...


class Ended(NamedTuple):
    """What is learnt of a text."""

    ids: Tokens
    trained: Mask
    ends: tuple[int, ...]
    """Tokens that end it; none: nothing does."""


class Endings:
    """Has what is learnt of an answer include where generation stops.

    A template may write the end behind what it marks as the assistant's, or have the next turn's
    mark end a turn: then that token is learnt too. A text that ends with an answer and without any
    gets the tokenizer's end-of-sequence token. An answer that ends with another special token, as
    those of base models with a chat template do, keeps it: generation is to stop there.

    Args:
        tokenizer: Of the texts.
        stops: Token ids at which generation stops; none: the tokenizer's end-of-sequence token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Collection[int] = ()) -> None:
        self.tokenizer = tokenizer
        own = tokenizer.eos_token_id
        self._stops = sorted({*stops} if stops or own is None else {own})
        self._end = own if own in self._stops or not self._stops else self._stops[0]
        self._special = {*map(tokenizer.convert_tokens_to_ids, special_tokens(tokenizer))}
        others = (tokenizer.bos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id)
        self._marks = self._special - {*others}
        self._blank: dict[int, bool] = {}

    @property
    def mark(self) -> str:
        """What is put behind a text without an end."""
        return "" if self._end is None else str(self.tokenizer.convert_ids_to_tokens(self._end))

    def learnt(self, ids: Tokens, trained: Mask, *, open_ended: bool) -> Ended:
        """Return a text with what is learnt of it.

        Args:
            ids: Of the text.
            trained: Which of them are learnt so far.
            open_ended: It may need an end.
        """
        trained, found = trained.copy(), set[int]()
        edges = np.flatnonzero(np.diff(trained.astype(np.int8), prepend=0, append=0))
        for first, last in edges.reshape(-1, 2).tolist():
            stops = ids[first:last][np.isin(ids[first:last], self._stops)]
            at = self._skip_blank(ids, last - 1, step=-1)
            behind = self._skip_blank(ids, last, step=1)
            if len(stops):
                found.add(int(stops[-1]))
            elif behind < len(ids) and ids[behind] in self._stops:
                trained[last : behind + 1] = True
                found.add(int(ids[behind]))
            elif at >= first and int(ids[at]) in self._marks:
                found.add(int(ids[at]))
            elif open_ended and behind == len(ids) and self._end is not None:
                trained[last:] = True
                ids, trained = np.append(ids, np.int32(self._end)), np.append(trained, True)
                found.add(self._end)
        return Ended(ids, trained, tuple(sorted(found)))

    @property
    def shown(self) -> str:
        """Where generation stops."""
        tokens = (repr(self.tokenizer.convert_ids_to_tokens(one)) for one in self._stops)
        return ", ".join(tokens) or "there is no such token"

    def notes(self, rows: Sequence[_Learnt]) -> Iterator[str]:
        """Say where what is learnt ends with something else than what stops generation."""
        ends = [text.ends for row in rows for text in row.texts]
        for end in sorted({*chain(*ends)} - {*self._stops}):
            yield (
                f"answers end with {self.tokenizer.convert_ids_to_tokens(end)!r}, and generation "
                f"stops at {self.shown}: SFT and DPO add it to eos_token_id of the model's "
                "generation_config"
            )
        if endless := ends.count(()):
            yield (
                f"in {endless} of {len(ends)} texts nothing is learnt at which generation stops "
                f"({self.shown}): give a chat_template that ends turns with "
                "it, or texts that end with an answer"
            )

    def _skip_blank(self, ids: Tokens, place: int, *, step: int) -> int:
        """Return the first place from one on whose token is more than white space."""
        while 0 <= place < len(ids) and self._is_blank(int(ids[place])):
            place += step
        return place

    def _is_blank(self, token: int) -> bool:
        if token not in self._blank:
            text = str(self.tokenizer.decode([token]))
            self._blank[token] = token not in self._special and not text.strip()
        return self._blank[token]


def common_prefix(first: Tokens, second: Tokens) -> int:
    """Number of leading ids that are equal."""
    shorter = min(len(first), len(second))
    different = np.nonzero(first[:shorter] != second[:shorter])[0]
    return int(different[0]) if len(different) else shorter


def _encode(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], **options: bool
) -> list[tuple[list[Any], ...]]:
    """Return what the tokenizer makes of each text: ids, and offsets where they are wanted."""
    rows: list[tuple[list[Any], ...]] = [()] * len(texts)
    for reader, numbers in readers_of(tokenizer, texts):
        for start in range(0, len(numbers), _CHUNK):
            chosen = numbers[start : start + _CHUNK]
            encoded = reader(
                [texts[number] for number in chosen],
                return_attention_mask=False,
                verbose=False,
                **options,
            )
            columns = [encoded[name] for name in ("input_ids", "offset_mapping") if name in encoded]
            for number, *row in zip(chosen, *columns, strict=True):
                rows[number] = tuple(row)
    return rows


def _single_bos(ids: Tokens, bos: int | None) -> Tokens:
    doubled = bos is not None and len(ids) > 1 and ids[0] == bos and ids[1] == bos
    return ids[1:] if doubled else ids
