"""The tool that breaks lrlhf on purpose, on a package of two lines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.mutate import Mutation, read

TOOLS = Path(__file__).parents[2] / "tools"
SOURCE = "def add(a, b):\n    return a + b\n\n\ndef forgotten():\n    return 1\n"
TEST = "from thing import add\n\n\ndef test_add():\n    assert add(2, 2) == 4\n"
ENTRY = """
[[mutation]]
name = "{name}"
file = "thing.py"
old = '''{old}'''
new = '''{new}'''
tests = "{tests}"
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "tools/mutations").mkdir(parents=True)
    (tmp_path / "thing.py").write_text(SOURCE)
    (tmp_path / "test_thing.py").write_text(TEST)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    return tmp_path


def mutate(root: Path, *entries: tuple[str, str, str]) -> tuple[int, list[str]]:
    """Try mutations, and return the status and what is said of each."""
    text = "".join(
        ENTRY.format(name=name, old=old, new=new, tests="test_thing.py::test_add")
        for name, old, new in entries
    )
    (root / "tools/mutations/sums.toml").write_text(text)
    code = (
        f"import sys; sys.path.insert(0, {str(TOOLS)!r}); from pathlib import Path; import mutate; "
        f"sys.exit(mutate.main([], root=Path({str(root)!r}), imports=()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    return done.returncode, [line for line in done.stdout.splitlines() if "  sums: " in line]


def test_what_is_not_caught_is_an_error_and_the_tree_stays_as_it_is(root: Path) -> None:
    said = mutate(
        root,
        ("moved", "a * b", "a - b"),
        ("twice", "return", "raise"),
        ("unseen", "return 1", "return 2"),
        ("no code", "def add(a, b):", "def add(a, b)"),
        # of one length, so that only the content tells them apart
        ("minus", "a + b", "a - b"),
        ("turned", "a + b", "b - a"),
    )
    verdicts = ["STALE  sums: moved", "STALE  sums: twice", "MISSED  sums: unseen"]
    verdicts += ["BROKEN  sums: no code", "caught  sums: minus", "caught  sums: turned"]
    assert said == (1, verdicts)
    assert (root / "thing.py").read_text() == SOURCE
    assert not list(root.glob("**/*.pyc"))
    assert mutate(root, ("minus", "a + b", "a - b")) == (0, ["caught  sums: minus"])
    # a test that fails without any defect proves nothing
    (root / "test_thing.py").write_text(TEST.replace("== 4", "== 5"))
    assert mutate(root, ("minus", "a + b", "a - b")) == (1, [])


REPOSITORY = TOOLS.parent
OF_LRLHF = read(TOOLS / "mutations", slow=True)


@pytest.mark.parametrize("mutation", OF_LRLHF, ids=lambda one: f"{one.area}: {one.name}")
def test_each_defect_of_the_lists_can_be_made_and_has_its_test(mutation: Mutation) -> None:
    mutated = mutation.mutated(REPOSITORY)
    assert mutated is not None, f"its old text does not stand once in {mutation.file}"
    compile(mutated, mutation.file, "exec")
    path, _, test = mutation.tests.partition("::")
    name = test.partition("[")[0]
    assert not name or f"def {name}(" in (REPOSITORY / path).read_text()
