"""The notebooks: what is kept in them, and that they still run."""

from __future__ import annotations

import re
import runpy
import subprocess
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
NAMES = ("first_steps", "images", "ppo_by_hand", "reward_model", "your_own_algorithm")
_OF_A_MACHINE = re.compile(r"(?<![\w.<>/])/(home|root|tmp|work|Users|usr|opt|var|mnt)/|[A-Z]:\\\\")


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(output: Any) -> list[str]:
    if output.output_type == "stream":
        return [output.text]
    return ["".join(text) for kind, text in output.get("data", {}).items() if "text" in kind]


def test_every_notebook_is_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_kept_with_its_outputs(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [one for one in outputs if one.output_type == "error"]
    assert any("image/png" in one.get("data", {}) for one in outputs)
    for text in (text for one in outputs for text in texts(one)):
        assert not _OF_A_MACHINE.search(text), text
    assert (FOLDER / f"{name}.ipynb").stat().st_size < 600_000


@pytest.mark.parametrize("name", NAMES)
def test_code_compiles_and_says_at_the_end_what_came_out(name: str) -> None:
    cells = code_cells(read(name))
    for number, cell in enumerate(cells):
        compile(cell.source, f"{name}.ipynb, code cell {number}", "exec")
    assert cells[-1].source.count("assert ") >= 2


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    for cell in read(name).cells:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", cell.source):
            if cell.cell_type == "markdown" and "://" not in target:
                assert (FOLDER / target).exists(), target


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("saved in /tmp/x", True),
        ("/home/me/runs", True),
        (r"C:\\Users", True),
        ("runs/first_steps/tmp/x", False),
        ("https://example.org/usr/x", False),
        ("</tmp/", False),
    ],
)
def test_paths_of_a_machine_are_recognised(text: str, found: bool) -> None:
    assert bool(_OF_A_MACHINE.search(text)) == found


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is committed, as a user has it, so that nothing is written in the repository."""
    folder = tmp_path_factory.mktemp("clone") / "lrlhf"
    command = ["git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_in_five_minutes(
    name: str, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(clone))
    execute = runpy.run_path(str(clone / "tools" / "notebooks.py"))["execute"]
    begun = time.monotonic()
    executed = execute(clone / "notebooks" / f"{name}.ipynb")
    assert time.monotonic() - begun < 300
    kept = read(name)
    assert [cell.source for cell in executed.cells] == [cell.source for cell in kept.cells]
    for now, then in zip(code_cells(executed), code_cells(kept), strict=True):
        assert bool(now.outputs) == bool(then.outputs), now.source
