"""Decoding of responses to text, for rewards and logs.

``prompts`` are the unique prompts, ``rollout`` has their responses, rows of one prompt consecutive,
and ``tokenizer`` is the policy's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from lrlhf.rewards import Completion, CompletionText, CompletionTurns, TextSegment
from lrlhf.rewards.function import content_text
from lrlhf.rollout.responses import Run, response_ids, response_runs, response_starts
from lrlhf.rollout.sampling import Sampling
from lrlhf.types import Episode, Prompt, PromptBatch, Rollout

_CONTEXT = 8
_INCOMPLETE = "\ufffd"
"""What a decoder writes for the first bytes of a character."""
_LONGEST = 16
"""Most tokens of one character; longer runs of incomplete bytes are none."""


class ResponseView(NamedTuple):
    """A response as rewards, metrics and records read it."""

    prompt: Prompt
    """The policy's prompt: of an episode with the first observation of its environment, of an
    agent its first prompt."""
    completion: Completion
    """All that followed: text, or the turns of a chat, with the sampled parts marked. Calls, and
    what a rewritten history repeats, are in it once."""
    text: CompletionText
    """The same as text."""
    token_ids: list[int]
    """The sampled tokens."""


def response_views(
    prompts: PromptBatch, rollout: Rollout, texts: Sequence[CompletionText]
) -> list[ResponseView]:
    """Return a view of each response, of which `response_texts` returned the texts."""
    num_generations = len(rollout) // len(prompts)
    views = []
    rows = zip(texts, _episodes(rollout), response_ids(rollout, prompts), strict=True)
    for row, (text, episode, token_ids) in enumerate(rows):
        prompt = prompts.prompts[row // num_generations] if episode is None else episode.prompt
        turns = None if episode is None else episode.completion
        completion = text if isinstance(prompt, str) else CompletionTurns(text, turns)
        views.append(ResponseView(prompt, completion, text, token_ids))
    return views


def _episodes(rollout: Rollout) -> Sequence[Episode | None]:
    return rollout.episodes or (None,) * len(rollout)


def response_texts(
    prompts: PromptBatch,
    rollout: Rollout,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
) -> list[CompletionText]:
    """Decode each response, without special tokens and without the stop string that ended it.

    The continuation of a text is decoded behind the end of its prompt: SentencePiece decoders drop
    the space before the first word, so that ``2 + 2 =`` and ``4`` would be joined without the space
    that the policy sampled. The answer to a chat is a turn of its own, and begins a text.

    Turns of episodes come from their messages. A chat is the contents of its messages, separated by
    newlines, without the template's markup. The stop string of a turn of a plain text belongs to
    the observation behind it.
    """
    stops = () if sampling.stop_in_text else sampling.stop
    texts = []
    rows = zip(_undecoded(prompts, rollout, tokenizer), _episodes(rollout), strict=True)
    for row, ((decoder, ids, runs), episode) in enumerate(rows):
        if episode is not None and not isinstance(episode.prompt, str):
            texts.append(CompletionText(_contents(episode)))
            continue
        ended = bool(stops) and bool(runs) and runs[-1].sampled and not rollout.truncated[row]
        text = _decoded(decoder, ids, runs, stops if ended else ())
        texts.append(text if episode is None else CompletionText(_in_turns(text, episode)))
    return texts


def _contents(episode: Episode) -> Iterator[TextSegment]:
    """Yield the turns of a chat, each after the observations before it."""
    observed = ""
    for message in episode.messages:
        if message["role"] != "assistant":
            observed += content_text(message.get("content")) + "\n"
            continue
        if message is not episode.messages[0]:
            yield TextSegment("\n" + observed, sampled=False)
        yield TextSegment(content_text(message.get("content")), sampled=True)
        observed = ""
    if observed:
        yield TextSegment("\n" + observed.removesuffix("\n"), sampled=False)


def _in_turns(text: CompletionText, episode: Episode) -> Iterator[TextSegment]:
    """Divide a plain text at the beginnings and ends of the turns of its episode."""
    observed, groups = "\n", list[list[str]]()
    for message in episode.messages:
        content = content_text(message.get("content"))
        if message["role"] != "assistant":
            observed += content
            continue
        if observed:  # else the turns follow each other in one segment
            groups.append([])
        groups[-1].append(content)
        observed = ""
    turns, remaining = iter(groups), ""
    for segment in text.segments:
        if not segment.sampled:
            yield TextSegment(remaining + segment.text, sampled=False)
            remaining = ""
            continue
        position = 0
        for turn in next(turns, [segment.text]):
            start = segment.text.find(turn, position)
            if start < 0:  # characters whose bytes are in two turns
                turn, start = segment.text[position:], position
            if start > position:
                yield TextSegment(segment.text[position:start], sampled=False)
            yield TextSegment(turn, sampled=True)
            position = start + len(turn)
        remaining = segment.text[position:]
    if remaining:
        yield TextSegment(remaining, sampled=False)


def text_ends(
    prompts: PromptBatch,
    rollout: Rollout,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[CompletionText],
    ends: Sequence[Sequence[int]],
) -> list[list[int]]:
    """Return the columns of the tokens that complete the first characters of the responses.

    ``texts`` are those of `response_texts`, and ``ends`` the numbers of characters of each
    response, above 0. The end of a sampled segment is its last token, special ones included.

    Raises:
        ValueError: A number is 0, or larger than the text.
    """
    rows = zip(_undecoded(prompts, rollout, tokenizer), texts, ends, strict=True)
    return [[_end_column(*row, text, end) for end in own] for row, text, own in rows]


def _end_column(
    decoder: _Decoder, ids: Sequence[int], runs: Sequence[Run], text: CompletionText, end: int
) -> int:
    """Return the column of the token that completes the first ``end`` characters."""
    if not 0 < end <= len(text):
        raise ValueError(
            f"a reward says that a step ends after {end} characters of a response of "
            f"{len(text)}: {str(text)[:60]!r}"
        )
    bounds = [*accumulate(len(segment.text) for segment in text.segments)]
    index = bisect_left(bounds, end)
    origins = [segment.sampled for segment in text.segments]
    if origins[: len(runs)] != [run.sampled for run in runs]:  # turns without text in between
        run, length = Run(runs[0].start, runs[-1].end, sampled=True), end
    else:
        run = runs[min(index, len(runs) - 1)]  # a stop string may be behind the last one
        if end == bounds[index]:
            return run.end - 1
        length = end - (bounds[index - 1] if index else 0)
        decoder = decoder.behind(ids[runs[0].start : run.start])

    def complete(column: int) -> int:
        return len(decoder.text(ids[run.start : column + 1]).rstrip(_INCOMPLETE))

    return run.start + bisect_left(range(run.start, run.end - 1), length, key=complete)


def _undecoded(
    prompts: PromptBatch, rollout: Rollout, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[_Decoder, list[int], list[Run]]]:
    """Yield the decoder of each response, the tokens of its row, and its runs."""
    num_generations = len(rollout) // len(prompts)
    starts = response_starts(rollout, prompts)
    rows = zip(response_runs(rollout, prompts), _episodes(rollout), strict=True)
    for row, (runs, episode) in enumerate(rows):
        ids = rollout.input_ids[row].tolist()
        prompt = prompts.prompts[row // num_generations] if episode is None else episode.prompt
        continues = isinstance(prompt, str)
        context = ids[: starts[row]][-_CONTEXT:] if continues else []
        apart = episode is not None and not continues
        yield _Decoder(tokenizer, context, turns_apart=apart), ids, runs


class TurnText(NamedTuple):
    """The text of one turn of the policy."""

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
    """Decode a turn that continues the tokens ``before``, without a stop string at its end."""
    decoder = _Decoder(tokenizer, list(before[-_CONTEXT:]))
    text = _before_stop(decoder, ids, stops) if stops else decoder.text(ids)
    return TurnText(text, decoder.text(ids, special=True))


def _decoded(
    decoder: _Decoder, ids: Sequence[int], runs: Sequence[Run], stops: Sequence[str]
) -> CompletionText:
    """Decode the segments of a response, each behind those before it."""
    segments: list[TextSegment] = []
    before = ""
    for run in runs:
        so_far = ids[runs[0].start : run.end]
        last = run is runs[-1]
        text = _before_stop(decoder, so_far, stops) if last and stops else decoder.text(so_far)
        # else the bytes of a character are in two segments
        behind = text.startswith(before)
        own = text[len(before) :] if behind else decoder.text(ids[run.start : run.end])
        segments.append(TextSegment(own, run.sampled))
        before += own
    return CompletionText(segments)


class _Decoder(NamedTuple):
    """Decodes tokens that follow a context."""

    tokenizer: PreTrainedTokenizerBase
    context: list[int]
    turns_apart: bool = False
    """Whether each turn begins a text of its own."""

    def behind(self, ids: Sequence[int]) -> _Decoder:
        """Return the decoder of tokens that follow ``ids``."""
        if self.turns_apart:
            return self
        return self._replace(context=[*self.context, *ids][-_CONTEXT:])

    def text(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of ids that follow the context, on request with special tokens."""
        before, both = (
            str(self.tokenizer.decode(tokens, skip_special_tokens=not special))
            for tokens in (self.context, [*self.context, *ids])
        )
        if both.startswith(before):
            return both[len(before) :]
        # the decoder rewrites the text before, such as spaces in front of a full stop
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=not special))


