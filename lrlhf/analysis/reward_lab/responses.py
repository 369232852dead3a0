"""Responses with what the rewards said of them, as a run has written them or as read anew."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lrlhf.analysis.run_files import RunFiles, records

_EXCERPT = 300
_TEXTS = {"prompt", "messages", "completion", "completions"}


@dataclass(frozen=True, kw_only=True)
class Response:
    """One response and its values."""

    place: str
    """File and line."""
    group: Hashable
    """Responses to one prompt, of one step, have the same."""
    step: int | None
    prompt: str
    """The end of it."""
    completion: str
    """The beginning of it."""
    length: int
    """In the unit of the `Lab`."""
    score: float
    """NaN: none."""
    parts: Mapping[str, float]
    """What each reward function returned; NaN: nothing."""


@dataclass(frozen=True, kw_only=True)
class GivenResponse:
    """One response that is to be scored."""

    place: str
    group: Hashable
    step: int | None
    prompt: str | tuple[Mapping[str, Any], ...]
    completion: str
    turns: Sequence[Mapping[str, Any]] | None
    """Of a completion that is a chat; None: it is text."""
    token_ids: Sequence[int] | None
    columns: Mapping[str, Any]


def responses_of_run(folder: str | Path) -> list[Response]:
    """Read the responses of a run.

    Raises:
        FileNotFoundError: There is no such folder, or it has no ``rollouts.jsonl``.
        ValueError: A line is no record of a rollout; names file and line.
    """
    run = RunFiles(folder)
    path = run.folder / "rollouts.jsonl"
    if not path.exists():
        raise FileNotFoundError(
            f"{folder} has no rollouts.jsonl: the run has the callback RolloutLog switched off, or "
            "trains no policy"
        )
    found = []
    for number, record in enumerate(run.responses(), start=1):
        try:
            found.append(_of_record(record, f"{path.name}:{number}"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number} is no record of a rollout ({type(error).__name__}: {error})"
            ) from error
    if not found:
        raise ValueError(f"{path} is empty: there are no responses yet")
    return found


def _of_record(record: Mapping[str, Any], place: str) -> Response:
    return Response(
        place=place,
        group=(record["step"], record.get("rank", 0), record["group"]),
        step=int(record["step"]),
        prompt=end_of(str(record["prompt"])),
        completion=beginning_of(str(record["completion"])),
        length=int(record["length"]),
        score=_number(record["score"]),
        parts={str(name): _number(value) for name, value in record["rewards"].items()},
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def end_of(text: str) -> str:
    """Return the end of a prompt, which is where the question is."""
    return text if len(text) <= _EXCERPT else f"…{text[-_EXCERPT:]}"


def beginning_of(text: str) -> str:
    """Return the beginning of a completion."""
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}…"


def given_responses(path: Path) -> list[GivenResponse]:
    """Read responses from JSON lines.

    A line has a ``prompt`` (text or messages) with a ``completion``, or several ``completions``,
    each text or messages; the other columns go to the rewards. Or it is a line of
    ``rollouts.jsonl``.

    Raises:
        ValueError: A line cannot be used, or there is none; names file and line.
    """
    found: list[GivenResponse] = []
    for number, record in enumerate(records(path), start=1):
        place = f"{path.name}:{number}"
        try:
            found += _given(record, place)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not found:
        raise ValueError(f"{path} holds no responses")
    return found


def _given(record: Mapping[str, Any], place: str) -> Iterable[GivenResponse]:
    several = record.get("completions")
    completions = [record.get("completion")] if several is None else several
    if not isinstance(completions, list) or completions == [None]:
        near = ", ".join(sorted(record)) or "none"
        raise ValueError(f"there is no column completion or completions (columns: {near})")
    prompt = record.get("messages", record.get("prompt"))
    if isinstance(prompt, list):
        prompt = tuple(prompt)
    elif not isinstance(prompt, str):
        raise ValueError(f"prompt is {prompt!r:.40}; give text or a list of messages")
    of_run = isinstance(record.get("columns"), Mapping) and isinstance(
        record.get("rewards"), Mapping
    )
    if of_run:
        columns, turns = record["columns"], record.get("episode")
        group: Hashable = (record.get("step"), record.get("rank", 0), record.get("group"))
    else:
        columns = {name: value for name, value in record.items() if name not in _TEXTS}
        turns, group = None, json.dumps(prompt, sort_keys=True, default=str)
    for completion in completions:
        own = completion if isinstance(completion, list) else turns
        if not isinstance(completion, str | list):
            raise ValueError(f"completion is {completion!r:.40}; give text or a list of messages")
        yield GivenResponse(
            place=place,
            group=group,
            step=record.get("step") if of_run else None,
            prompt=prompt,
            completion=completion if isinstance(completion, str) else _said(completion),
            turns=own,
            token_ids=record.get("token_ids") if several is None else None,
            columns=columns,
        )


def _said(turns: Sequence[Any]) -> str:
    bad = next(
        (turn for turn in turns if not isinstance(turn, Mapping) or "role" not in turn), None
    )
    if bad is not None:
        raise ValueError(f"completion has a turn without role: {bad!r:.40}")
    contents = (turn.get("content") for turn in turns if turn["role"] == "assistant")
    return "\n".join(content for content in contents if isinstance(content, str))
