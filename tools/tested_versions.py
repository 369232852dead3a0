"""Makes docs/versions.md of pyproject.toml and constraints.txt: python tools/tested_versions.py."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "versions.md"
_OWN = "lrlhf"
_TOOLS = {"dev", "docs"}
_HEAD = """\
# Versions

The last column has the versions that the tests run with (`constraints.txt`). Without that file, pip
takes the newest versions that the second column allows. A dash means that no version is fixed: the
tests take the newest that goes with the others. Python 3.11 or newer.

To get what the tests run with: `pip install -c constraints.txt .`

| package | allowed | tested |
|---|---|---|
"""
_EXTRAS = """
Packages that only some runs need are extras: `pip install "lrlhf[math,plots]"`. A run that needs a
missing one stops with the command that installs it.

| extra | package | allowed | tested |
|---|---|---|---|
"""


def page(root: Path = ROOT) -> str:
    """Return the page's text."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    tested = _tested(root / "constraints.txt")
    rows = [_cells(Requirement(line), tested) for line in project["dependencies"]]
    extras = [
        f"| {extra} {_cells(requirement, tested)}"
        for extra, lines in project["optional-dependencies"].items()
        if extra not in _TOOLS
        for requirement in map(Requirement, lines)
        if requirement.name != _OWN
    ]
    return _HEAD + "\n".join(rows) + "\n" + _EXTRAS + "\n".join(extras) + "\n"


def _tested(constraints: Path) -> dict[str, str]:
    lines = (line.partition("#")[0].strip() for line in constraints.read_text().splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {name.lower(): version for name, version in pairs}


def _cells(requirement: Requirement, tested: dict[str, str]) -> str:
    allowed = ", ".join(sorted(map(str, requirement.specifier), reverse=True)) or "any"
    return f"| {requirement.name} | {allowed} | {tested.get(requirement.name.lower(), '–')} |"


if __name__ == "__main__":
    PAGE.write_text(page())
