"""Photographs the pages of docs/gallery.md in a browser, at two widths.

    python -m tools.screenshots PAGES

PAGES is a folder with the pages that `docs/gallery.md` says how to make, of each kind one for the
quickstart and one for HH-RLHF. What others read is in the pictures: look at them before they go
into the documentation.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import markdown
from PIL import Image

from tests.apps.lab.browser import NARROW, WIDE, Opened, opening, wait_until_drawn

IMAGES = Path(__file__).parents[1] / "docs" / "images" / "gallery"
RUNS = ("quickstart", "hh")
SUBJECTS = {
    "inspect": "inspect_{run}.html",
    "compare": "compare_{run}.html",
    "audit": "audit_{run}.html",
    "card": "card_{run}/README.md",
}
WIDTHS = {"wide": WIDE, "phone": NARROW}
_HEAD = """\
<!doctype html><meta charset="utf-8">
<meta name="viewport" content="width=device-width">"""
_STYLE = """\
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 860px; margin: 1.5rem auto; padding: 0 1rem;
  overflow-wrap: anywhere; }
img { max-width: 100%; } pre { overflow-x: auto; } h1, h2 { border-bottom: 1px solid #8884; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
td, th { border: 1px solid #8884; padding: .2rem .6rem; overflow-wrap: normal; }"""


def names() -> Iterator[tuple[str, str, str]]:
    """Subject, run and width of every picture."""
    for subject in SUBJECTS:
        for run in RUNS:
            for width in WIDTHS:
                yield subject, run, width


def photograph(pages: Path, output: Path) -> None:
    """Write `SUBJECT_RUN_WIDTH.png` of every page of a folder.

    Raises:
        FileNotFoundError: A page is missing.
    """
    output.mkdir(parents=True, exist_ok=True)
    with opening() as opened:
        for subject, run, width in names():
            page = _open(opened, pages / SUBJECTS[subject].format(run=run), WIDTHS[width])
            path = output / f"{subject}_{run}_{width}.png"
            page.screenshot(path=path)
            page.context.close()
            # a palette takes a third of the bytes
            Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)


def _open(opened: Opened, path: Path, size: tuple[int, int]) -> Any:
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: docs/gallery.md says how to make it")
    page = opened(_as_page(path) if path.suffix == ".md" else path, "", size)
    wait_until_drawn(page)
    return page


def _as_page(card: Path) -> Path:
    """Make of a model card what the hub shows: its text without the metadata."""
    text = re.sub(r"\A---\n.*?\n---\n", "", card.read_text(encoding="utf-8"), flags=re.DOTALL)
    body = markdown.markdown(text, extensions=["tables", "fenced_code"])
    head = (
        '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    )
    page = card.with_suffix(".html")
    page.write_text(f"{head}<style>{_STYLE}</style>{body}", encoding="utf-8")
    return page


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", type=Path)
    photograph(parser.parse_args().pages, IMAGES)
