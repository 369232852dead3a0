"""A server and all that it starts end with their trainer, however that ends."""

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from lrlhf import process_guard as guard
from lrlhf.rollout.vllm import servers
from lrlhf.rollout.vllm.servers import ServerProcess, ServerStartError
from lrlhf.run.supervision import watch

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only"),
]

PYTHON = [sys.executable, "-I", "-S"]

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
child = [sys.executable, "-I", "-S", "-c", {STUBBORN!r}, marker]
if "alone" not in words:
    subprocess.Popen(child, stdout=subprocess.PIPE).stdout.readline()
if "setsid" in words:
    reader, writer = os.pipe()
    if os.fork() == 0:
        subprocess.Popen(child, stdout=writer, start_new_session=True)
        os._exit(0)
    os.wait()
    os.read(reader, 2)
if "orphans" in words:
    for _ in range(20):
        if os.fork() == 0:
            os.fork()
            os._exit(0)
        os.wait()
if "crash" in words:
    print("\\n".join(f"line {{n}}" for n in range(50)), flush=True)
    print("token", os.environ.get("TEST_TOKEN"), *words, flush=True)
    sys.exit(7)
if "stubborn" in words:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "tidy" in words:
    def tidy(*_):
        time.sleep(2)
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
    sys.modules[name].__path__ = ["/".join([sys.argv[1], *name.split(".")[1:]])]
from pathlib import Path
from lrlhf.rollout.vllm import servers
# a shell that starts pytest in the background has it ignored
signal.signal(signal.SIGINT, signal.default_int_handler)
servers.GRACE = 0.3
log, how = Path(sys.argv[2]), sys.argv[3]
server = servers.ServerProcess(sys.argv[4:], env=dict(os.environ), log_file=log)
server.start()
server.wait_until(lambda: "ready" in server.log_tail(1), timeout=20, poll=0.02)
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


