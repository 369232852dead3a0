"""A server and all that it starts end with their trainer, however that ends."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lrlhf.rollout.vllm import process
from lrlhf.rollout.vllm import process_guard as guard
from lrlhf.rollout.vllm.process import ServerProcess, ServerStartError

pytestmark = pytest.mark.timeout(60)
linux = pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")

PYTHON = [sys.executable, "-I", "-S"]
GUARD = [*PYTHON, guard.__file__]
SIGKILL_CODE = 137  # 128 + 9, as a shell says it

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(100)
"""

# Starts a child that ignores SIGTERM, then does what the words after the marker say.
SERVER = f"""
import os, signal, subprocess, sys, time
marker, words = sys.argv[1], sys.argv[2:]
child = [sys.executable, "-I", "-S", "-c", {STUBBORN!r}, marker, "stubborn-child"]
def up(process):
    process.stdout.readline()
if "alone" not in words:
    up(subprocess.Popen(child, stdout=subprocess.PIPE))
if "setsid" in words:
    reader, writer = os.pipe()
    if os.fork() == 0:
        subprocess.Popen(child, stdout=writer, start_new_session=True)
        os._exit(0)
    os.wait()
    os.read(reader, 2)
if "crash" in words:
    print("\\n".join(f"line {{n}}" for n in range(50)), flush=True)
    print("token", os.environ.get("TEST_TOKEN"), flush=True)
    sys.exit(7)
if "stubborn" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "tidy" in words:
    def tidy(*_):
        time.sleep(0.5)
        print("tidied up", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGTERM, tidy)
if "shared" in words:
    from multiprocessing import shared_memory
    memory = shared_memory.SharedMemory(name=marker, create=True, size=64)
print("pid", os.getpid(), flush=True)
print("ready", flush=True)
time.sleep(100)
"""

# Runs a server as a trainer would; arguments: folder of the package, log file, how, command.
TRAINER = """
import os, signal, sys, time, types
# the packages around the module import torch, which would take longer than the test
for name in ("lrlhf", "lrlhf.rollout", "lrlhf.rollout.vllm"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [sys.argv[1]]
from pathlib import Path
from lrlhf.rollout.vllm.process import ServerProcess
# a shell that starts pytest in the background has it ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
log, how = Path(sys.argv[2]), sys.argv[3]
server = ServerProcess(sys.argv[4:], env=dict(os.environ), log_file=log)
def ready():
    return "ready" in server.log_tail(1)
if how == "with":
    with server:
        server.wait_until(ready, timeout=20, poll=0.02)
        print("ready 0", flush=True)
        time.sleep(100)
server.start()
server.wait_until(ready, timeout=20, poll=0.02)
forked = os.fork() if how.startswith("fork") else 0
if how == "fork" and forked == 0:
    time.sleep(100)
if how == "fork-exit" and forked == 0:
    sys.exit(0)
if how == "fork-exit":
    os.waitpid(forked, 0)
print("ready", forked, flush=True)
if how != "end":
    time.sleep(100)
"""


