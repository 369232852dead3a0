"""Checks of ids, masks and ends, which need a tokenizer but no weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lrlhf.apps.verify.answers import Answer
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
    recorded = row.tokens.get("sampling")
    if recorded is not None and bool((recorded[row.response].nan_to_num(0.0) != 0).any()):
        written = recorded.nan_to_num(0.0) != 0
        # a token that is certain has 0 as well: fill it where both neighbours were written
        certain = (recorded == 0) & row.response & written.roll(1) & written.roll(-1)
        # and an end that is certain, behind what was written
        ends = torch.isin(row.ids, torch.tensor(sorted(end_ids)))
        certain |= (recorded == 0) & row.response & written.roll(1) & ends
        return written | certain
    inside = row.ids[row.start :]
    ends_at = torch.isin(inside, torch.tensor(sorted(end_ids))).nonzero().flatten().tolist()
    mask = torch.zeros(len(row.ids), dtype=torch.bool)
    if not ends_at or ends_at[0] == len(inside) - 1:
        mask[row.start :] = True
        return mask
    if template is None or not template.opening:
        return None
    ids, begin = row.ids.tolist(), row.start
    while begin < len(ids):
        stop = next((row.start + at for at in ends_at if row.start + at >= begin), len(ids) - 1)
        mask[begin : stop + 1] = True
        size = len(template.opening)
        begin = next(
            (
                at
                for at in range(stop + 1 + size, len(ids) + 1)
                if ids[at - size : at] == template.opening
            ),
            len(ids),
        )
    return mask


def check_masks(rows: Sequence[Row], masks: Sequence[Tensor | None]) -> list[Answer]:
    """Compare each loss mask with the sampled tokens, and name the pattern of the difference."""
    known = [
        (row, mask)
        for row, mask in zip(rows, masks, strict=True)
        if mask is not None and row.loss_mask is not None
    ]
    if not known:
        lacking = "token ids" if all(row.ids is None for row in rows) else "a loss mask"
        return [Answer("mask", "unknown", f"the file has no {lacking}")]
    wrong: dict[str, list[str]] = defaultdict(list)
    for row, mask in known:
        assert row.loss_mask is not None, "of known rows"
        if not row.loss_mask.any() and row.truncated is not False:
            continue  # left out as a whole: the question of truncated responses
        if (fault := _mask_fault(row, row.loss_mask, mask)) is not None:
            wrong[fault].append(row.place)
    if not wrong:
        tokens = sum(int(mask.sum()) for _, mask in known)
        text = f"the loss masks of {len(known):,} responses are on their {tokens:,} sampled tokens"
        return [Answer("mask", "sound", text)]
    return [
        Answer("mask", "fault", f"{name}: {len(places):,} of {len(known):,} responses", {}, places)
        for name, places in wrong.items()
    ]


def _mask_fault(  # noqa: C901  one pattern after the other
    row: Row, mask: Tensor, expected: Tensor
) -> str | None:
    """Name the way in which a mask differs; None: it does not."""
    if torch.equal(mask, expected):
        return None
    for shift, name in ((1, "right"), (-1, "left")):
        moved = expected.roll(shift)
        # what was moved out of the row is lost
        moved[0 if shift == 1 else -1] = False
        if torch.equal(mask, moved):
            return f"the mask is shifted by one token to the {name}"
    extra, missing = mask & ~expected, expected & ~mask
    if bool(extra[: row.start].any()):
        return "prompt tokens are in the mask"
    runs = _runs(expected)
    given = [(end, begin) for (_, end), (begin, _) in pairwise(runs)]
    if runs and bool(missing.any()):
        whole = [number for number, (a, b) in enumerate(runs, 1) if bool(missing[a:b].all())]
        if whole and any(bool(extra[a:b].any()) for a, b in given):
            return "the mask is off by one turn: on tokens between the turns, and not on turns"
        if whole:
            return f"turn {whole[0]} of {len(runs)} is not in the mask"
        if all(set(range(a, b)) & _places(missing) <= {b - 1} for a, b in runs):
            return "the last token of the response is not in the mask"
    if bool(extra.any()):
        last = runs[-1][1] if runs else 0
        if bool(extra[last:].any()):
            return "tokens behind the end of the response are in the mask"
        return "tokens that the policy did not write, between its turns, are in the mask"
    return "sampled tokens are not in the mask"


def _places(mask: Tensor) -> set[int]:
    return set(mask.nonzero().flatten().tolist())


def _runs(mask: Tensor) -> list[tuple[int, int]]:
    """Return the spans ``[start, end)`` of consecutive tokens."""
    edges = torch.diff(mask.int(), prepend=torch.zeros(1), append=torch.zeros(1))
    starts, ends = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def check_tokens(  # noqa: C901  one fault after the other
    rows: Sequence[Row],
    masks: Sequence[Tensor | None],
    tokenizer: PreTrainedTokenizerBase,
    template: Template | None,
    end_ids: frozenset[int],
) -> list[Answer]:
    """Look for separators and ends that are missing, and for ids that are not those of the text."""
    wrong: dict[str, list[str]] = defaultdict(list)
    known = [(row, mask) for row, mask in zip(rows, masks, strict=True) if row.ids is not None]
    if not known:
        return [Answer("tokens", "unknown", "the file has texts and no token ids")]
    for row, mask in known:
        assert row.ids is not None, "of known rows"
        ids = row.ids.tolist()
        for flaw in row.flaws:
            wrong[f"ids and log-probabilities are not of the same tokens ({flaw})"].append(
                row.place
            )
        if (fault := _prompt_fault(row, ids, tokenizer)) is not None:
            wrong[fault].append(row.place)
        if mask is None:
            continue
        spans = _runs(mask)
        for (_, stop), (begin, _) in pairwise(spans):
            if template is not None and (fault := _seam_fault(ids, stop, begin, template, end_ids)):
                wrong[fault].append(row.place)
        if isinstance(row.completion, str) and len(spans) == 1:
            texts = {
                str(tokenizer.decode(row.ids[mask], skip_special_tokens=skip)).strip()
                for skip in (True, False)
            }
            if row.completion.strip() not in texts and "\ufffd" not in "".join(texts):
                wrong["the ids are not those of the recorded text"].append(row.place)
    for place in _broken_histories([row for row, _ in known]):
        wrong[
            "a later turn does not begin with the ids of the turns before: the history was "
            "tokenized again"
        ].append(place)
    if wrong:
        return [
            Answer("tokens", "fault", f"{name}: {len({*places}):,} responses", {}, places)
            for name, places in wrong.items()
        ]
    seams = sum(max(0, len(_runs(mask)) - 1) for _, mask in known if mask is not None)
    between = f", {seams:,} places between turns among them" if seams else ""
    return [Answer("tokens", "sound", f"the ids of {len(known):,} responses are in order{between}")]


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
    closed = ids[stop - 1] in end_ids
    between = ids[stop:begin]
    separator = template.closing[1:]
    if not closed:
        if not between or between[0] not in end_ids:
            return "a turn has no end before the next one begins"
        between = between[1:]
    # roles follow the separator, and differ
    marks = separator[: max(1, len(separator) - 1)] if separator else []
    common = next(
        (n for n, pair in enumerate(zip(marks, between, strict=False)) if pair[0] != pair[1]), None
    )
    if marks and (common == 0 or not between):
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
    rows: Sequence[Row],
    masks: Sequence[Tensor | None],
    end_ids: frozenset[int],
    treatment: str | None,
    limit: int | None,
) -> list[Answer]:
    """Check the flag of truncated responses against their last token, and how they are treated.

    Args:
        rows: The rollouts.
        masks: Their sampled tokens.
        end_ids: Tokens that end a response.
        treatment: ``train``, or ``mask`` (no token of them is trained on); None: it is reported.
        limit: Tokens that a response may have; None: not known.
    """
    known = [
        (r, m) for r, m in zip(rows, masks, strict=True) if r.ids is not None and m is not None
    ]
    if not known:
        return [Answer("truncated", "unknown", "the file has no token ids")]
    wrong: dict[str, list[str]] = defaultdict(list)
    cut, masked = 0, 0
    for row, mask in known:
        assert row.ids is not None, "of known rows"
        written = row.ids[mask].tolist() or row.ids[row.start :].tolist()
        ended = bool(written) and written[-1] in end_ids
        if row.truncated is True and ended:
            wrong["responses that end with an end token are marked as truncated"].append(row.place)
        if row.truncated is False and not ended and limit is not None and len(written) >= limit:
            wrong["responses that reached the limit are not marked as truncated"].append(row.place)
        if ended or row.loss_mask is None:
            continue
        cut, left_out = cut + 1, not bool(row.loss_mask.any())
        masked += left_out
        if treatment is not None and left_out != (treatment == "mask"):
            seen = "left out of the loss" if left_out else "trained on"
            wrong[f"truncated responses are {seen}, not {treatment}ed"].append(row.place)
    if wrong:
        return [
            Answer("truncated", "fault", f"{name}: {len(places):,}", {}, places)
            for name, places in wrong.items()
        ]
    seen = f"; {masked:,} of them are left out of the loss" if cut else ""
    text = f"{cut:,} of {len(known):,} responses have no end token{seen}"
    return [Answer("truncated", "sound", text, {"truncated": cut, "masked": masked})]
