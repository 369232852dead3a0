"""Pages in a real browser, which may load nothing and complain of nothing."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDE, NARROW = (1280, 800), (390, 844)

Opened = Callable[..., Any]
"""``opened(path, part="", size=WIDE, scheme="light")`` returns playwright's page."""


@contextmanager
def browser() -> Iterator[Any]:
    """Start the Chromium of this machine; skip the test where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    # as root, which containers are, Chromium has no sandbox
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=executable, args=options)
        yield started
        started.close()


@contextmanager
def opening() -> Iterator[Opened]:
    """Open pages, and check at the end that none has complained, asked or loaded anything."""
    complaints: list[str] = []
    with browser() as started:

        def opened(
            path: Path, part: str = "", size: tuple[int, int] = WIDE, scheme: str = "light"
        ) -> Any:
            width, height = size
            context = started.new_context(
                viewport={"width": width, "height": height}, color_scheme=scheme
            )
            page = context.new_page()
            page.set_default_timeout(40_000)
            page.on("console", lambda told: complaints.append(f"console: {told.text}"))
            page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
            page.on("dialog", lambda dialog: complaints.append(f"dialog: {dialog.message}"))
            page.on("request", lambda asked: complaints.extend(_foreign(asked.url)))
            page.goto(f"{path.as_uri()}#{part}")
            return page

        yield opened
    assert not complaints, complaints


def _foreign(url: str) -> list[str]:
    return [] if url.startswith(("file:", "data:", "blob:")) else [f"request: {url}"]


def wait_until_drawn(page: Any) -> None:
    """Wait until all charts in the window are there; those below it are drawn when they come up."""
    page.wait_for_function(
        """() => [...document.querySelectorAll(".plot")].every((plot) => plot.offsetParent === null
            || plot.getBoundingClientRect().top > innerHeight || plot.querySelector(".main-svg"))"""
    )
    frames = "requestAnimationFrame(() => requestAnimationFrame(done))"
    page.evaluate(f"() => new Promise((done) => {frames})")


def fits(page: Any) -> bool:
    """Whether nothing is wider than the window."""
    wide: bool = page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    return wide


def eventually(locator: Any) -> Any:
    """Return what waits until something holds of a part of a page."""
    return pytest.importorskip("playwright.sync_api").expect(locator)
