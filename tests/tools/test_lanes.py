"""Tests in forked processes are reported like tests in one."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIRST = """
import os, signal, sys, pytest
def test_it_passes(tmp_path): assert tmp_path.is_dir()
def test_it_fails(): print("printed"); assert 1 == 2
def test_it_is_left_out(): pytest.skip("no reason")
def test_its_process_ends(): os.kill(os.getpid(), signal.SIGKILL)
def test_the_next_one_runs_all_the_same(): sys.left = 1
"""
SECOND = """
import os, sys, pytest
@pytest.fixture(scope="module")
def shared(): open("made once", "x").close(); return os.getpid()
def test_nothing_is_left_of_other_files(): assert not hasattr(sys, "left")
def test_one(shared): assert shared == os.getpid()
@pytest.mark.parametrize("way", [1])
def test_another(shared, way): assert shared == os.getpid()
"""
PROGRAMS = """
import os, subprocess, sys
from lrlhf.process_guard import guarded
from tests.forked import fork_programs
sys.state = "inherited"
fork_programs()
worker = "import multiprocessing as m, sys; p = m.get_context('spawn').Process(target=exec, args=("
worker += "'import sys; print(sys.state, flush=True)',)); p.start(); p.join(); sys.exit(p.exitcode)"
parent = "import os, sys; print(sys.state, os.getppid() == int(sys.argv[1])); sys.exit(3)"
child = subprocess.run([sys.executable, "-c", parent, str(os.getpid())], check=False)
guard = subprocess.Popen(guarded([sys.executable, "-c", worker], grace=1.0), start_new_session=True)
print(child.returncode, guard.wait())
"""


def test_reports_of_all_processes_come_together(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_first.py").write_text(FIRST)
    (tmp_path / "test_second.py").write_text(SECOND)
    command = [sys.executable, "-m", "pytest", "-p", "tests.lanes", "--lanes", "2", "-q", "-rA"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "2 failed, 5 passed, 1 skipped" in done.stdout
    assert "ended with status -9 while the test ran" in done.stdout
    assert "printed" in done.stdout


def test_what_a_forked_program_starts_is_forked_too() -> None:
    """A guard, which must be its starter's child, the program under it, and a worker of that."""
    command = [sys.executable, "-c", PROGRAMS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["inherited True", "inherited", "3 0"], done.stderr
