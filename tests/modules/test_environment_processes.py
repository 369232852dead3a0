"""Environments in processes of their own that are killed or stop: their episodes fail alone."""

import contextlib
import csv
import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lrlhf.environments import Episodes, TextEnvironment
from lrlhf.modules import RLOO
from lrlhf.rewards import RewardError, Rewards
from tests.modules.test_episode_runs import build, records_of, run

pytestmark = pytest.mark.timeout(120)

PIPE = """
import os, sys
for turn, line in enumerate(sys.stdin, 1):
    if line == "end\\n":
        os.kill(os.getpid(), int(sys.argv[1]))
    print(turn, flush=True)
"""
HTTP = """
import os, sys, threading, time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

turns = Counter()

def end():
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(60)  # other threads may get the signal a moment before this one

# so that none of them is answered
together = threading.Barrier(4, action=end)

class Game(BaseHTTPRequestHandler):
    def do_POST(self):
        turns[self.path] += 1
        if self.rfile.read(int(self.headers["Content-Length"])) == b"end":
            together.wait()
        told = b"%d" % turns[self.path]
        self.send_response(200)
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    def log_message(self, *parts):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Game)
print(server.server_port, flush=True)
server.serve_forever()
"""
ROWS = [{"prompt": f"write {number} ", "doomed": number < 2} for number in range(4)]
"""Of which one iteration plays all, twice."""


class Counts(TextEnvironment):
    """Three turns, counted elsewhere; those of doomed rows end their process in iteration 1."""

    numbers: ClassVar[Iterator[int]]
    ending: ClassVar[signal.Signals]
    started: ClassVar[list[subprocess.Popen[str]]]

    def reset(self, doomed: bool) -> None:
        self.number, self.count = next(self.numbers), 0
        self.doomed = doomed and self.number // 8 == 1

    def step(self, action: str) -> str | None:
        turn = self.ask("end" if self.doomed and self.count == 1 else "go on")
        self.count = int(turn)
        return f"({turn})" if self.count < 3 else None

    def get_reward(self) -> float:
        return float(self.number % 3)

    def ask(self, what: str) -> str:
        raise NotImplementedError

    @classmethod
    def start(cls, program: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", program, str(cls.ending.value)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(command, text=True, **pipes)
        cls.started.append(process)
        return process


class OverPipe(Counts):
    """A process for each episode."""

    def reset(self, doomed: bool) -> None:
        super().reset(doomed)
        self.process = self.start(PIPE)

    def ask(self, what: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        if not (answer := self.process.stdout.readline()):
            raise EOFError(f"the game ended with {self.process.wait()}")
        return answer.strip()

    def close(self) -> None:
        end(self.process)


class OverHTTP(Counts):
    """In each iteration a server for the doomed rows and one for the others."""

    ports: ClassVar[dict[tuple[int, bool], int]]
    starting: ClassVar = threading.Lock()

    def reset(self, doomed: bool) -> None:
        super().reset(doomed)
        place = self.number // 8, doomed
        with self.starting:
            if place not in self.ports:
                output = self.start(HTTP).stdout
                assert output is not None
                self.ports[place] = int(output.readline())
        self.port = self.ports[place]

    def ask(self, what: str) -> str:
        connection = HTTPConnection("127.0.0.1", self.port)
        with contextlib.closing(connection):
            connection.request("POST", f"/{self.number}", what)
            return connection.getresponse().read().decode()


def end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


@pytest.fixture(autouse=True)
def _processes() -> Iterator[None]:
    """Begin with none, and leave none."""
    Counts.numbers, Counts.started, OverHTTP.ports = itertools.count(), [], {}
    yield
    for process in Counts.started:
        end(process)


def fit(environment: type[Counts], folder: Path, *given: Any, allowed: float = 0.5) -> None:
    rewards = Rewards(["environment_reward"], max_unscorable_fraction=allowed)
    episodes = Episodes(environment=environment, max_turn_tokens=5, timeout=2.0)
    run(build(RLOO, *given, rewards=rewards, episodes=episodes), folder, ROWS, max_steps=3)


@pytest.mark.parametrize(
    ("environment", "ending", "failure"),
    [
        (OverPipe, signal.SIGKILL, "step() raised EOFError: the game ended with -9"),
        (OverPipe, signal.SIGSTOP, "step() took longer than 2 s"),
        (OverHTTP, signal.SIGKILL, "step() raised RemoteDisconnected: Remote end closed connect"),
        (OverHTTP, signal.SIGSTOP, "step() took longer than 2 s"),
    ],
)
def test_the_run_goes_on_without_episodes_whose_process_is_gone(
    environment: type[Counts],
    ending: signal.Signals,
    failure: str,
    language_model: Any,
    tokenizer: Any,
    tmp_path: Path,
) -> None:
    Counts.ending = ending
    fit(environment, tmp_path, language_model, tokenizer)
    records = records_of(tmp_path)
    assert [record["step"] for record in records] == [1] * 8 + [2] * 8 + [3] * 8
    for record in records:
        failed = record["step"] == 2 and record["columns"]["doomed"]
        assert record["finish_reason"] == ("failed" if failed else "done")
        assert record["turns"] == (2 if failed else 3)
        assert (record["score"] is None) == failed
        assert record.get("failure", "").startswith(failure) == failed
    if environment is OverPipe:  # whose processes end with their episodes
        assert all(process.returncode is not None for process in Counts.started)
    with (tmp_path / "metrics.csv").open() as table:
        rows = list(csv.DictReader(table))
    assert [float(row["episode/failed_fraction"]) for row in rows] == [0, 0.5, 0]
    assert [float(row["rollout/unscorable_fraction"]) for row in rows] == [0, 0.5, 0]


def test_a_run_of_which_too_much_is_gone_says_what_went_wrong(
    language_model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    Counts.ending = signal.SIGKILL
    with pytest.raises(RewardError, match=r"4 of 8 responses.*: the game ended with -9"):
        fit(OverPipe, tmp_path, language_model, tokenizer, allowed=0.4)
