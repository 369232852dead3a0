"""Responses as text: for rewards, for logs, for people."""

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
"""What a decoder writes for the first bytes of a letter."""
_LONGEST = 16
"""Tokens that are waited for until a letter is complete; what is longer is none."""


class ResponseView(NamedTuple):
    """A response as everybody reads it who judges, counts, compares or records it."""

    prompt: Prompt
    """That the policy read: of an episode with what its environment showed at the start, of an
    agent the prompt that this asked first."""
    completion: Completion
    """All that followed: text, or the turns of a chat. It knows what of it the policy wrote, says
    each call once, and what a rewritten history repeats once too."""
    text: CompletionText
    """The same as text."""
    token_ids: list[int]
    """That the policy wrote."""


def response_views(
    prompts: PromptBatch, rollout: Rollout, texts: Sequence[CompletionText]
) -> list[ResponseView]:
    """Return what is read of each response.

    Args:
        prompts: The unique prompts.
        rollout: Their responses, rows of one prompt consecutive.
        texts: Of the responses, see `response_texts`.
    """
    num_generations = len(rollout) // len(prompts)
    views = []
    rows = zip(texts, _episodes(rollout), response_ids(rollout, prompts), strict=True)
    for row, (text, episode, token_ids) in enumerate(rows):
        given = prompts.prompts[row // num_generations]
        prompt = given if episode is None else episode.prompt
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

    A response that goes on a text is decoded behind the end of its prompt: decoders of
    SentencePiece drop the space before the first word of what they are given, so that ``2 + 2 =``
    and ``4`` would be put together without the one that the policy wrote. The answer to a chat is
    a turn of its own, and begins a text.

    Episodes tell themselves what was said in which turn. A chat is its contents, a line apart,
    without the marks that the template puts around them. Where the policy ended a turn of a plain
    text with a stop string, this belongs to what is given behind it.

    Args:
        prompts: The unique prompts.
        rollout: Their responses, rows of one prompt consecutive.
        tokenizer: The policy's.
        sampling: How they were sampled.
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
    """Yield the turns of a chat, each with what was given before it."""
    given = ""
    for message in episode.messages:
        if message["role"] != "assistant":
            given += content_text(message.get("content")) + "\n"
            continue
        if message is not episode.messages[0]:
            yield TextSegment("\n" + given, sampled=False)
        yield TextSegment(content_text(message.get("content")), sampled=True)
        given = ""
    if given:
        yield TextSegment("\n" + given.removesuffix("\n"), sampled=False)


def _in_turns(text: CompletionText, episode: Episode) -> Iterator[TextSegment]:
    """Cut a plain text where the turns of its episode begin and end."""
    turns, left = iter(_turns_in_one_go(episode)), ""
    for segment in text.segments:
        if not segment.sampled:
            yield TextSegment(left + segment.text, sampled=False)
            left = ""
            continue
        place = 0
        for turn in next(turns, [segment.text]):
            start = segment.text.find(turn, place)
            if start < 0:  # letters whose bytes are in two turns
                turn, start = segment.text[place:], place
            if start > place:
                yield TextSegment(segment.text[place:start], sampled=False)
            yield TextSegment(turn, sampled=True)
            place = start + len(turn)
        left = segment.text[place:]
    if left:
        yield TextSegment(left, sampled=False)


def _turns_in_one_go(episode: Episode) -> list[list[str]]:
    """Return the turns of a plain text, those together between which nothing was given."""
    given = "\n"
    found: list[list[str]] = []
    for message in episode.messages:
        if message["role"] != "assistant":
            given += content_text(message.get("content"))
            continue
        if given:
            found.append([])
        found[-1].append(content_text(message.get("content")))
        given = ""
    return found


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
    untils = [*accumulate(len(segment.text) for segment in text.segments)]
    place = bisect_left(untils, end)
    origins = [segment.sampled for segment in text.segments]
    if not 0 < end <= len(text):
        raise ValueError(
            f"a reward says that a step ends after {end} characters of a response of "
            f"{len(text)}: {str(text)[:60]!r}"
        )
    if origins[: len(runs)] != [run.sampled for run in runs]:
        # there are turns between which nothing was given
        return _token_at(decoder, ids, Run(runs[0].start, runs[-1].end, sampled=True), end)
    run = runs[min(place, len(runs) - 1)]  # a stop string may stand behind the last one
    if end == untils[place]:
        return run.end - 1
    before = untils[place - 1] if place else 0
    return _token_at(decoder.behind(ids[runs[0].start : run.start]), ids, run, end - before)


def _token_at(decoder: _Decoder, ids: Sequence[int], run: Run, length: int) -> int:
    """Find the token with which a run has so many letters, its last one at most."""

    def complete(column: int) -> int:
        return len(decoder.text(ids[run.start : column + 1]).rstrip(_INCOMPLETE))

    return run.start + bisect_left(range(run.start, run.end - 1), length, key=complete)


def _undecoded(
    prompts: PromptBatch, rollout: Rollout, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[_Decoder, list[int], list[Run]]]:
    """Go through what decodes each response, the tokens of its row, and its segments."""
    num_generations = len(rollout) // len(prompts)
    starts = response_starts(rollout, prompts)
    rows = zip(response_runs(rollout, prompts), _episodes(rollout), strict=True)
    for row, (runs, episode) in enumerate(rows):
        ids = rollout.input_ids[row].tolist()
        prompt = prompts.prompts[row // num_generations] if episode is None else episode.prompt
        goes_on = isinstance(prompt, str)
        context = _end_of(ids[: starts[row]]) if goes_on else []
        apart = episode is not None and not goes_on
        yield _Decoder(tokenizer, context, turns_apart=apart), ids, runs


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
    turns_apart: bool = False
    """Whether each turn begins a text of its own."""

    def behind(self, ids: Sequence[int]) -> _Decoder:
        """Return what decodes that which follows these ids."""
        return self if self.turns_apart else self._replace(context=_end_of([*self.context, *ids]))

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
