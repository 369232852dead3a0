"""Runs the rewards of a config over given responses, and takes the time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from lrlhf.analysis.reward_lab.given import GivenResponse
from lrlhf.analysis.reward_lab.responses import Response, beginning_of, end_of
from lrlhf.rewards import CompletionText, CompletionTurns, Rewards
from lrlhf.rewards.function import TextSegment, content_text


class Timing(NamedTuple):
    """How long one call of a reward function took."""

    part: str
    seconds: float
    responses: int
    """In the call."""
    place: str
    """Of the first of them."""


class ScoredResponses(NamedTuple):
    """What the rewards said, and how long they took."""

    responses: Sequence[Response]
    timings: Sequence[Timing]
    failures: dict[str, int]
    """What went wrong, in a line, and in how many calls."""
    unit: str
    """Of the lengths: ``tokens`` or ``characters``."""


def score_responses(
    given: Sequence[GivenResponse],
    rewards: Rewards,
    tokenizer: PreTrainedTokenizerBase | None,
    prompts_per_call: int = 1,
) -> ScoredResponses:
    """Score responses as a run would, the functions side by side.

    A call holds all responses to so many prompts, as functions may compare the responses to one.

    Args:
        given: Responses; those of a group need not stand together.
        rewards: As a config has them.
        tokenizer: The policy's; makes the token ids of responses that come without. None: lengths
            are in characters unless all have ids.
        prompts_per_call: More make the times of calls those of larger batches.

    Raises:
        RewardError: A function needs a column that is not there, or does not return one value per
            response.
        ValueError: A function reads token ids, and there are none.
    """
    ids = _token_ids(given, tokenizer)
    if ids is None and (asking := rewards.asking_for("completion_ids")):
        raise ValueError(
            f"{', '.join(asking)} reads completion_ids, which the responses lack, and there is no "
            "tokenizer to make them"
        )
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, response in enumerate(given):
        groups[response.group].append(index)
    scored: dict[int, Response] = {}
    timings: list[Timing] = []
    failures: dict[str, int] = defaultdict(int)
    rewards.prepare()
    try:
        for rows in _chunks(list(groups.values()), prompts_per_call):
            own = [given[row] for row in rows]
            result = rewards.score(
                [one.prompt for one in own],
                [_completion(one) for one in own],
                [[] if ids is None else ids[row] for row in rows],
                [one.columns for one in own],
                limited=False,
            )
            for failure in result.failures:
                failures[_in_a_line(failure)] += 1
            for name, seconds in result.seconds.items():
                if not math.isnan(seconds):
                    timings.append(Timing(name, seconds, len(rows), own[0].place))
            scores, values = result.scores.tolist(), result.per_function.tolist()
            for row, one, score, parts in zip(rows, own, scores, values, strict=True):
                scored[row] = Response(
                    place=one.place,
                    group=one.group,
                    step=one.step,
                    prompt=end_of(_text(one.prompt)),
                    completion=beginning_of(one.completion),
                    length=len(one.completion if ids is None else ids[row]),
                    score=score,
                    parts=dict(zip(result.names, parts, strict=True)),
                )
    finally:
        rewards.close()
    ordered = [scored[row] for row in range(len(given))]
    return ScoredResponses(
        ordered, timings, dict(failures), "characters" if ids is None else "tokens"
    )


def _chunks(groups: Sequence[list[int]], size: int) -> Iterator[list[int]]:
    rest = iter(groups)
    while chunk := [row for group in islice(rest, size) for row in group]:
        yield chunk


def _completion(one: GivenResponse) -> CompletionText | CompletionTurns:
    text = CompletionText([TextSegment(one.completion, sampled=True)])
    if isinstance(one.prompt, str) and one.turns is None:
        return text
    return CompletionTurns(text, one.turns)


def _token_ids(
    given: Sequence[GivenResponse], tokenizer: PreTrainedTokenizerBase | None
) -> list[list[int]] | None:
    if tokenizer is None:
        ids = [one.token_ids for one in given]
        return None if any(own is None for own in ids) else [list(own or ()) for own in ids]
    missing = [index for index, one in enumerate(given) if one.token_ids is None]
    made = dict(
        zip(missing, _encoded(tokenizer, [given[k].completion for k in missing]), strict=True)
    )
    return [made.get(index) or list(one.token_ids or ()) for index, one in enumerate(given)]


def _encoded(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    if not texts:
        return []
    encoded: Any = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [list(ids) for ids in encoded]


def _text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{turn.get('role')}: {content_text(turn.get('content'))}" for turn in prompt)


def _in_a_line(failure: str) -> str:
    """Return the name of the function and the last line, which sums up the traceback."""
    name, _, text = failure.partition(": ")
    return f"{name}: {text.splitlines()[-1]}"
