"""The tool that breaks lrlhf on purpose, on a package of two lines."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
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


def started(root: Path, *entries: tuple[str, str, str]) -> subprocess.Popen[str]:
    """Start to try mutations."""
    text = "".join(
        ENTRY.format(name=name, old=old, new=new, tests="test_thing.py::test_add")
        for name, old, new in entries
    )
    (root / "tools/mutations/sums.toml").write_text(text)
    (root / "scratch").mkdir(exist_ok=True)
    code = (
        f"import sys; sys.path.insert(0, {str(TOOLS)!r}); from pathlib import Path; import mutate; "
        f"sys.exit(mutate.main([], root=Path({str(root)!r}), imports=()))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TMPDIR": str(root / "scratch")},
    )


def mutate(root: Path, *entries: tuple[str, str, str]) -> tuple[int, list[str]]:
    """Try mutations, and return the status and what is said of each."""
    with started(root, *entries) as runner:
        said, _ = runner.communicate()
    return runner.returncode, [line for line in said.splitlines() if "  sums: " in line]


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


HANGING = """import os, subprocess, sys, time
from pathlib import Path

from thing import add


def test_add():
    if add(2, 2) != {passes_at}:
        sleeping = [sys.executable, "-c", "import time; time.sleep(600)"]
        own = subprocess.Popen(sleeping, start_new_session=True).pid
        told = Path({told!r})
        told.with_suffix(".new").write_text(f"{{os.getpid()}} {{own}}")
        told.with_suffix(".new").rename(told)
        time.sleep(600)
"""


def is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize(
    ("ending", "passes_at"),
    [
        (signal.SIGTERM, 4),
        (signal.SIGTERM, None),  # while the tests run without a defect
        (signal.SIGINT, 4),
        (signal.SIGHUP, 4),
        (signal.SIGKILL, 4),
    ],
)
def test_nothing_is_left_of_a_runner_that_is_ended(
    root: Path, ending: signal.Signals, passes_at: int | None
) -> None:
    told = root / "scratch/told"
    (root / "test_thing.py").write_text(HANGING.format(passes_at=passes_at, told=str(told)))
    with started(root, ("minus", "a + b", "a - b")) as runner:
        while not told.exists():
            assert runner.poll() is None
            time.sleep(0.05)
        lane, own = map(int, told.read_text().split())
        told.unlink()
        runner.send_signal(ending)
        runner.wait(60)
    if ending == signal.SIGKILL:  # which nothing can answer: the tests end, their copy stays
        os.kill(own, signal.SIGKILL)
    else:
        assert runner.returncode == 128 + ending
        assert not any((root / "scratch").iterdir())
    until = time.monotonic() + 10
    while is_running(lane) or is_running(own):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert (root / "thing.py").read_text() == SOURCE


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
