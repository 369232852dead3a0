"""Checks of ids, masks and ends, which need a tokenizer but no weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lrlhf.apps.verify.answers import Answer, faults_or
from lrlhf.apps.verify.rollout_rows import Row

_USER, _ASSISTANT = "First question?", "First answer."


class Template(NamedTuple):
    """What a chat template writes around the policy's turns, in token ids."""

    opening: list[int]
    """Before what the policy writes: the end of its generation prompt."""
    closing: list[int]
    """Behind what the policy writes, up to the next message; begins with the end of the turn."""


def read_template(tokenizer: PreTrainedTokenizerBase, end_ids: frozenset[int]) -> Template | None:
    """Read the ids around a turn off a rendered dialogue; None: there is no template to read."""
    if not tokenizer.chat_template:
        return None
    dialogue = [
        {"role": "user", "content": _USER},
        {"role": "assistant", "content": _ASSISTANT},
        {"role": "user", "content": _USER},
    ]
    text = str(tokenizer.apply_chat_template(dialogue, tokenize=False))
    before, found, behind = text.partition(_ASSISTANT)
    closing, again, _ = behind.partition(_USER)
    if not (found and again):
        return None
    header = before.rpartition(_USER)[2]
    closing_ids = _encoded(tokenizer, closing)
    ends = [at for at, token in enumerate(closing_ids) if token in end_ids]
    opening = closing_ids[-1:] and _encoded(tokenizer, header)
    return Template(opening, closing_ids[ends[0] :]) if ends else None


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def expected_mask(row: Row, template: Template | None, end_ids: frozenset[int]) -> Tensor | None:
    """Return the tokens that the policy wrote, by whatever the row records of that.

    In this order: what the row says of it; tokens with a sampling log-probability; the turns that
    end as the template ends them; else everything behind the prompt, up to the first end.

    Returns:
        `[T]` bool; None: the row has no ids, or tokens between turns that nothing tells apart.
    """
    if row.ids is None:
        return None
    if row.sampled is not None:
        return row.sampled & row.response
    ends = torch.isin(row.ids, torch.tensor(sorted(end_ids)))
    recorded = row.tokens.get("sampling")
    if recorded is not None and recorded[row.response].nan_to_num(0.0).any():
        written = recorded.nan_to_num(0.0) != 0
        # a token that is certain has 0 as well: between two that were written, or an end behind one
        certain = (recorded == 0) & row.response & written.roll(1) & (written.roll(-1) | ends)
        return written | certain
    stops = (ends & row.response).nonzero().flatten().tolist()
    if not stops or stops[0] == len(row.ids) - 1:
        return row.response
    if template is None or not template.opening:
        return None
    mask = torch.zeros(len(row.ids), dtype=torch.bool)
    ids, begin, size = row.ids.tolist(), row.start, len(template.opening)
    while begin < len(ids):
        stop = next((at + 1 for at in stops if at >= begin), len(ids))
        mask[begin:stop] = True
        later = range(stop + size, len(ids) + 1)
        begin = next((at for at in later if ids[at - size : at] == template.opening), len(ids))
    return mask


def check_masks(rows: Sequence[Row]) -> list[Answer]:
    """Compare each loss mask with the sampled tokens, and name the pattern of the difference."""
    known = [
        (row, row.loss_mask, row.written)
        for row in rows
        if row.written is not None and row.loss_mask is not None
    ]
    if not known:
        lacking = "token ids" if all(row.ids is None for row in rows) else "a loss mask"
        return [Answer("mask", "unknown", f"the file has no {lacking}")]
    wrong: dict[str, list[str]] = defaultdict(list)
    for row, mask, written in known:
        # a row that is left out as a whole is the question of truncated responses
        left_out = not mask.any() and row.truncated is not False
        if not left_out and (fault := _mask_fault(row, mask, written)) is not None:
            wrong[fault].append(row.place)
    tokens = sum(int(written.sum()) for *_, written in known)
    text = f"the loss masks of {len(known):,} responses are on their {tokens:,} sampled tokens"
    return faults_or(Answer("mask", "sound", text), wrong, len(known))


def _mask_fault(row: Row, mask: Tensor, expected: Tensor) -> str | None:
    """Name the way in which a mask differs; None: it does not."""
    if torch.equal(mask, expected):
        return None
    for shift, side, end in ((1, "right", 0), (-1, "left", -1)):
        moved = expected.roll(shift)
        moved[end] = False  # what was moved out of the row is lost
        if torch.equal(mask, moved):
            return f"the mask is shifted by one token to the {side}"
    extra, missing = mask & ~expected, expected & ~mask
    if extra[: row.start].any():
        return "prompt tokens are in the mask"
    spans = _spans(expected)
    whole = [number for number, (a, b) in enumerate(spans, 1) if missing[a:b].all()]
    if whole and any(extra[end:begin].any() for (_, end), (begin, _) in pairwise(spans)):
        return "the mask is off by one turn: on tokens between the turns, and not on turns"
    if whole:
        return f"turn {whole[0]} of {len(spans)} is not in the mask"
    if missing.any() and {*missing.nonzero().flatten().tolist()} <= {b - 1 for _, b in spans}:
        return "the last token of the response is not in the mask"
    if extra[spans[-1][1] if spans else 0 :].any():
        return "tokens behind the end of the response are in the mask"
    if extra.any():
        return "tokens that the policy did not write, between its turns, are in the mask"
    return "sampled tokens are not in the mask"


