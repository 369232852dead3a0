"""Reads runs, and writes the page of the inspector."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from lrlhf.apps.lab.inspector.page_data import page_data, run_sources
from lrlhf.apps.lab.inspector.sampling import counted
from lrlhf.apps.lab.page.page import packed, write_document
from lrlhf.apps.lab.run_files import RunFiles

_PACKAGE = "lrlhf.apps.lab.inspector"
_RESPONSES = 10_000
_DATA_BYTES = 17_000_000
"""Of data in a page of 20 MB, in which plotly takes two."""
_SCRIPTS = (
    *("elements", "data", "texts", "curves", "filters", "response"),
    *("responses", "diff", "prompts", "pairs", "main"),
)


def write_inspector(
    runs: Sequence[str | Path], output: str | Path, *, max_responses: int | None = None
) -> str:
    """Write a page with the curves, responses and judged pairs of runs.

    Args:
        runs: Their folders.
        output: The ``.html`` file; it appears complete or not at all.
        max_responses: Responses, and pairs, in the page at most. None: 10,000, or as many as a page
            of 20 MB holds. What is left out is left out evenly over the steps, and the page says
            how much that is.

    Returns:
        What was written, for people.

    Raises:
        FileNotFoundError: A folder is missing, or is not that of a run.
        ValueError: A run is named twice, or a line of a file cannot be read; names file and line.
        ImportError: plotly is not installed.
    """
    names = _names([Path(run) for run in runs])
    read = [run_sources(RunFiles(run), index) for index, run in enumerate(runs)]
    found = [counted(source) for run in read for source in run.responses]
    count = max_responses or _RESPONSES
    while True:
        data = page_data(read, names, found, count)
        content = packed(data)
        if max_responses is not None or len(content) <= _DATA_BYTES or count == 1:
            break
        pairs = sum(len(one["pairs"]) for one in data["evaluations"])
        shown = max(data["responses"]["size"], pairs) or count
        count = max(1, int(min(count, shown) * 0.9 * _DATA_BYTES / len(content)))
    path = write_document(
        output,
        _PACKAGE,
        "inspector.html.jinja",
        script=_script(),
        plotly=True,
        title=" · ".join(names),
        notes=data["notes"],
        data=content,
    )
    return "\n".join([f"wrote {path} ({path.stat().st_size / 1e6:.1f} MB)", *data["notes"]])


def _names(runs: Sequence[Path]) -> list[str]:
    """Name runs after their folders, with as many parents as it takes to tell them apart."""
    whole = [run.resolve().parts for run in runs]
    for depth in range(1, max(map(len, whole)) + 1):
        names = ["/".join(parts[-depth:]) for parts in whole]
        if len(set(names)) == len(names):
            return names
    raise ValueError(f"a run is named twice among {', '.join(map(str, runs))}: name each once")


@cache
def _script() -> str:
    """Return the scripts of the page as one, in a scope of its own."""
    folder = files(_PACKAGE).joinpath("templates")
    parts = [folder.joinpath(f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS]
    return "\n".join(['(() => {\n"use strict";', *parts, "})();"])
