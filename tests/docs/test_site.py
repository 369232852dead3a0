"""The site builds without a warning, and its reference has all that is public."""

import re
import sys
import zlib
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.docs.public import ROOT, public_names
from tests.forked import run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` builds it: a dead link or a page that nothing leads to is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def documented(site: Path) -> set[str]:
    """Names that the site has an entry for, as other projects' documentation would look them up."""
    header = re.compile(rb"(#.*\n){4}")
    content = (site / "objects.inv").read_bytes()
    start = header.match(content)
    assert start is not None
    lines = zlib.decompress(content[start.end() :]).decode().splitlines()
    return {line.split(" ", 1)[0] for line in lines}


def test_the_reference_has_every_public_name(site: Path) -> None:
    entries = documented(site)
    public = {f"{module}.{name}" for module, names in public_names().items() for name in names}
    # a function that hides the file of the same name has its entry under that file
    missing = {name for name in public if f"{name}.{name.rpartition('.')[2]}" not in entries}
    assert missing - entries == set()


def test_files_that_pages_link_to_are_pages_of_the_site(site: Path) -> None:
    page = (site / "algorithms" / "rloo.html").read_text(encoding="utf-8")
    link = "../source/lrlhf/functional/algorithms/grpo.py.html"
    assert f'href="{link}"' in page
    assert (site / "algorithms" / link).is_file()


def test_every_link_opens_from_disk(site: Path) -> None:
    dead = {
        (page.relative_to(site).as_posix(), link)
        for page in site.rglob("*.html")
        # its links start from the root of a server
        if page.name != "404.html"
        for link in re.findall(r'<a\b[^>]*? href="([^"#]+)', page.read_text(encoding="utf-8"))
        if not re.match(r"[a-z]+:", link) and not (page.parent / unquote(link)).is_file()
    }
    assert dead == set()


def test_pages_load_nothing_from_other_sites(site: Path) -> None:
    loads = re.compile(
        r'<(?:script|img|iframe)\b[^>]*? src="[a-z]+://|<link\b[^>]*? href="[a-z]+://'
    )
    assert [page for page in site.rglob("*.html") if loads.search(page.read_text("utf-8"))] == []