def _before_stop(decoder: _Decoder, ids: Sequence[int], stops: Sequence[str]) -> str:
    """Return the text up to the stop string that the last token completes, if there is one.

    A token may have more text than a part of the stop string, and the string may be a special
    token.
    """
    full = decoder.text(ids, special=True)
    earlier = len(decoder.text(ids[:-1], special=True).rstrip(_INCOMPLETE))
    positions = [full.find(stop, max(0, earlier - len(stop) + 1)) for stop in stops]
    if max(positions) < 0:
        return decoder.text(ids)
    end = min(position for position in positions if position >= 0)
    count, text = len(ids), full
    while len(text) > end or text.endswith(_INCOMPLETE):
        count -= 1
        text = decoder.text(ids[:count], special=True)
    return decoder.text(ids[:count]) + full[len(text) : end]


def token_texts(
    tokenizer: PreTrainedTokenizerBase, before: Sequence[int], ids: Sequence[int]
) -> list[str]:
    """Decode tokens one by one, special ones included.

    Of a character with bytes in several tokens, the last has the text and the others are empty.
    Joined, the texts are those of all tokens together, which continue the tokens ``before``.
    """
    tokens = [*before, *ids]
    texts, begin = [], len(before)
    for end in range(begin + 1, len(tokens) + 1):
        decoder = _Decoder(tokenizer, tokens[max(0, begin - _CONTEXT) : begin])
        text = decoder.text(tokens[begin:end], special=True)
        partial = text.endswith(_INCOMPLETE) and end - begin < _LONGEST and end < len(tokens)
        texts.append("" if partial else text)
        begin = begin if partial else end
    return texts
