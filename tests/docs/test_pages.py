"""Links resolve, the navigation has every page, and the reference has every package."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from markdown.extensions.toc import slugify

from tests.docs.public import ROOT, public_names

DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
FENCE = re.compile(r"^ *(`{3,}).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {slugify(heading.replace("`", ""), "-") for heading in plain}


def dead_links(page: Path) -> Iterator[str]:
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


def entries(nav: list[object] | dict[str, object] | str) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from entries(item)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert [*dead_links(page)] == []


def test_dead_links_and_anchors_are_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# What `it` is\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    links = ("there.md#what-it-is", "there.md#no-heading", "gone.md", "#here", "https://a.b/c")
    page.write_text("# Here\n" + "\n".join(f"[text]({link})" for link in links))
    assert [*dead_links(page)] == ["there.md#no-heading", "gone.md"]


def test_the_navigation_has_every_page_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    pages = [path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(entries(nav)) == sorted([*pages, "contributing.md"])


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_packages_inside_of_others_are_public_too() -> None:
    names = public_names()
    assert names["lrlhf.apps.lab.inspector"] == {"write_inspector"}
    assert "compare_runs" in names["lrlhf.apps.lab.compare"]
    # lrlhf.rollout exports both engines
    assert "lrlhf.rollout.vllm" not in names


def test_the_reference_has_every_public_package() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in DOCS.glob("reference/*.md"))
    assert public_names().keys() - re.findall(r"^::: (\S+)$", text, re.MULTILINE) == set()
