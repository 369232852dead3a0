"""What the page of the inspector reads: runs as columns, and notes of what is left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lrlhf.apps.lab.inspector.pairs import page_of
from lrlhf.apps.lab.inspector.responses import Responses
from lrlhf.apps.lab.inspector.sampling import Counted, Source, chosen_lines, read_chosen
from lrlhf.apps.lab.inspector.texts import NOTHING, Texts, short_number
from lrlhf.apps.lab.inspector.thumbnails import Thumbnails
from lrlhf.apps.lab.run_files import RunFiles, records

_IMAGE_BYTES = 4_000_000
_POINTS = 2_000


class RunSources(NamedTuple):
    """Where the parts of a run are."""

    files: RunFiles
    responses: list[Source]
    pairs: dict[int, Path]
    """Evaluations of a reward model by step."""
    unknown: list[Path]
    """Evaluations whose lines are neither responses nor pairs."""


def run_sources(run: RunFiles, index: int) -> RunSources:
    """Look which files a run has.

    Args:
        run: The run.
        index: Its number in the page.

    Raises:
        ValueError: The first line of an evaluation cannot be read; names it.
    """
    responses = [Source(index, path, evaluation=False) for path in run.response_files]
    pairs: dict[int, Path] = {}
    unknown: list[Path] = []
    for step, path in run.evaluations.items():
        first = next(records(path), {})
        if "margins" in first:
            pairs[step] = path
        elif "completion" in first:
            responses.append(Source(index, path, evaluation=True))
        elif first:
            unknown.append(path)
    return RunSources(run, responses, pairs, unknown)


def page_data(
    runs: Sequence[RunSources], names: Sequence[str], found: Sequence[Counted], count: int
) -> dict[str, Any]:
    """Return what the page reads, in JSON types.

    Args:
        runs: The runs.
        names: What the page calls them.
        found: Their files of responses.
        count: Responses, and pairs, at most.

    Raises:
        ValueError: A line of a file cannot be read; names file and line.
    """
    texts = Texts()
    responses = Responses(texts)
    for file, chosen in zip(found, chosen_lines(found, count), strict=True):
        for record in read_chosen(file, chosen):
            responses.add(file.source, record)
    evaluations = _evaluations(runs, count, texts)
    columns = responses.page_data()
    thumbnails = Thumbnails(
        _IMAGE_BYTES, (folder for run in runs for folder in (run.files.folder, *run.files.media))
    )
    of_pairs = (pair["media"] for evaluation in evaluations for pair in evaluation["pairs"])
    for number in dict.fromkeys((*columns["columns"]["media"], *of_pairs)):
        if number != NOTHING:
            thumbnails.add_json(texts.all[number])
    curves = [_curves(run.files) for run in runs]
    total = sum(len(numbers) for file in found for numbers in file.lines.values())
    return {
        "runs": [
            {"name": name, "folder": str(run.files.folder), "curves": shown}
            for name, run, (shown, _) in zip(names, runs, curves, strict=True)
        ],
        "notes": [
            *_left_out("responses", responses.size, total, "each step"),
            *_left_out(
                "pairs",
                sum(len(evaluation["pairs"]) for evaluation in evaluations),
                sum(evaluation["total"] for evaluation in evaluations),
                "each evaluation, and half of them its worst mistakes; the charts count all",
            ),
            *_left_out("images", len(thumbnails.uris), len(thumbnails.uris) + thumbnails.left_out),
            *_outside(thumbnails.outside),
            *_thinned(max(points for _, points in curves)),
            *(f"{path} holds neither responses nor pairs." for run in runs for path in run.unknown),
        ],
        "texts": texts.all,
        "responses": columns,
        "evaluations": evaluations,
        "images": thumbnails.uris,
    }


def _outside(count: int) -> Iterator[str]:
    if count:
        yield (
            f"{count} image files lie neither in the folder of a run nor in its media.root, and "
            "are named only."
        )


def _evaluations(runs: Sequence[RunSources], count: int, texts: Texts) -> list[dict[str, Any]]:
    """Return the evaluations of reward models by validation set, each with a share of the pairs."""
    places = [
        (index, step, path) for index, run in enumerate(runs) for step, path in run.pairs.items()
    ]
    each = max(1, count // max(1, len(places)))
    return [
        {"run": index, "step": step, **of_set}
        for index, step, path in places
        for of_set in page_of(path, each, texts)
    ]


def _curves(run: RunFiles) -> tuple[dict[str, Any], int]:
    """Return steps and values by metric, thinned out, and the points of the longest one."""
    curves = {name: curve for name, curve in run.curves().items() if name != "epoch"}
    longest = max(map(len, curves.values()), default=0)
    shown = {}
    for name, curve in curves.items():
        steps = sorted(curve)
        every = -(-len(steps) // _POINTS)
        # counted from the end: the last value is always there
        kept = steps[::-1][:: max(1, every)][::-1]
        shown[name] = {"steps": kept, "values": [short_number(curve[step]) for step in kept]}
    return shown, longest


def _left_out(what: str, shown: int, total: int, of_each: str = "") -> Iterator[str]:
    if shown < total:
        told = f"{shown:,} of {total:,} {what} are in this page"
        yield f"{told}, evenly many of {of_each}." if of_each else f"{told}."


def _thinned(points: int) -> Iterator[str]:
    if points > _POINTS:
        every = -(-points // _POINTS)
        yield f"Curves have up to {points:,} points, of which the page shows one in {every}."
