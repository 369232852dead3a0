"""Pages of sections in a real browser."""

from pathlib import Path

import pytest

from lrlhf.apps.lab.page import Chart, Number, Section, Table, Text, write_page
from tests.apps.lab.browser import NARROW, WIDE, eventually, fits, opening

pytestmark = pytest.mark.slow
HOSTILE = "</script><img src=x onerror='window.ran = 1'>"


def test_charts_are_drawn_and_tables_sorted_searched_and_paged(tmp_path: Path) -> None:
    rows = [[f"row {at}", (at * 37) % 120, None if at % 2 else HOSTILE] for at in range(120)]
    chart = Chart([{"x": [1, 2], "y": [3, 1], "name": HOSTILE}], title=HOSTILE)
    sections = [
        Section(HOSTILE, [Text(HOSTILE), chart]),
        Section("Rows", [Table(["a", "n", "x"], rows)]),
    ]
    path = write_page(tmp_path / "page.html", HOSTILE, sections, lead=HOSTILE)
    with opening() as opened:
        for size in (WIDE, NARROW):
            page = opened(path, "", size)
            page.wait_for_selector(".chart .scatterlayer path", state="attached")
            assert fits(page)
            assert page.locator("h1").inner_text() == HOSTILE
            first = page.locator("tbody tr td:first-child")
            assert first.count() == 50
            page.get_by_role("button", name="Next").click()
            eventually(first.first).to_have_text("row 50")
            page.get_by_role("button", name="n", exact=True).click()
            # 37 * 13 = 481 = 4 * 120 + 1
            eventually(first.nth(1)).to_have_text("row 13")
            page.get_by_label("Search this table").fill("ROW 11")
            eventually(page.locator(".tools span")).to_have_text("1–11 of 11 rows")
            assert page.evaluate("window.ran") is None
            page.context.close()


def test_percentages_are_sorted_as_numbers(tmp_path: Path) -> None:
    shares = [0.1, 0.025, 1.0, 0.99]
    cells = [Number(share, f"{share:.1%} (0.0% to 100.0%)") for share in shares]
    table = Table(["share"], [[cells[0]], [cells[1]], [None], [cells[2]], [cells[3]]])
    path = write_page(tmp_path / "page.html", "Shares", [Section("Shares", [table])])
    with opening() as opened:
        page = opened(path)
        shown = page.locator("tbody td")
        page.get_by_role("button", name="share").click()
        texts = [f"{text} (0.0% to 100.0%)" for text in ("2.5%", "10.0%", "99.0%", "100.0%")]
        eventually(shown).to_have_text([*texts, ""])
        page.get_by_role("button", name="share").click()
        eventually(shown).to_have_text([*texts[::-1], ""])
        page.context.close()