@pytest.fixture
def marker() -> Iterator[str]:
    """A word in the arguments of every process of a test; kills those that the test leaves."""
    word = f"lrlhf-test-{uuid.uuid4().hex}"
    yield word
    for pid in marked(word):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def marked(word: str) -> dict[int, str]:
    """Find processes with a word in their arguments; zombies have none."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            arguments = file.read_bytes().decode(errors="replace").replace("\0", " ")
            if word in arguments:
                found[int(file.parent.name)] = arguments
    return found


def stubborn_children(word: str) -> set[int]:
    return {pid for pid, arguments in marked(word).items() if "stubborn-child" in arguments}


def eventually(condition: Callable[[], bool], *, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class Fake:
    """Makes the command of the fake server, and servers of it."""

    def __init__(self, folder: Path, marker: str) -> None:
        self.folder, self.marker, self.log = folder, marker, folder / "logs" / "server.log"
        self.script = folder / "server.py"
        self.script.write_text(SERVER)

    def command(self, *words: str) -> list[str]:
        return [*PYTHON, str(self.script), self.marker, *words]

    def server(self, *words: str, **env: str) -> ServerProcess:
        return ServerProcess(self.command(*words), env={**os.environ, **env}, log_file=self.log)

    def server_pid(self) -> int:
        return int(self.log.read_text().split("pid ")[-1].split()[0])


@pytest.fixture
def fake(tmp_path: Path, marker: str, monkeypatch: pytest.MonkeyPatch) -> Fake:
    # the children use all of it; trainers, which are other processes, have the real one
    monkeypatch.setattr(process, "ABORT_GRACE", 0.3)
    return Fake(tmp_path, marker)


def wait_ready(server: ServerProcess) -> None:
    server.wait_until(lambda: "ready" in server.log_tail(1), timeout=20, poll=0.02)


def test_the_grace_is_what_a_server_gets_to_tidy_up(fake: Fake) -> None:
    server = fake.server("alone", "tidy")
    for grace, tidied in ((0.05, False), (10.0, True)):
        server.start()
        wait_ready(server)
        began = time.monotonic()
        server.stop(grace)
        assert ("tidied up" in fake.log.read_text()) is tidied
        assert time.monotonic() - began < 5
        assert marked(fake.marker) == {}


def test_secrets_are_blanked(fake: Fake) -> None:
    command = [*fake.command("crash"), "--api-key", "from-the-command", "--admin_token=in-one-word"]
    server = ServerProcess(
        command, env={**os.environ, "TEST_TOKEN": "from-the-environment"}, log_file=fake.log
    )
    fake.script.write_text(SERVER.replace('print("token",', 'print("token", *words,'))
    server.start()
    with pytest.raises(ServerStartError) as caught:
        server.wait_until(lambda: False, timeout=20, poll=0.02)
    for text in (str(caught.value), server.log_tail(30)):
        assert "token crash --api-key *** --admin_token=*** ***" in text
        assert "from-the" not in text
        assert "in-one-word" not in text


def test_killing_the_server_ends_its_children(fake: Fake) -> None:
    with fake.server("setsid") as server:
        wait_ready(server)
        assert len(stubborn_children(fake.marker)) == 2
        os.kill(fake.server_pid(), signal.SIGKILL)
        assert eventually(lambda: not server.running, seconds=1)
        assert server.exit_code == SIGKILL_CODE
        assert eventually(lambda: marked(fake.marker) == {}, seconds=3)


@linux
def test_killing_the_guard_ends_the_server_and_at_the_stop_its_children(fake: Fake) -> None:
    server = fake.server("stubborn")
    server.start()
    wait_ready(server)
    (guard_pid,) = [pid for pid, text in marked(fake.marker).items() if guard.__file__ in text]
    os.kill(guard_pid, signal.SIGKILL)
    assert eventually(lambda: not server.running, seconds=1)
    assert eventually(lambda: fake.server_pid() not in marked(fake.marker), seconds=1)
    assert len(server.pids()) == 1
    server.stop()
    assert marked(fake.marker) == {}


@linux
def test_shared_memory_of_killed_processes_is_removed(fake: Fake) -> None:
    server = fake.server("stubborn", "shared")
    server.start()
    wait_ready(server)
    shared = Path("/dev/shm") / fake.marker
    assert shared.exists()
    server.stop(grace=0.1)
    assert marked(fake.marker) == {}
    assert not shared.exists()


@contextlib.contextmanager
def trainer(fake: Fake, how: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a trainer with a server of 2 children; give it and the child that it forked, or 0."""
    script = fake.folder / "trainer.py"
    script.write_text(TRAINER)
    arguments = [str(Path(guard.__file__).parent), str(fake.log), how]
    command = [*PYTHON, str(script), *arguments, *fake.command("stubborn", "setsid")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        try:
            yield started, int(started.stdout.readline().split()[1])
        finally:
            started.kill()


@linux
@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGKILL, "plain"),
        (signal.SIGTERM, "plain"),
        (signal.SIGINT, "with"),
        (None, "end"),
    ],
)
def test_a_trainer_that_ends_leaves_nothing_behind(
    fake: Fake, number: int | None, how: str
) -> None:
    with trainer(fake, how) as (started, _):
        if number is not None:
            # trainer, guard, server and its children
            assert len(marked(fake.marker)) == 5
            os.kill(started.pid, number)
        assert eventually(lambda: marked(fake.marker) == {}, seconds=3)


