"""Checks of ids, masks and ends, which need a tokenizer but no weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lrlhf.apps.verify.answers import Answer, faults_or
from lrlhf.apps.verify.rollout_rows import Row

_USER, _ASSISTANT = "First question?", "First answer."
_CERTAIN = -0.01
"""Log-probability above which rounding may make it 0."""


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
    closing_ids = _encoded(tokenizer, closing)
    ends = [at for at, token in enumerate(closing_ids) if token in end_ids]
    opening = closing_ids[-1:] and _encoded(tokenizer, before.rpartition(_USER)[2])
    return Template(opening, closing_ids[ends[0] :]) if ends else None


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def expected_mask(
    row: Row,
    template: Template | None,
    end_ids: frozenset[int],
    recomputed: Callable[[Row], Tensor] | None = None,
) -> Tensor | None:
    """Return the tokens that the policy wrote, by whatever the row records of that.

    In this order: what the row says of it; tokens with a sampling log-probability; the turns that
    end as the template ends them; else everything behind the prompt, up to the first end.

    Args:
        row: A response.
        template: Of the turns; None: there is none.
        end_ids: Tokens that end a response.
        recomputed: Computes the log-probabilities of a row: a trained token whose recorded one is 0
            was written by the policy if it is certain. None: it was.

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
        if row.loss_mask is not None:
            written |= row.loss_mask & row.response & ~recorded.isfinite()
        # a token that is certain has 0 as well: between two that were written, or an end behind one
        zero = (recorded == 0) & row.response
        written |= zero & written.roll(1) & (written.roll(-1) | ends)
        doubtful = zero & ~written
        if row.loss_mask is not None and bool((doubtful := doubtful & row.loss_mask).any()):
            certain = doubtful if recomputed is None else recomputed(row) > _CERTAIN
            written |= doubtful & certain
        return written
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
        text = "the file does not record which tokens behind the first end the policy wrote"
        if all(row.loss_mask is None for row in rows):
            text = "the file has no loss mask"
        if all(row.ids is None for row in rows):
            text = "the file has no token ids"
        return [Answer("mask", "unknown", text)]
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
    known = [(row, row.ids) for row in rows if row.ids is not None]
    if not known:
        return [Answer("tokens", "unknown", "the file has texts and no token ids")]
    wrong: dict[str, list[str]] = defaultdict(list)
    before: dict[Hashable, Tensor] = {}
    seams = 0
    for row, tensor in known:
        ids = tensor.tolist()
        faults = [*row.flaws, _prompt_fault(row, ids, tokenizer)]
        spans = [] if row.written is None else _spans(row.written)
        between = [(stop, begin) for (_, stop), (begin, _) in pairwise(spans)]
        seams += len(between)
        faults += [_seam_fault(ids, *seam, template, end_ids) for seam in between if template]
        if isinstance(row.completion, str) and len(spans) == 1:
            faults.append(_text_fault(row, tensor[slice(*spans[0])], tokenizer))
        if row.conversation is not None:
            earlier = before.get(row.conversation, tensor[:0])
            if not torch.equal(tensor[: len(earlier)], earlier):
                faults.append(
                    "a later turn does not begin with the ids of the turns before: the history was "
                    "tokenized again"
                )
            before[row.conversation] = tensor
        for fault in filter(None, faults):
            wrong[fault].append(row.place)
    among = f", {seams:,} places between turns among them" if seams else ""
    text = f"the ids of {len(known):,} responses are in order{among}"
    return faults_or(Answer("tokens", "sound", text), wrong, len(known))


def _text_fault(row: Row, written: Tensor, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Compare the text of a response, with or without its special tokens, with its ids."""
    texts = [
        str(tokenizer.decode(ids, skip_special_tokens=skip)).strip()
        for ids in (written, written[:-1])  # a text may lack the end alone
        for skip in (True, False)
    ]
    text = row.completion.strip()
    # a stop string is in the ids and may be missing in the text
    stopped = row.truncated is False and texts[0].startswith(text)
    known = text in texts or stopped or "\ufffd" in "".join(texts)
    return None if known else "the ids are not those of the recorded text"


def _prompt_fault(row: Row, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str | None:
    if tokenizer.bos_token_id is not None and ids[:2] == [tokenizer.bos_token_id] * 2:
        return "the first token of the text is there twice"
    if not isinstance(row.prompt, list) or not tokenizer.chat_template:
        return None
    try:
        render = partial(tokenizer.apply_chat_template, row.prompt, tokenize=False)
        bare, text = (str(render(add_generation_prompt=add)) for add in (False, True))
    except (TemplateError, TypeError):  # a run may render messages with a template of its own
        return None
    rendered, have = _encoded(tokenizer, text), ids[: row.start]
    if rendered == have:
        return None
    seen = str(tokenizer.decode(have))
    if seen == text:
        return "the ids of the prompt are another tokenization of its text"
    # tools, thinking and dates are options of templates that rows do not record: what the messages
    # hold is there with them as well, once, and something is behind it
    rest, options = seen, seen != bare and (have[:1] != have[1:2] or rendered[:1] == rendered[1:2])
    for message in row.prompt:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            _, there, rest = rest.partition(content.strip())
            options = options and bool(there or not content.strip())
    if options:
        return None
    pairs = enumerate(zip(rendered, have, strict=False))
    at = next((n for n, (a, b) in pairs if a != b), min(len(rendered), len(have)))
    return f"the prompt is not what the chat template writes (first at token {at})"


def _seam_fault(
    ids: list[int], stop: int, begin: int, template: Template, end_ids: frozenset[int]
) -> str | None:
    """Compare the tokens between two turns of the policy with the template's."""
    between, separator, size = ids[stop:begin], template.closing[1:], len(template.opening)
    if template.opening not in [between[at : at + size] for at in range(len(between))]:
        return None  # such as the output of a tool in the middle of a turn
    if ids[stop - 1] not in end_ids:
        if between[0] not in end_ids:
            return "a turn has no end before the next one begins"
        between = between[1:]
    if separator and between[:1] != separator[:1]:
        return "the separator behind a turn is missing"
    return None


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
        tokens = row.ids[row.written if row.written.any() else row.response].tolist()
        if not tokens:
            continue
        known, ended = known + 1, tokens[-1] in end_ids
        if row.truncated is True and ended:
            wrong["responses that end with an end token are marked as truncated"].append(row.place)
        if row.truncated is False and not ended and limit is not None and len(tokens) >= limit:
            wrong["responses that reached the limit are not marked as truncated"].append(row.place)
        if ended or row.truncated is False or row.loss_mask is None:  # a stop string ends one too
            continue
        cut, left_out = cut + 1, not bool(row.loss_mask.any())
        masked += left_out
        if treatment is not None and left_out != (treatment == "mask"):
            seen = "left out of the loss" if left_out else "trained on"
            wrong[f"truncated responses are {seen}, not {treatment}ed"].append(row.place)
    if not known:
        return [Answer("truncated", "unknown", "the file has no token ids of responses")]
    seen = f"; {masked:,} of them are left out of the loss" if cut else ""
    text = f"{cut:,} of {known:,} responses were cut off{seen}"
    figures = {"truncated": cut, "masked": masked}
    return faults_or(Answer("truncated", "sound", text, figures), wrong, known)
