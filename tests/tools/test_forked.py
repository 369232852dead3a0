"""Programs that are forked look like programs that are started."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import forked

pytestmark = pytest.mark.slow
TELLS = (
    "import os, sys; print(os.environ['COLOUR'], os.getcwd(), sys.argv[1:], 'torch' in sys.modules)"
    "; print('x' * 10**6, file=sys.stderr); sys.exit(3)"
)


@pytest.fixture(scope="module", params=["forked", "started"])
def environment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(forked.ADDRESS, raising=False)
        if request.param == "started":
            yield {**os.environ, "COLOUR": "red"}
        else:
            with forked.fork_server(tmp_path_factory.mktemp("server")):
                yield {**os.environ, "COLOUR": "red"}


def python(code: str, *arguments: str, **options: Any) -> Any:
    return forked.Popen([sys.executable, "-c", code, *arguments], text=True, **options)


def test_environment_folder_arguments_streams_and_status(
    environment: dict[str, str], tmp_path: Path
) -> None:
    done = forked.run(
        [sys.executable, "-c", TELLS, "a", "b"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    is_forked = forked.ADDRESS in environment
    # the program's name is not among what it is given
    assert done.stdout == f"red {tmp_path} ['a', 'b'] {is_forked}\n"
    assert (done.returncode, len(done.stderr)) == (3, 10**6 + 1)
    lines = (b"in\n", b"")
    with forked.Popen(
        [sys.executable, "-c", "import sys; print(input()); print('err', file=sys.stderr)"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
    ) as process:
        process.stdin.write(lines[0])
        process.stdin.close()
        assert process.stdout.read() == b"in\nerr\n"
        assert process.wait(10) == 0


def test_a_module_is_run_as_a_program(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "json.tool", "--help"]
    done = forked.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0
    assert "json.tool" in done.stdout


def test_errors_and_signals_end_it(environment: dict[str, str]) -> None:
    with python("raise ValueError('red')", env=environment, stderr=subprocess.PIPE) as process:
        assert "ValueError: red" in process.stderr.read()
        assert process.wait(10) == 1
    code = "import time; print('here', flush=True); time.sleep(100)"
    with python(code, env=environment, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout.readline() == "here\n"
        assert process.poll() is None
        assert os.getsid(process.pid) == process.pid
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        process.terminate()
        assert process.wait(10) == -signal.SIGTERM
