"""Responses with what the rewards said of them, as a run has written them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lrlhf.apps.lab.run_files import RunFiles

_EXCERPT = 300


@dataclass(frozen=True, kw_only=True)
class Response:
    """One response and its values."""

    place: str
    """File and line."""
    group: Hashable
    """Responses to one prompt, of one step, have the same."""
    prompt_key: Hashable
    """Responses to one prompt, of whatever step, have the same: they resemble each other."""
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
    responses = []
    for number, record in enumerate(run.responses(), start=1):
        try:
            responses.append(_of_record(record, f"{path.name}:{number}"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{path}, line {number} is no record of a rollout ({type(error).__name__}: {error})"
            ) from error
    if not responses:
        raise ValueError(f"{path} is empty: there are no responses yet")
    return responses


def _of_record(record: Mapping[str, Any], place: str) -> Response:
    group = (record["step"], record.get("rank", 0), record["group"])
    return Response(
        place=place,
        group=group,
        prompt_key=(record["source"], record.get("row")) if record.get("source") else group,
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
