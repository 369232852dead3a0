"""Runs the rewards of a config over given responses, and takes the time."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from lrlhf.apps.lab.reward_lab.lab import CallTimes, Lab, OddRow, Response, beginning_of, end_of
from lrlhf.apps.lab.reward_lab.response_inputs import ResponseInput, read_media
from lrlhf.datamodules.rows.media_rows import MediaReader
from lrlhf.media import MediaOptions
from lrlhf.rewards import CompletionText, CompletionTurns, Rewards
from lrlhf.rewards.function import content_text


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


def reads_media(rewards: Rewards) -> bool:
    """Whether a reward function asks for what prompts show."""
    return any(map(rewards.asking_for, ("images", "videos", "audios")))


def score_responses(
    inputs: Sequence[ResponseInput],
    rewards: Rewards,
    tokenizer: PreTrainedTokenizerBase | None,
    prompts_per_call: int = 1,
    *,
    max_steps: int | None = None,
    media: MediaReader = MediaReader(),  # noqa: B008  frozen
) -> ScoredResponses:
    """Score responses as a run would, the functions side by side.

    A call holds all responses to so many prompts, as functions may compare the responses to one.
    Prompts are the same if text, images, and the columns that the functions name are. Functions
    also have the columns of a run: ``step`` (0 where none is given), ``max_steps``, ``truncated``
    (false of responses that no run has written), and with a vision-language policy ``images`` and
    ``videos``. A column that only some rows have is None in the others.

    Args:
        inputs: Responses; those of a group need not stand together.
        rewards: As a config has them.
        tokenizer: The policy's; makes the token ids of responses that come without. None: lengths
            are in characters unless all have ids.
        prompts_per_call: More make the times of calls those of larger batches.
        max_steps: Last step of the run; None: it has no end.
        media: As of `read_response_inputs`; reads what prompts show, where a function asks for it.

    Raises:
        RewardError: A function needs a column that is not there, or does not return one value per
            response.
        ValueError: A function reads token ids, and there are none, or an image is broken.
    """
    ids = _token_ids(inputs, tokenizer)
    if ids is None and (asking := rewards.asking_for("completion_ids")):
        raise ValueError(
            f"{', '.join(asking)} reads completion_ids, which the responses lack, and there is no "
            "tokenizer to make them"
        )
    names = dict.fromkeys(name for item in inputs for name in item.columns)
    judge_columns = {*rewards.answer_columns, *filter(rewards.asking_for, names)}
    keys = [_column_key(each, judge_columns) for each in inputs]
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, response in enumerate(inputs):
        groups[response.group, keys[index]].append(index)
    shows = media.options if media.processor is not None and reads_media(rewards) else None
    scored: dict[int, Response] = {}
    timings: list[Timing] = []
    failures: dict[str, int] = defaultdict(int)
    rewards.prepare()
    try:
        for rows in _chunks(list(groups.values()), prompts_per_call):
            own = [inputs[row] for row in rows]
            result = rewards.score(
                [one.prompt for one in own],
                [_completion(one) for one in own],
                [[] if ids is None else ids[row] for row in rows],
                _columns(own, names, max_steps, shows),
                limited=False,
                group_ids=[(inputs[row].group, keys[row]) for row in rows],
            )
            for failure in result.failures:
                failures[_failure_summary(failure)] += 1
            for name, seconds in result.seconds.items():
                if not math.isnan(seconds):
                    timings.append(Timing(name, seconds, len(rows), own[0].place))
            scores, values = result.scores.tolist(), result.per_function.tolist()
            for row, one, score, parts in zip(rows, own, scores, values, strict=True):
                scored[row] = Response(
                    place=one.place,
                    group=(one.group, keys[row]),
                    prompt_key=(one.prompt_key, keys[row]),
                    step=one.step,
                    prompt=end_of(_text(one.prompt)),
                    completion=beginning_of(one.completion),
                    length=len(one.completion if ids is None else ids[row]),
                    score=score,
                    parts=dict(zip(result.names, parts, strict=True)),
                )
    finally:
        rewards.close()
    ordered = [scored[row] for row in range(len(inputs))]
    return ScoredResponses(
        ordered, timings, dict(failures), "characters" if ids is None else "tokens"
    )


def _column_key(one: ResponseInput, names: Collection[str]) -> str:
    """Return what is equal for responses to one prompt: what they are judged by."""
    values = {name: one.columns.get(name) for name in sorted(names)}
    return json.dumps(values, default=str, sort_keys=True)


def _columns(
    inputs: Sequence[ResponseInput],
    names: Mapping[str, None],
    max_steps: int | None,
    shows: MediaOptions | None,
) -> list[Mapping[str, Any]]:
    """Return the columns of responses as a run's collector makes them.

    Args:
        inputs: Of one call.
        names: Every column that any response has.
        max_steps: See `score_responses`.
        shows: How images and videos are read; None: nobody asks for them.
    """
    read: dict[str, dict[str, list[Any]]] = {}
    columns: list[Mapping[str, Any]] = []
    for response in inputs:
        progress = {
            "step": response.step or 0,
            "max_steps": max_steps,
            "truncated": response.truncated,
        }
        key = response.refs.key
        if shows is not None and key not in read:
            read[key] = read_media(response.refs, shows)
        columns.append({**names, **progress, **response.columns, **read.get(key, {})})
    return columns


def _chunks(groups: Sequence[list[int]], size: int) -> Iterator[list[int]]:
    rest = iter(groups)
    while chunk := [row for group in islice(rest, size) for row in group]:
        yield chunk


def _completion(one: ResponseInput) -> CompletionText | CompletionTurns:
    text = CompletionText(one.segments)
    if isinstance(one.prompt, str) and one.turns is None:
        return text
    return CompletionTurns(text, one.turns)


def _token_ids(
    inputs: Sequence[ResponseInput], tokenizer: PreTrainedTokenizerBase | None
) -> list[list[int]] | None:
    if tokenizer is None:
        ids = [response.token_ids for response in inputs]
        return None if any(own is None for own in ids) else [list(own or ()) for own in ids]
    missing = [index for index, one in enumerate(inputs) if one.token_ids is None]
    made = dict(
        zip(missing, _encoded(tokenizer, [inputs[k].completion for k in missing]), strict=True)
    )
    return [made.get(index) or list(one.token_ids or ()) for index, one in enumerate(inputs)]


def _encoded(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    if not texts:
        return []
    encoded: Any = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [list(ids) for ids in encoded]


def _text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{turn.get('role')}: {content_text(turn.get('content'))}" for turn in prompt)


def _failure_summary(failure: str) -> str:
    """Return the name of the function and the last line, which sums up the traceback."""
    name, _, text = failure.partition(": ")
    return f"{name}: {text.splitlines()[-1]}"


_SLOWEST = 20


def with_times(lab: Lab, scored: ScoredResponses) -> Lab:
    """Return the lab with the times and failures of its calls."""
    by_part: dict[str, list[Timing]] = defaultdict(list)
    for timing in scored.timings:
        by_part[timing.part].append(timing)
    first: Mapping[str, Response] = {
        response.place: response for response in reversed(scored.responses)
    }
    slowest = sorted(scored.timings, key=lambda item: -item.seconds / item.responses)[:_SLOWEST]
    return replace(
        lab,
        times=[_times(name, timings) for name, timings in by_part.items()],
        slowest=[
            OddRow(
                first[each.place],
                each.seconds / each.responses,
                f"{each.part}: {each.seconds:.3g} s for {each.responses} responses",
            )
            for each in slowest
        ],
        failures=scored.failures,
    )


def _times(name: str, timings: Sequence[Timing]) -> CallTimes:
    seconds = np.array([timing.seconds for timing in timings])
    each = seconds / np.array([item.responses for item in timings])
    quantiles = [float(np.quantile(own, at)) for own in (seconds, each) for at in (0.5, 0.99)]
    return CallTimes(name, len(timings), *quantiles)
