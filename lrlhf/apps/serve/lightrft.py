"""LightRFT's protocol, ``POST /get_reward``: whole texts in, numbers out."""

from __future__ import annotations

import base64
import itertools
import re
from collections.abc import Sequence
from typing import Any

from lrlhf.apps.serve.limits import RequestLimits
from lrlhf.apps.serve.score_request import (
    MediaFiles,
    ScoreRequest,
    add_media,
    check_keys,
    check_sizes,
    decoded,
    entries,
    kind_of,
)
from lrlhf.rewards.learned import TextMarks
from lrlhf.web import malformed

_JPEG = b"\xff\xd8\xff"


def read_lightrft_request(body: Any, limits: RequestLimits, marks: TextMarks) -> ScoreRequest:
    """Read the body of a client of LightRFT (or OpenRLHF, which has no images).

    ``queries`` are prompt and response as one text, decoded from the policy's tokens: padding at
    both ends is dropped, and as many marks as an image has tokens become the one that a processor
    expects. ``references`` and ``labels`` become columns.
    """
    check_keys(body, ("queries",), ("prompts", "references", "labels", "images"))
    queries = _texts(body, "queries")
    count = len(queries)
    prompts = _texts(body, "prompts", count) if body.get("prompts") is not None else [""] * count
    check_sizes(prompts, queries, limits)
    files = MediaFiles(limits)
    images = add_media(files, {"images": _separated(body.get("images"))}, "image", count)
    rows = [
        _split(query, prompt, marks, bool(images and images[row]))
        for row, (query, prompt) in enumerate(zip(queries, prompts, strict=True))
    ]
    return ScoreRequest(
        prompts=[prompt for prompt, _ in rows],
        completions=[completion for _, completion in rows],
        images=images,
        columns={
            name: entries(body[name], name, count)
            for name in ("references", "labels")
            if body.get(name) is not None
        },
        files=files or None,
    )


def _texts(body: dict[str, Any], key: str, count: int | None = None) -> list[str]:
    values = entries(body[key], key, count)
    for row, value in enumerate(values):
        if not isinstance(value, str):
            raise malformed(f"{key}[{row}]", f"expected text, found {kind_of(value)}")
    return values


def _split(query: str, prompt: str, marks: TextMarks, shows: bool) -> tuple[str, str]:
    query, prompt = (_plain(text, marks, shows) for text in (query, prompt))
    if query.startswith(prompt):
        return prompt, query[len(prompt) :]
    # where the response begins is unknown; marks of images count in prompts only
    return (query, "") if shows else ("", query)


def _plain(text: str, marks: TextMarks, shows: bool) -> str:
    for mark in marks.media if shows else ():
        # of a run that the policy's processor made of one mark, the first is left
        text = re.sub(rf"({re.escape(mark)})(?:{re.escape(mark)})+", r"\1", text)
    text = text[_padded(text, marks.padding) :]
    # a pattern that is looked for at the end would be tried at every letter
    backwards = [mark[::-1] for mark in marks.padding]
    return text[: len(text) - _padded(text[::-1], backwards)]


def _padded(text: str, marks: Sequence[str]) -> int:
    """Count the letters of the marks that a text begins with."""
    run = re.match(f"(?:{'|'.join(map(re.escape, marks))})*", text) if marks else None
    return run.end() if run else 0


def _separated(rows: Any) -> Any:
    """Undo what LightRFT's client does to rows of several images.

    It writes all images of a row into one buffer, so that each text holds all files up to its own.
    """
    if not isinstance(rows, list):
        return rows
    return [
        [*row[:1], *itertools.starmap(_without_start, itertools.pairwise(row))]
        if isinstance(row, list)
        else row
        for row in rows
    ]


def _without_start(before: Any, text: Any) -> Any:
    if not isinstance(before, str) or not isinstance(text, str) or len(text) <= len(before):
        return text
    # whole groups of three bytes keep their four letters
    same = len(before.rstrip("=")) // 4 * 4
    if text[:same] != before[:same]:
        return text
    earlier, content = decoded(before, "images"), decoded(text, "images")
    rest = content[len(earlier) :]
    if content.startswith(earlier) and rest.startswith(_JPEG):
        return base64.b64encode(rest).decode()
    return text
