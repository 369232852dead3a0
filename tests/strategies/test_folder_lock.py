"""Two runs never write into one folder, and a run that is gone is in nobody's way."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lrlhf.callbacks import EvalJSONL, HFExport, RLCheckpoint, RolloutLog
from lrlhf.loggers import ResumingCSVLogger
from lrlhf.run import run_folder
from lrlhf.run.run_folder import FOLDER_WAIT, LOCK_FILE, hold_folder
from tests.callbacks.fakes import ToyPolicy, batches, trainer
from tests.loggers.runs import Toy

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are forked")


class Pause(L.Callback):
    """Calls a function after the third step."""

    def __init__(self, then: Callable[[], object]) -> None:
        self.then = then

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            self.then()


def fit(folder: Path, writer: Any, *others: L.Callback, ckpt_path: str | None = None) -> float:
    """Train four steps, and return what was learned."""
    of_logger = isinstance(writer, ResumingCSVLogger)
    run = trainer(
        folder,
        *([] if of_logger else [writer]),
        *others,
        logger=writer if of_logger else False,
        enable_checkpointing=True,
        max_steps=4,
        max_epochs=-1,
    )
    module = Toy() if of_logger else ToyPolicy()
    run.fit(module, batches(10), ckpt_path=ckpt_path)
    return float(next(module.parameters()).detach())


@contextlib.contextmanager
def run_that_goes_on(folder: Path, writer: Any) -> Iterator[tuple[int, Callable[[], None]]]:
    """Have a forked process train until it is killed; it forks another one, which lives longer."""
    reading, writing = os.pipe()

    def stay() -> None:
        heir = os.fork()
        if heir:
            os.write(writing, f"{heir}\n".encode())
        time.sleep(60)

    first = os.fork()
    if not first:
        try:
            fit(folder, writer, Pause(stay))
        finally:
            os._exit(1)
    os.close(writing)
    heir = int(os.read(reading, 100))  # nothing, and so no number, if it has failed

    def kill() -> None:
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)

    try:
        yield first, kill
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            kill()
        os.kill(heir, signal.SIGKILL)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def saving(folder: Path) -> RLCheckpoint:
    return RLCheckpoint(folder, every_n_train_steps=2)


@pytest.mark.filterwarnings("ignore:.*checkpoints of an earlier run")
def test_a_second_run_is_refused_and_a_killed_one_is_continued(tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    with run_that_goes_on(tmp_path, saving(folder)) as (owner, kill):
        before = contents(folder)
        for ckpt_path in (None, "last"):
            with pytest.raises(ValueError, match="belongs to a run that goes on") as caught:
                fit(tmp_path, saving(folder), ckpt_path=ckpt_path)
            for told in (str(folder), f"process {owner} on {socket.gethostname()} since 20"):
                assert told in str(caught.value)
        assert contents(folder) == before
        kill()
        # what the killed run had forked is there still, and has not inherited the folder
        assert fit(tmp_path, saving(folder), ckpt_path="last") == 4.0
    names = {path.name for path in folder.iterdir()}
    assert names == {"step=000002.ckpt", "step=000004.ckpt", "last.ckpt"}


def test_a_run_that_may_wait_takes_a_folder_once_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_WAIT, "60")
    monkeypatch.setattr(run_folder, "_LOOK_SECONDS", 0.1)
    folder = tmp_path / "ck"
    with run_that_goes_on(tmp_path, saving(folder)) as (_, kill):
        second, ends = trainer(tmp_path / "second"), threading.Timer(0.5, kill)
        began = time.monotonic()
        ends.start()
        hold_folder(second, folder)
        assert time.monotonic() - began > 0.3
        ends.join()
    second.validate(ToyPolicy(), batches(1), verbose=False)  # gives it back


@pytest.mark.parametrize("writer", [EvalJSONL, RolloutLog, HFExport, ResumingCSVLogger])
def test_whatever_writes_into_a_folder_holds_it(
    writer: Callable[[Path], Any], tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    with run_that_goes_on(tmp_path / "one", writer(folder)) as (owner, _):
        before = contents(folder)
        with pytest.raises(ValueError, match=f"process {owner} on "):
            fit(tmp_path / "two", writer(folder))
        assert contents(folder) == before


def test_an_evaluation_may_look_at_a_run_that_goes_on(tmp_path: Path) -> None:
    with run_that_goes_on(tmp_path, saving(tmp_path / "ck")):
        module = ToyPolicy()
        run = trainer(tmp_path, saving(tmp_path / "ck"), enable_checkpointing=True)
        run.validate(module, batches(1), ckpt_path="last", verbose=False)
    assert module.validated_weights == [2.0]


@pytest.mark.filterwarnings("ignore:.*checkpoints of an earlier run")
def test_a_run_that_fails_gives_its_folder_back(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("the power went out")

    with pytest.raises(RuntimeError, match="power"):
        fit(tmp_path, saving(tmp_path / "ck"), Pause(fail))
    assert not list((tmp_path / "ck").glob(".*lock"))


def test_a_trainer_that_goes_on_leaves_the_folder_to_the_next_one(tmp_path: Path) -> None:
    first, second = (trainer(tmp_path / str(number)) for number in range(2))
    folder = tmp_path / "shared"
    hold_folder(first, folder)
    first.fit(ToyPolicy(), batches(1))
    assert not list(folder.iterdir())
    hold_folder(second, folder)
    first.validate(ToyPolicy(), batches(1), verbose=False)
    assert [path.name for path in folder.iterdir()] == [LOCK_FILE]
    second.validate(ToyPolicy(), batches(1), verbose=False)
    assert not list(folder.iterdir())


def test_where_the_file_system_has_no_locks_a_run_warns_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refused)
    monkeypatch.setattr(fcntl, "flock", refused)
    with pytest.warns(UserWarning, match="has no locks, so nothing keeps a second run"):
        assert fit(tmp_path, saving(tmp_path / "ck")) == 4.0
