"""Responses as text: for rewards, for logs, for people."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from lrlhf.rewards import CompletionText, TextSegment
from lrlhf.rollout.responses import Run, response_runs, response_starts
from lrlhf.rollout.sampling import Sampling
from lrlhf.types import PromptBatch, Rollout

_CONTEXT = 8
_INCOMPLETE = "\ufffd"
"""What a decoder writes for the first bytes of a letter."""
_LONGEST = 16
"""Tokens that are waited for until a letter is complete; what is longer is none."""


def response_texts(
    prompts: PromptBatch,
    rollout: Rollout,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
) -> list[CompletionText]:
    """Decode each response, without special tokens and without the stop string that ended it.

    A response that goes on a text is decoded behind the end of its prompt: decoders of
    SentencePiece drop the space before the first word of what they are given, so that ``2 + 2 =``
    and ``4`` would be put together without the one that the policy wrote. The answer to a chat is
    a turn of its own, and begins a text.

    Args:
        prompts: The unique prompts.
        rollout: Their responses, rows of one prompt consecutive.
        tokenizer: The policy's.
        sampling: How they were sampled.
    """
    stops = () if sampling.stop_in_text else sampling.stop
    texts = []
    for row, (decoder, ids, runs) in enumerate(_undecoded(prompts, rollout, tokenizer)):
        ended = bool(stops) and bool(runs) and runs[-1].sampled and not rollout.truncated[row]
        texts.append(_decoded(decoder, ids, runs, stops if ended else ()))
    return texts


def text_ends(
    prompts: PromptBatch,
    rollout: Rollout,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[CompletionText],
    ends: Sequence[Sequence[int]],
) -> list[list[int]]:
    """Find the columns of the tokens that complete parts of the responses.

    Args:
        prompts: The unique prompts.
        rollout: Their responses, rows of one prompt consecutive.
        tokenizer: The policy's.
        texts: Of each response, as `response_texts` decodes it.
        ends: Of each response: numbers of its characters, above 0, that are complete at a token.
            At the end of what the policy wrote in one go that is the last token of it, special ones
            included.
    """
    rows = zip(_undecoded(prompts, rollout, tokenizer), texts, ends, strict=True)
    return [[_end_column(*row, text, end) for end in wanted] for row, text, wanted in rows]


def _end_column(
    decoder: _Decoder, ids: Sequence[int], runs: Sequence[Run], text: CompletionText, end: int
) -> int:
    """Find the token that completes the first ``end`` characters of a response."""
    untils = accumulate(len(segment.text) for segment in text.segments)
    whole = zip(untils, runs, strict=True)
    until, run = next((one for one in whole if 0 < end <= one[0]), (0, None))
    if run is None:
        raise ValueError(
            f"a reward says that a step ends after {end} characters of a response of "
            f"{len(''.join(one.text for one in text.segments))}: {str(text)[:60]!r}"
        )
    if end == until:
        return run.end - 1

    def complete(column: int) -> int:
        return len(decoder.text(ids[runs[0].start : column + 1]).rstrip(_INCOMPLETE))

    return run.start + bisect_left(range(run.start, run.end - 1), end, key=complete)


def _undecoded(
    prompts: PromptBatch, rollout: Rollout, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[_Decoder, list[int], list[Run]]]:
    """Go through what decodes each response, the tokens of its row, and its segments."""
    num_generations = len(rollout) // len(prompts)
    starts = response_starts(rollout, prompts)
    for row, runs in enumerate(response_runs(rollout, prompts)):
        ids = rollout.input_ids[row].tolist()
        goes_on = isinstance(prompts.prompts[row // num_generations], str)
        yield _Decoder(tokenizer, _end_of(ids[: starts[row]]) if goes_on else []), ids, runs


class TurnText(NamedTuple):
    """What the policy wrote in one turn."""

    text: str
    """Without special tokens, and without the stop string that ended it."""
    raw: str
    """With special tokens, which mark the calls of some models."""


def turn_text(
    tokenizer: PreTrainedTokenizerBase,
    before: Sequence[int],
    ids: Sequence[int],
    stops: Sequence[str],
) -> TurnText:
    """Decode a turn of the policy's.

    Args:
        tokenizer: The policy's.
        before: Tokens of the text that it goes on; none where it begins a text of its own.
        ids: Of the turn.
        stops: Strings one of which may have ended it, and is left out; none: it is kept.
    """
    decoder = _Decoder(tokenizer, _end_of(before))
    text = _before_stop(decoder, ids, stops) if stops else decoder.text(ids)
    return TurnText(text, decoder.text(ids, special=True))


def _end_of(ids: Sequence[int]) -> list[int]:
    """Return the last tokens, as many as a decoder may look back at."""
    return list(ids[-_CONTEXT:])


def _decoded(
    decoder: _Decoder, ids: Sequence[int], runs: Sequence[Run], stops: Sequence[str]
) -> CompletionText:
    """Decode the segments of a response, each behind those before it."""
    segments: list[TextSegment] = []
    said = ""
    for run in runs:
        so_far = ids[runs[0].start : run.end]
        last = run is runs[-1]
        text = _before_stop(decoder, so_far, stops) if last and stops else decoder.text(so_far)
        # else the bytes of a letter are in two segments
        behind = text.startswith(said)
        own = text[len(said) :] if behind else decoder.text(ids[run.start : run.end])
        segments.append(TextSegment(own, run.sampled))
        said += own
    return CompletionText(segments)


class _Decoder(NamedTuple):
    """Turns what follows some tokens into text."""

    tokenizer: PreTrainedTokenizerBase
    context: list[int]

    def text(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of ids that follow the context, on request with special tokens."""
        before, whole = (
            str(self.tokenizer.decode(tokens, skip_special_tokens=not special))
            for tokens in (self.context, [*self.context, *ids])
        )
        if whole.startswith(before):
            return whole[len(before) :]
        # the decoder rewrites what came before, such as spaces in front of a full stop
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=not special))


def _before_stop(decoder: _Decoder, ids: Sequence[int], stops: Sequence[str]) -> str:
    """Return the text up to the stop string that the last token completes, if there is one.

    A token may hold more than a piece of the stop string, and the string may be a special token.
    """
    full = decoder.text(ids, special=True)
    earlier = len(decoder.text(ids[:-1], special=True).rstrip(_INCOMPLETE))
    places = [full.find(stop, max(0, earlier - len(stop) + 1)) for stop in stops]
    if max(places) < 0:
        return decoder.text(ids)
    end = min(place for place in places if place >= 0)
    kept, said = len(ids), full
    while len(said) > end or said.endswith(_INCOMPLETE):
        kept -= 1
        said = decoder.text(ids[:kept], special=True)
    return decoder.text(ids[:kept]) + full[len(said) : end]


def token_texts(
    tokenizer: PreTrainedTokenizerBase, before: Sequence[int], ids: Sequence[int]
) -> list[str]:
    """Decode tokens one by one, special ones included.

    The bytes of a letter may be in several tokens: the last of them shows the letter, those before
    it are empty. Joined, the texts are those of all tokens together.

    Args:
        tokenizer: The policy's.
        before: Tokens of the text that they go on.
        ids: The tokens.
    """
    whole = [*before, *ids]
    texts, begin = [], len(before)
    for end in range(begin + 1, len(whole) + 1):
        decoder = _Decoder(tokenizer, whole[max(0, begin - _CONTEXT) : begin])
        text = decoder.text(whole[begin:end], special=True)
        waits = text.endswith(_INCOMPLETE) and end - begin < _LONGEST and end < len(whole)
        texts.append("" if waits else text)
        begin = begin if waits else end
    return texts
