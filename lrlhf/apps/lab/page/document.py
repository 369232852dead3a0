"""One HTML file that opens from disk, loads nothing, and runs nothing but its own scripts."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from lrlhf.run.atomic import atomic_write

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
        found = files("plotly").joinpath("package_data", "plotly.min.js")
    except ModuleNotFoundError as error:
        raise ImportError("charts in a page need plotly: pip install 'lrlhf[plots]'") from error
    return found.read_text(encoding="utf-8")


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
