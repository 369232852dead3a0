"""The pictures of docs/gallery.md: how they are taken, and that all of them are there."""

import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

from lrlhf.apps.lab.audit import as_page
from lrlhf.apps.lab.compare import compare_runs
from lrlhf.apps.lab.compare.page import write_comparison
from lrlhf.apps.lab.inspector import write_inspector
from tests.apps.lab.browser import NARROW, WIDE
from tests.apps.lab.compare.runs import response, write_run
from tests.apps.lab.inspector.runs import policy_run, reward_run
from tests.apps.lab.test_audit import audited, planted
from tools.screenshots import IMAGES, names, photograph

GALLERY = IMAGES.parents[1] / "gallery.md"
CARD = """---
license: mit
---

# A model

| metric | value |
|---|---|
| score | 1 |
"""


def pages(folder: Path) -> Path:
    """The eight pages, of runs that are written in code."""
    for run, write in (("quickstart", policy_run), ("hh", reward_run)):
        write_inspector([write(folder / run)], folder / f"inspect_{run}.html")
        sides = {
            side: [write_run(folder / side, [response(row, row % 3 + better) for row in range(40)])]
            for side, better in (("a", 0.0), ("b", 0.5))
        }
        write_comparison(compare_runs(sides), folder / f"compare_{run}.html", step="last")
        train, val, _ = planted()
        as_page(audited(train, val), folder / f"audit_{run}.html", "Audit")
        card = folder / f"card_{run}" / "README.md"
        card.parent.mkdir()
        card.write_text(CARD)
    return folder


@pytest.mark.slow
def test_every_page_is_photographed_at_both_widths(tmp_path: Path) -> None:
    photograph(pages(tmp_path / "pages"), tmp_path / "images")

    taken = {path.stem: Image.open(path) for path in (tmp_path / "images").glob("*.png")}
    assert taken.keys() == {"_".join(name) for name in names()}
    for name, picture in taken.items():
        assert picture.size == (WIDE if name.endswith("wide") else NARROW), name
        assert len(picture.convert("RGB").getcolors(100_000)) > 8, f"{name} is blank"
    shutil.rmtree(tmp_path / "pages" / "card_hh")
    with pytest.raises(FileNotFoundError, match="card_hh"):
        photograph(tmp_path / "pages", tmp_path / "images")


def test_the_gallery_shows_every_picture_and_describes_it() -> None:
    text = GALLERY.read_text(encoding="utf-8")
    shown = re.findall(r"!\[([^\]]+)\]\(images/gallery/([a-z_]+)\.png\)", text)
    assert sorted(name for _, name in shown) == sorted("_".join(name) for name in names())
    assert all(len(described.split()) > 3 for described, _ in shown)
    for _, name in shown:
        with Image.open(IMAGES / f"{name}.png") as picture:
            assert picture.size == (WIDE if name.endswith("wide") else NARROW), name