def _spans(mask: Tensor) -> list[tuple[int, int]]:
    """Return the spans ``[start, end)`` of consecutive tokens."""
    edges = torch.diff(mask.int(), prepend=torch.zeros(1), append=torch.zeros(1))
    starts, ends = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def check_tokens(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    template: Template | None,
    end_ids: frozenset[int],
) -> list[Answer]:
    """Look for separators and ends that are missing, and for ids that are not those of the text."""
    known = [row for row in rows if row.ids is not None]
    if not known:
        return [Answer("tokens", "unknown", "the file has texts and no token ids")]
    wrong: dict[str, list[str]] = defaultdict(list)
    seams = 0
    for row in known:
        assert row.ids is not None, "of known rows"
        ids = row.ids.tolist()
        faults = [_prompt_fault(row, ids, tokenizer)]
        faults += [f"ids and log-probabilities are not of the same tokens ({f})" for f in row.flaws]
        spans = [] if row.written is None else _spans(row.written)
        between = [(stop, begin) for (_, stop), (begin, _) in pairwise(spans)]
        seams += len(between)
        faults += [_seam_fault(ids, *seam, template, end_ids) for seam in between if template]
        if isinstance(row.completion, str) and len(spans) == 1:
            written = row.ids[slice(*spans[0])]
            texts = {
                str(tokenizer.decode(written, skip_special_tokens=skip)).strip()
                for skip in (True, False)
            }
            if row.completion.strip() not in texts and "\ufffd" not in "".join(texts):
                faults.append("the ids are not those of the recorded text")
        for fault in filter(None, faults):
            wrong[fault].append(row.place)
    if broken := _broken_histories(known):
        wrong[
            "a later turn does not begin with the ids of the turns before: the history was "
            "tokenized again"
        ] = broken
    among = f", {seams:,} places between turns among them" if seams else ""
    text = f"the ids of {len(known):,} responses are in order{among}"
    return faults_or(Answer("tokens", "sound", text), wrong, len(known))


def _prompt_fault(row: Row, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str | None:
    if tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2:
        return "the first token of the text is there twice"
    if not isinstance(row.prompt, list) or not tokenizer.chat_template:
        return None
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    text = str(tokenizer.apply_chat_template(row.prompt, **options))
    wanted, have = _encoded(tokenizer, text), ids[: row.start]
    if wanted == have:
        return None
    if str(tokenizer.decode(have)) == text:
        return "the ids of the prompt are another tokenization of its text"
    at = next(
        (n for n, pair in enumerate(zip(wanted, have, strict=False)) if pair[0] != pair[1]), 0
    )
    return f"the prompt is not what the chat template writes (first at token {at})"


def _seam_fault(
    ids: list[int], stop: int, begin: int, template: Template, end_ids: frozenset[int]
) -> str | None:
    """Compare the tokens between two turns of the policy with the template's."""
    between, separator = ids[stop:begin], template.closing[1:]
    if ids[stop - 1] not in end_ids:
        if not between or between[0] not in end_ids:
            return "a turn has no end before the next one begins"
        between = between[1:]
    if separator and between[:1] != separator[:1]:
        return "the separator behind a turn is missing"
    return None


def _broken_histories(rows: Sequence[Row]) -> list[str]:
    """Return the rows of a conversation that do not go on from the ids of the row before."""
    turns: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        if row.conversation is not None:
            turns[row.conversation].append(row)
    return [
        later.place
        for own in turns.values()
        for earlier, later in pairwise(own)
        if earlier.ids is not None
        and later.ids is not None
        and not torch.equal(later.ids[: len(earlier.ids)], earlier.ids)
    ]


def check_truncated(
    rows: Sequence[Row], end_ids: frozenset[int], treatment: str | None, limit: int | None
) -> list[Answer]:
    """Check the flag of truncated responses against their last token, and how they are treated.

    Args:
        rows: The rollouts.
        end_ids: Tokens that end a response.
        treatment: ``train``, or ``mask`` (no token of them is trained on); None: it is reported.
        limit: Tokens that a response may have; None: not known.
    """
    wrong: dict[str, list[str]] = defaultdict(list)
    known, cut, masked = 0, 0, 0
    for row in rows:
        if row.ids is None or row.written is None:
            continue
        known += 1
        tokens = row.ids[row.written if row.written.any() else row.response].tolist()
        ended = bool(tokens) and tokens[-1] in end_ids
        if row.truncated is True and ended:
            wrong["responses that end with an end token are marked as truncated"].append(row.place)
        if row.truncated is False and not ended and limit is not None and len(tokens) >= limit:
            wrong["responses that reached the limit are not marked as truncated"].append(row.place)
        if ended or row.loss_mask is None:
            continue
        cut, left_out = cut + 1, not bool(row.loss_mask.any())
        masked += left_out
        if treatment is not None and left_out != (treatment == "mask"):
            seen = "left out of the loss" if left_out else "trained on"
            wrong[f"truncated responses are {seen}, not {treatment}ed"].append(row.place)
    if not known:
        return [Answer("truncated", "unknown", "the file has no token ids")]
    seen = f"; {masked:,} of them are left out of the loss" if cut else ""
    text = f"{cut:,} of {known:,} responses have no end token{seen}"
    figures = {"truncated": cut, "masked": masked}
    return faults_or(Answer("truncated", "sound", text, figures), wrong, known)
