"""A page of sections with texts, tables and charts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from lrlhf.run.atomic import atomic_write

Cell = str | float | int | bool | None


class Text(NamedTuple):
    """A paragraph. Everything in it is shown as it is: nothing is taken for markup."""

    text: str
    kind = "text"


class Table(NamedTuple):
    """Rows that can be sorted by a click on a column, and searched.

    Attributes:
        columns: Headings.
        rows: Cells; numbers are aligned and sorted as numbers, None is an empty cell.
        title: Above it.
        note: Below it.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    note: str = ""
    kind = "table"


class Chart(NamedTuple):
    """A chart that plotly draws in the page's colours.

    Attributes:
        traces: As plotly's JSON has them.
        layout: Of axes and legend; colours and fonts are the page's.
        title: Above it.
        note: Below it.
        height: In pixels.
    """

    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any] = {}
    title: str = ""
    note: str = ""
    height: int = 320
    kind = "chart"


class Section(NamedTuple):
    """A part of the page with an entry in its navigation."""

    title: str
    parts: Sequence[Text | Table | Chart]


def write_page(path: str | Path, title: str, sections: Sequence[Section], lead: str = "") -> Path:
    """Write a page.

    Args:
        path: The ``.html`` file; it appears complete or not at all.
        title: Of the page.
        sections: In their order.
        lead: Below the title.

    Returns:
        The path.

    Raises:
        ImportError: A section has a chart, and plotly is not installed.
    """
    path = Path(path)
    charts = any(isinstance(part, Chart) for section in sections for part in section.parts)
    page = (
        _environment()
        .get_template("page.html.jinja")
        .render(title=title, lead=lead, sections=sections, plotly=plotly_source() if charts else "")
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as handle:
        handle.write(page.encode(errors="replace"))
    return path


def script_json(value: Any) -> str:
    """Return JSON that can stand inside of ``<script>``, whatever texts it holds."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


@cache
def plotly_source() -> str:
    """Return plotly's JavaScript.

    Raises:
        ImportError: plotly is not installed; says how to install it.
    """
    try:
        found = files("plotly").joinpath("package_data", "plotly.min.js")
    except ModuleNotFoundError as error:
        raise ImportError("charts in a page need plotly: pip install 'lrlhf[plots]'") from error
    return found.read_text(encoding="utf-8")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("lrlhf.analysis.page", "templates"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["script_json"] = script_json
    environment.filters["shown"] = _shown
    return environment


def _shown(cell: Cell) -> str:
    """Return a cell as people read it."""
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:,.4g}" if abs(cell) < 1e4 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)
