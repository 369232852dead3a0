"""A page of sections with texts, tables and charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from lrlhf.apps.lab.page.document import write_document


class Number(NamedTuple):
    """A number that is shown as another text than its digits, such as a share with its interval.

    Attributes:
        value: By which its column is sorted.
        text: What is shown.
    """

    value: float
    text: str


Cell = str | float | int | bool | Number | None


class Text(NamedTuple):
    """A paragraph. Everything in it is shown as it is: nothing is taken for markup."""

    text: str

    @property
    def kind(self) -> str:
        """What the template asks for."""
        return "text"


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

    @property
    def kind(self) -> str:
        """What the template asks for."""
        return "table"


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

    @property
    def kind(self) -> str:
        """What the template asks for."""
        return "chart"


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
    charts = any(isinstance(part, Chart) for section in sections for part in section.parts)
    script = files("lrlhf.apps.lab.page").joinpath("templates", "page.js").read_text("utf-8")
    return write_document(
        path,
        "lrlhf.apps.lab.page",
        "page.html.jinja",
        script=script,
        plotly=charts,
        title=title,
        lead=lead,
        sections=sections,
        shown=_shown,
        sorted_by=_sorted_by,
    )


def _shown(cell: Cell) -> str:
    """Return a cell as people read it."""
    if cell is None:
        return ""
    if isinstance(cell, Number):
        return cell.text
    if isinstance(cell, float):
        return f"{cell:,.4g}" if abs(cell) < 1e4 else f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) and not isinstance(cell, bool) else str(cell)


def _sorted_by(cell: Cell) -> float | int | None:
    """Return the number that a cell is sorted by; None: it is text."""
    if isinstance(cell, Number):
        return cell.value
    return cell if isinstance(cell, float | int) and not isinstance(cell, bool) else None