def marked(word: str) -> dict[int, str]:
    """Find processes with a word in their arguments; zombies have none."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            arguments = file.read_bytes().decode(errors="replace").replace("\0", " ")
            if word in arguments:
                found[int(file.parent.name)] = arguments
    return found


def eventually(condition: Callable[[], bool], *, seconds: float = 20.0) -> bool:
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

    def started(self, *words: str, **env: str) -> ServerProcess:
        server = ServerProcess(self.command(*words), env={**os.environ, **env}, log_file=self.log)
        server.start()
        return server

    def ready(self, *words: str) -> ServerProcess:
        server = self.started(*words)
        server.wait_until(lambda: "ready" in server.log_tail(1), timeout=20, poll=0.02)
        return server

    def pids(self) -> set[int]:
        return set(marked(self.marker))

    def pid_of(self, part: str) -> int:
        """Find the guard, or the server under it."""
        if part == "server":
            return int(self.log.read_text().split("pid ")[-1].split()[0])
        (pid,) = [pid for pid, text in marked(self.marker).items() if guard.__file__ in text]
        return pid


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """A word in the arguments of every process tells what a test leaves, which is killed."""
    monkeypatch.setattr(servers, "GRACE", 0.3)
    fake = Fake(tmp_path, f"lrlhf-test-{uuid.uuid4().hex}")
    yield fake
    for pid in fake.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("grace", "tidied"), [(0.05, False), (10.0, True)])
def test_the_grace_is_what_a_server_gets_to_tidy_up(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, grace: float, tidied: bool
) -> None:
    monkeypatch.setattr(servers, "GRACE", grace)
    server = fake.ready("alone", "tidy")
    began = time.monotonic()
    assert server.stop()
    assert ("tidied up" in fake.log.read_text()) is tidied
    assert time.monotonic() - began < 9
    assert not fake.pids()


@pytest.mark.parametrize("part", ["server", "guard"])
def test_killing_a_part_ends_all_of_it_at_the_latest_at_the_stop(fake: Fake, part: str) -> None:
    server = fake.ready("setsid" if part == "server" else "stubborn")
    assert len(fake.pids()) == (4 if part == "server" else 3)
    os.kill(fake.pid_of(part), signal.SIGKILL)
    # of a guard that is killed the server goes along; the orphans of both go with its group
    assert eventually(lambda: len(fake.pids()) == (0 if part == "server" else 1))
    assert not server.stop()
    assert not fake.pids()


def test_a_stop_without_the_guard_waits_until_all_have_ended(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fake.ready("stubborn")
    os.kill(fake.pid_of("guard"), signal.SIGKILL)
    with monkeypatch.context() as patched:
        patched.setattr(guard, "_KILL_SECONDS", 0.1)
        patched.setattr(os, "killpg", lambda *_: None)  # as where a device holds a process
        with pytest.raises(RuntimeError, match=r"processes \[\d+\] do not end"):
            server.stop()
    assert not server.stop()
    assert not fake.pids()


def test_the_guard_collects_the_orphans_that_it_adopts(fake: Fake) -> None:
    server = fake.ready("alone", "orphans")
    adopter = psutil.Process(fake.pid_of("guard"))
    assert eventually(lambda: [one.pid for one in adopter.children()] == [fake.pid_of("server")])
    assert server.stop()


def test_the_guard_finds_the_packages_of_the_trainer(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the interpreter below a virtual environment, without what is installed in that
    monkeypatch.setattr(sys, "executable", sys._base_executable)  # type: ignore[attr-defined]
    assert fake.ready("alone").stop()


def test_a_deadline_leaves_the_guard_the_time_it_needs() -> None:
    needs = servers.GRACE + guard.LOOK_SECONDS + guard.TRACKER_SECONDS
    assert needs < watch._CHILDREN_S


def test_shared_memory_of_killed_processes_is_removed(fake: Fake) -> None:
    server = fake.ready("stubborn", "shared")
    shared = Path("/dev/shm") / fake.marker
    assert shared.exists()
    assert server.stop()
    assert not fake.pids()
    assert not shared.exists()


@contextlib.contextmanager
def trainer(fake: Fake, how: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run a trainer with a server of 2 children; give it and the child that it forked, or 0."""
    script = fake.folder / "trainer.py"
    script.write_text(TRAINER)
    arguments = [str(Path(guard.__file__).parent), str(fake.log), how]
    command = [sys.executable, "-I", str(script), *arguments, *fake.command("stubborn", "setsid")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        try:
            yield started, int(started.stdout.readline().split()[1])
        finally:
            started.kill()


@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGKILL, "plain"),
        # one that the trainer forked, such as a worker of a data loader, does not keep the server
        (signal.SIGKILL, "fork"),
        (signal.SIGTERM, "plain"),
        (signal.SIGINT, "plain"),
        (None, "end"),
    ],
)
def test_a_trainer_that_ends_leaves_nothing_behind(
    fake: Fake, number: int | None, how: str
) -> None:
    with trainer(fake, how) as (started, forked):
        if number is not None:
            # trainer, guard, server and its children
            assert len(fake.pids()) == 5 + (how == "fork")
            os.kill(started.pid, number)
        assert eventually(lambda: fake.pids() == ({forked} if how == "fork" else set()))


def test_the_exit_of_a_forked_child_does_not_end_the_server(fake: Fake) -> None:
    with trainer(fake, "fork-exit"):
        time.sleep(0.8)
        assert len(fake.pids()) == 5


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
    secrets = ["--api-key", "from-the-command", "--admin_token=in-one-word"]
    server = fake.started(*words, *secrets, TEST_TOKEN="from-the-environment")
    with pytest.raises(ServerStartError, match=told) as caught:
        server.wait_until(lambda: False, timeout=timeout, poll=0.02)
    shown = str(caught.value)
    assert str(fake.log) in shown
    if words == ("crash",):
        # 30 lines: the token's, and 29 from 21 to 49
        assert "line 21\n" in shown
        assert "line 20\n" not in shown
        assert "token *** crash --api-key *** --admin_token=***" in shown
    for secret in ("from-the", "in-one-word"):
        assert secret not in shown
    # the child that the server left behind is gone too
    assert not fake.pids()
    assert not server.stop()
