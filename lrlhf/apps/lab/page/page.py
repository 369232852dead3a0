"""Sections with texts, tables and charts: as a page, or on a terminal."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence, Set
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from rich.console import Console
from rich.table import Table as Columns
from rich.text import Text as Words

from lrlhf.run.atomic import atomic_write
from lrlhf.secrets import escaped

_BASE = "lrlhf.apps.lab.page"


def write_document(
    path: str | Path, package: str, template: str, *, script: str, plotly: bool, **values: Any
) -> Path:
    """Write a page from a template.

    Args:
        path: The ``.html`` file; it appears complete or not at all.
        package: Holds the template in its folder ``templates``.
        template: Extends ``base.html.jinja``.
        script: What runs; nothing else does, as its hash is in the page's content security policy.
        plotly: Bring plotly; the script awaits ``loadPlotly()``.
        values: For the template. Texts are escaped.

    Returns:
        The path.

    Raises:
        ImportError: plotly is asked for and not installed.
    """
    path = Path(path)
    scripts = [_text(_BASE, "shared.js"), script]
    allowed = [*scripts, plotly_source()] if plotly else scripts
    page = (
        _environment(package)
        .get_template(template)
        .render(
            scripts=scripts,
            hashes=" ".join(f"'{_hash(code)}'" for code in allowed),
            plotly=_packed_plotly() if plotly else "",
            **values,
        )
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as handle:
        # half a surrogate pair has no bytes
        handle.write(page.encode(errors="replace"))
    return path


def packed(value: Any) -> str:
    """Return JSON, deflated and as base64; ``unpacked(id)`` reads it in the page."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return _deflated(text.encode())


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
        script = files("plotly").joinpath("package_data", "plotly.min.js")
    except ModuleNotFoundError as error:
        raise ImportError("charts in a page need plotly: pip install 'lrlhf[plots]'") from error
    return script.read_text(encoding="utf-8")


@cache
def _packed_plotly() -> str:
    return _deflated(plotly_source().encode())


def _deflated(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content, 9)).decode()


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@cache
def _text(package: str, name: str) -> str:
    return files(package).joinpath("templates", name).read_text(encoding="utf-8")


@cache
def _environment(package: str) -> Environment:
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in dict.fromkeys((package, _BASE))]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["script_json"] = script_json
    return environment


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
        to_read: The cells are texts to read: a terminal shows the first rows alone, in a line each.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    title: str = ""
    note: str = ""
    to_read: bool = False

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


_LINE, _LINES = 80, 3
"""Letters of a text, and rows of texts to read, on a terminal."""


def print_page(sections: Sequence[Section], console: Console) -> None:
    """Write sections to a terminal, but for their charts; the first has no heading there."""
    for number, section in enumerate(sections):
        if number:
            console.print()
            console.print(_words(section.title, style="bold"))
        for part in section.parts:
            if isinstance(part, Text):
                console.print(_words(part.text))
            elif isinstance(part, Table):
                _print_table(part, console)


def _print_table(table: Table, console: Console) -> None:
    if not table.rows:
        return
    if table.title:
        console.print()
        console.print(_words(table.title))
    if table.to_read:
        for row in table.rows[:_LINES]:
            texts = (" ".join(_shown(cell).split()) for cell in row)
            short = (text if len(text) <= _LINE else f"{text[:_LINE]}…" for text in texts)
            console.print(_words(f"  {': '.join(short)}"))
        if (more := len(table.rows) - _LINES) > 0:
            console.print(_words(f"  and {more:,} more (--json and --html list them)"))
        return
    _print_columns(table, console)
    if table.note:
        console.print(_words(table.note))


def _print_columns(table: Table, console: Console) -> None:
    """Lay rows out, or the columns as rows where they are too many; nothing is cut off."""
    texts = [[*table.columns], *([_shown(cell) for cell in row] for row in table.rows)]
    numbers = {
        index
        for index, column in enumerate(zip(*table.rows, strict=True))
        if index and not all(isinstance(cell, str) for cell in column)
    }
    laid_out = _laid_out(texts, numbers)
    unlimited = console.options.update(max_width=4096)
    if console.measure(laid_out, options=unlimited).minimum > console.width:
        turned = [list(column) for column in zip(*texts, strict=True)]
        laid_out = _laid_out(turned, set(range(1, len(texts))))
        for column in laid_out.columns[1:]:  # long names go on below
            column.min_width, column.no_wrap = None, False
    width = max(console.width, console.measure(laid_out, options=unlimited).minimum)
    console.print(laid_out, width=width, crop=False)


def _laid_out(texts: Sequence[Sequence[str]], numbers: Set[int]) -> Columns:
    headings, *rows = texts
    columns = Columns(box=None)
    for index, name in enumerate(headings):
        columns.add_column(
            _words(name),
            justify="right" if index in numbers else "left",
            overflow="fold",
            no_wrap=index in numbers,
            min_width=len(name) if index else max(10, len(name)),
        )
    for row in rows:
        columns.add_row(*map(_words, row))
    return columns


def _words(text: str, style: str = "") -> Words:
    """Return words without markup, and without what a terminal would act on."""
    return Words(escaped(text), style=style)
