"""Responses that are to be scored, as files hold them."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lrlhf.datamodules.loading.files import read_rows_of_file
from lrlhf.datamodules.rows.bad_rows import BadRow

_TEXTS = {"prompt", "messages", "completion", "completions"}


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


def given_responses(path: Path) -> list[GivenResponse]:
    """Read responses from a file of rows (.jsonl, .json, .parquet, .csv, each optionally .gz).

    A row has a ``prompt`` (text or messages) with a ``completion``, or several ``completions``,
    each text or messages; the other columns go to the rewards. Or it is a line of
    ``rollouts.jsonl``.

    Raises:
        ValueError: A row cannot be used, or there is none; names file and row.
    """
    found: list[GivenResponse] = []
    for number, row in enumerate(read_rows_of_file(path), start=1):
        try:
            if isinstance(row, BadRow):
                raise row
            found += _given(row, f"{path.name}:{number}")
        except ValueError as error:
            raise ValueError(f"{path}, row {number}: {error}") from error
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
