"""Which lines of the files of runs a page shows, where it cannot show all."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lrlhf.apps.lab.run_files import record_of, whole_lines

_STEP = re.compile(rb'\{"step": (\d+)[,}]')
_HAS_TOKENS = b'"tokens": {'
_GOLDEN = (math.sqrt(5) - 1) / 2


class Source(NamedTuple):
    """A file with a line per response."""

    run: int
    """Index of the run."""
    path: Path
    evaluation: bool


class Counted(NamedTuple):
    """A file, and what is known of its lines before they are read."""

    source: Source
    lines: dict[int, list[int]]
    """Line numbers, from 1, by step."""
    with_tokens: set[int]
    """Numbers of the lines that hold the values of their tokens."""


def counted(source: Source) -> Counted:
    """Look through a file without reading its texts."""
    lines: dict[int, list[int]] = defaultdict(list)
    with_tokens = set()
    for number, line in whole_lines(source.path):
        lines[_step_of(line, source.path, number)].append(number)
        # in a text the quotes would be escaped
        if _HAS_TOKENS in line:
            with_tokens.add(number)
    return Counted(source, dict(lines), with_tokens)


def chosen_lines(files: Sequence[Counted], count: int) -> list[set[int]]:
    """Choose ``count`` lines of all files, as many of every step as of every other.

    Steps with fewer lines give what they have. Of two evaluations with equally many lines the same
    are chosen, so that prompts can be followed; one line with token values is in every choice.
    """
    places = [(index, step) for index, file in enumerate(files) for step in file.lines]
    shares = even_shares([len(files[index].lines[step]) for index, step in places], count)
    chosen: list[set[int]] = [set() for _ in files]
    for (index, step), share in zip(places, shares, strict=True):
        numbers, with_tokens = files[index].lines[step], files[index].with_tokens
        first = next((number for number in numbers if number in with_tokens), None)
        order = sorted(range(len(numbers)), key=lambda at: (numbers[at] != first, at * _GOLDEN % 1))
        chosen[index].update(numbers[at] for at in order[:share])
    return chosen


def even_shares(sizes: Sequence[int], total: int) -> list[int]:
    """Split ``total`` evenly over parts of these sizes, none of which gives more than it has.

    Fewer than there are parts are taken at even distances.
    """
    level = _level(sizes, total)
    shares, wanted, taken = [], 0.0, 0
    for size in sizes:
        wanted += min(size, level)
        share = min(size, math.floor(wanted + 1e-6) - taken)
        shares.append(share)
        taken += share
    return shares


def _level(sizes: Sequence[int], total: int) -> float:
    """Return how much each part gives at most, so that all together give ``total``."""
    left: float = total
    for done, size in enumerate(sorted(sizes)):
        level = left / (len(sizes) - done)
        if size >= level:
            return level
        left -= size
    return math.inf


def read_chosen(file: Counted, chosen: set[int]) -> Iterator[dict[str, Any]]:
    """Yield the records of chosen lines.

    Raises:
        ValueError: A line is no JSON object; names file and line.
    """
    for number, line in whole_lines(file.source.path):
        if number in chosen:
            yield record_of(line, file.source.path, number)


def _step_of(line: bytes, path: Path, number: int) -> int:
    if match := _STEP.match(line):
        return int(match[1])
    step = record_of(line, path, number).get("step", 0)
    if not isinstance(step, int):
        raise ValueError(f"{path}, line {number}: step is {json.dumps(step)}, no whole number")
    return step
