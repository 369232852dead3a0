"""The page of tested versions says what the tests run with."""

import runpy
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = """
[project]
dependencies = ["torch>=2.6", "Lightning>=2.6.4,<2.7", "rich"]
[project.optional-dependencies]
math = ["math-verify>=0.8"]
dev = ["lrlhf[math]", "pytest>=8"]
"""


def test_the_page_is_that_of_the_files_beside_it() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "tested_versions.py"))
    assert (ROOT / "docs" / "versions.md").read_text() == tool["page"](), (
        "run python tools/tested_versions.py"
    )


def test_versions_and_bounds_are_taken_from_the_two_files(tmp_path: Path) -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "tested_versions.py"))
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "constraints.txt").write_text("# why\ntorch==2.13.0\nlightning==2.6.6  # note\n")

    rows = [line for line in tool["page"](tmp_path).splitlines() if line.startswith("| ")]

    assert rows == [
        "| package | allowed | tested |",
        "| torch | >=2.6 | 2.13.0 |",
        "| Lightning | >=2.6.4, <2.7 | 2.6.6 |",
        "| rich | any | – |",
        "| extra | package | allowed | tested |",
        "| math | math-verify | >=0.8 | – |",
    ]


def test_the_page_on_installation_names_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = (
        paragraph
        for paragraph in (ROOT / "docs" / "running.md").read_text().split("\n\n")
        if paragraph.startswith("Extras: ")
    )
    # `dev` is what the page installs by hand
    users = project["optional-dependencies"].keys() - {"dev"}
    assert [name for name in sorted(users) if f"`{name}`" not in extras] == []


@pytest.mark.parametrize("package", ["torch", "lightning", "transformers", "peft", "jsonargparse"])
def test_the_tests_run_with_what_the_page_says(package: str) -> None:
    page = (ROOT / "docs" / "versions.md").read_text()
    installed = version(package).partition("+")[0]
    assert f"| {package} |" in page
    assert any(
        line.startswith(f"| {package} |") and line.endswith(f"| {installed} |")
        for line in page.splitlines()
    )