@linux
def test_a_forked_child_that_outlives_the_trainer_does_not_keep_the_server(fake: Fake) -> None:
    with trainer(fake, "fork") as (started, forked):
        os.kill(started.pid, signal.SIGKILL)
        assert eventually(lambda: set(marked(fake.marker)) == {forked}, seconds=3)
        os.kill(forked, signal.SIGKILL)


@linux
def test_the_exit_of_a_forked_child_does_not_end_the_server(fake: Fake) -> None:
    with trainer(fake, "fork-exit"):
        time.sleep(0.3)
        # the guard says so when it begins to end a server
        assert "guard:" not in fake.log.read_text()
        assert len(marked(fake.marker)) == 5


@linux
def test_a_server_starts_gets_ready_and_stops_with_all_its_children(fake: Fake) -> None:
    server = fake.server("setsid")
    server.stop()  # there is nothing to stop
    for _ in range(2):
        server.start()
        wait_ready(server)
        assert server.exit_code is None
        with pytest.raises(RuntimeError, match="running already"):
            server.start()
        # guard, server, its child, and one in a session of its own
        assert server.pids() == sorted(marked(fake.marker))
        assert len(server.pids()) == 4
        assert len({os.getsid(pid) for pid in stubborn_children(fake.marker)}) == 2
        server.stop(grace=0.1)
        server.stop()
        assert marked(fake.marker) == {}
        assert not server.running
        assert server.pids() == []
    reference = weakref.ref(server)
    del server
    gc.collect()
    assert reference() is None  # nothing keeps it until the exit


@pytest.mark.parametrize(
    ("words", "timeout", "told"),
    [
        (("crash",), 20, "ended with code 7 before it was ready"),
        (("stubborn",), 1.0, r"not ready after 1 s"),
    ],
)
def test_a_server_that_does_not_get_ready_shows_the_end_of_its_log(
    fake: Fake, words: tuple[str, ...], timeout: float, told: str
) -> None:
    server = fake.server(*words)
    for _ in range(2):
        server.start()
        with pytest.raises(ServerStartError, match=told) as caught:
            server.wait_until(lambda: False, timeout=timeout, poll=0.02)
        shown = str(caught.value)
        assert str(fake.log) in shown
        if words == ("crash",):
            # 30 lines: the guard's, the token's, and 28 from 22 to 49
            assert shown.count("line 49") == 1
            assert "line 22\n" in shown
            assert "line 21\n" not in shown
            assert server.exit_code == 7
        # the child that the server left behind is gone too
        assert marked(fake.marker) == {}


@linux
def test_cycles_leak_neither_file_descriptors_nor_zombies(fake: Fake) -> None:
    def zombies() -> set[str]:
        ps = ["ps", "-o", "pid=,stat=", "--ppid", str(os.getpid())]
        rows = subprocess.run(ps, capture_output=True, text=True, check=True).stdout.splitlines()
        return {row for row in rows if row.split()[1].startswith("Z")}

    def descriptors() -> set[str]:
        return {path.name for path in Path("/proc/self/fd").iterdir()}

    server = fake.server("alone")
    before = len(descriptors()), zombies()
    for cycle in range(6):
        server.start()
        # the pipes to the guard are not inherited by other children
        with subprocess.Popen(["sleep", "0"], close_fds=False) as child:
            child.wait()
        if cycle % 2:
            os.kill(server.pids()[0], signal.SIGKILL)
        server.stop(grace=0.1)
    assert (len(descriptors()), zombies()) == before
    assert marked(fake.marker) == {}


@pytest.mark.parametrize(
    ("script", "code", "told"),
    [
        ("exit 7", 7, "7\n"),
        ("kill -9 0", SIGKILL_CODE, "137\n"),
        ("/no/such/program", 127, "127\n"),
        ("sleep 100", 143, ""),  # its stdin ends, or it is signalled
        ("sleep 100", 143, "signal"),
    ],
)
def test_the_guard_ends_with_the_code_of_its_command(script: str, code: int, told: str) -> None:
    command = [script] if script.startswith("/") else ["sh", "-c", script]
    with subprocess.Popen(
        [*GUARD, str(os.getpid()), "0.1", "--", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as started:
        time.sleep(0.5)
        if told == "signal":
            started.send_signal(signal.SIGHUP)
            assert started.wait(timeout=10) == code
        said = started.communicate("" if not told else None, timeout=10)[0]
        assert started.returncode == code
        assert said == told.removeprefix("signal")
