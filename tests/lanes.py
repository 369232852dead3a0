"""Runs the tests of a session in forked processes, several at a time: ``pytest --lanes 2``.

Everything is imported and collected once, in the parent. What runs in one process is a *unit*: the
tests of a file, or one slow test alone unless it shares a fixture with others of its file. So no
test meets what another file has left in its process, vLLM (which changes its process) waits in the
same queue as everything else, and units that took long the last time go first.
"""

import contextlib
import gc
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

from tests.fork_server import PRELOADED, import_all, import_deepspeed
from tests.forked import Forker, fork_programs, fork_server

_SILENCE_LIMIT = 1800.0
"""Seconds without an ended test, after which a unit is ended: longer than any test's time limit."""
_GUESSES = {"vllm": 60.0, "slow": 10.0}
"""Seconds of a test with that mark, while nothing has been measured."""
_VLLM = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)
"""What takes a quarter of a minute to import, and is imported once for all tests of vLLM."""
_SHARED_BY_ALL = ("", "tests")
"""Where fixtures are cheap to make again: pytest itself and ``tests/conftest.py``."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--lanes", type=int, default=0, help="run in so many forked processes at a time"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    options = session.config.option
    broken = session.testsfailed and not options.continue_on_collection_errors
    if not options.lanes or options.collectonly or options.usepdb or broken:
        return None
    _Lanes(session).run()
    return True


def unit_of(item: pytest.Item) -> str:
    """Tell which tests must run in one process: those of one name."""
    # pytest's own way from a test to the scope of its fixtures
    definitions: dict[str, Any] = item._fixtureinfo.name2fixturedefs  # type: ignore[attr-defined]
    shared = [
        name
        for name, (*_, fixture) in sorted(definitions.items())
        if fixture.scope != "function" and fixture.baseid not in _SHARED_BY_ALL
    ]
    file = item.nodeid.partition("::")[0]
    if shared:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        return f"{file} {[given[name] for name in shared if name in given]}"
    alone = item.get_closest_marker("slow") or item.get_closest_marker("vllm")
    return item.nodeid if alone else file


class _Ended(NamedTuple):
    """A test that has ended, as its process tells it."""

    nodeid: str
    location: tuple[str, int | None, str]
    reports: list[dict[str, Any]]


@dataclass
class _Unit:
    """A process, and the tests that are before it."""

    name: str
    items: list[pytest.Item]
    pid: int = 0
    heard: float = 0.0

    @property
    def starts_vllm(self) -> bool:
        return any(item.get_closest_marker("vllm") for item in self.items)


class _Lanes:
    """The queue of units, and those that run."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._config = session.config
        self._cache: pytest.Cache = session.config.cache  # type: ignore[assignment]
        self._measured: dict[str, float] = self._cache.get("lanes/seconds", {})
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._waiting = self._in_order(session.items)
        self._running: dict[Connection, _Unit] = {}
        # pytest names a folder once per session, and so per parent
        self._factory: Any = session.config._tmp_path_factory  # type: ignore[attr-defined]
        self._folder: Path = self._factory.getbasetemp()
        self._started = 0
        self._vllm: Forker | None = None

    def run(self) -> None:
        """Run all units, and hand their reports to the session."""
        if len(self._waiting) > 1 and "torch" in sys.modules:
            # else each unit would import it
            for name in PRELOADED:
                import_module(name)
            import_deepspeed()
        gc.collect()
        # what all processes share stays shared
        gc.freeze()
        needs_server = any(
            item.get_closest_marker("slow") for unit in self._waiting for item in unit.items
        )
        try:
            with fork_server(self._folder) if needs_server else contextlib.nullcontext():
                if any(unit.starts_vllm for unit in self._waiting) and _can_fork_vllm():
                    self._vllm = Forker(self._be_with_vllm, _import_vllm)
                self._go_through_the_queue()
        finally:
            gc.unfreeze()
            if self._vllm is not None:
                self._vllm.end()
            for unit in self._running.values():
                _kill(unit)
            self._cache.set("lanes/seconds", self._measured | self._spent)

    def _go_through_the_queue(self) -> None:
        while self._waiting or self._running:
            while len(self._running) < self._config.option.lanes and (unit := self._next()):
                self._start(unit)
            self._listen()

    def _next(self) -> _Unit | None:
        """Take the longest unit that may run now: servers of vLLM would fight for the cores."""
        busy = any(unit.starts_vllm for unit in self._running.values())
        for index in reversed(range(len(self._waiting))):
            if not (busy and self._waiting[index].starts_vllm):
                return self._waiting.pop(index)
        return None

    def _in_order(self, items: Iterable[pytest.Item]) -> list[_Unit]:
        """Make units, the longest last."""
        grouped: dict[str, list[pytest.Item]] = {}
        for item in items:
            grouped.setdefault(unit_of(item), []).append(item)

        def seconds(unit: _Unit) -> float:
            guesses = [
                max([0.1] + [_GUESSES.get(mark.name, 0.0) for mark in item.iter_markers()])
                for item in unit.items
            ]
            return self._measured.get(unit.name, sum(guesses))

        return sorted((_Unit(*named) for named in grouped.items()), key=seconds)

    def _start(self, unit: _Unit) -> None:
        ours, theirs = Pipe(duplex=False)
        self._started += 1
        folder = self._folder / f"unit{self._started}"
        sys.stdout.flush()
        sys.stderr.flush()
        if unit.starts_vllm and self._vllm is not None:
            named = {"items": [item.nodeid for item in unit.items], "folder": folder.name}
            unit.pid = self._vllm.fork(named, [theirs.fileno()])
        else:
            unit.pid = os.fork()
        if unit.pid == 0:
            ours.close()
            _be(unit, self._config, theirs, folder)
        theirs.close()
        unit.heard = time.monotonic()
        self._running[ours] = unit

    def _be_with_vllm(self, named: dict[str, Any], files: list[int]) -> NoReturn:
        """Be the process of a unit, forked from the one that has imported vLLM."""
        items = {item.nodeid: item for item in self._session.items}
        unit = _Unit("", [items[name] for name in named["items"]])
        parent = Connection(*files, readable=False)
        _be(unit, self._config, parent, self._folder / named["folder"], fork_programs)

    def _listen(self) -> None:
        for connection in wait(list(self._running), timeout=10.0):
            assert isinstance(connection, Connection)
            told = b""
            with contextlib.suppress(EOFError):
                told = connection.recv_bytes()
            if told:
                self._take(self._running[connection], pickle.loads(told))
            else:
                self._close(connection)
        for connection, unit in list(self._running.items()):
            if time.monotonic() - unit.heard > _SILENCE_LIMIT:
                _kill(unit)
            # one that was killed: its own children may keep the connection open
            if not connection.poll() and _has_ended(unit.pid):
                self._close(connection)

    def _take(self, unit: _Unit, ended: _Ended) -> None:
        """Report an ended test."""
        unit.heard = time.monotonic()
        unit.items.pop(0)
        hook = self._config.hook
        hook.pytest_runtest_logstart(nodeid=ended.nodeid, location=ended.location)
        for data in ended.reports:
            report = hook.pytest_report_from_serializable(config=self._config, data=data)
            self._spent[unit.name] += report.duration
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=ended.nodeid, location=ended.location)
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _close(self, connection: Connection) -> None:
        """End a unit whose process tells nothing more; what it has not run waits again."""
        unit = self._running.pop(connection)
        connection.close()
        status = os.waitstatus_to_exitcode(os.waitpid(unit.pid, 0)[1])
        # servers and workers that its tests have left
        _kill(unit)
        if not unit.items:
            return
        item = unit.items[0]
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"its process ended with status {status} while the test ran",
            when="call",
        )
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._take(unit, _Ended(item.nodeid, item.location, [data]))
        if unit.items:
            self._waiting.append(_Unit(unit.name, unit.items))


def _can_fork_vllm() -> bool:
    """Whether it is installed, and for a CPU: a fork could not use a GPU."""
    from lrlhf.rollout.vllm.vllm_base import is_cpu  # noqa: PLC0415  loads torch

    return find_spec("vllm") is not None and is_cpu()


def _import_vllm() -> None:
    from lrlhf.rollout.vllm.vllm_base import import_vllm  # noqa: PLC0415

    with warnings.catch_warnings(action="ignore"):
        import_vllm()
        import_all(_VLLM)


def _kill(unit: _Unit) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(unit.pid, signal.SIGKILL)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


class _Teller:
    """Collects what pytest reports of a test, in the process that runs it."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.reports: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self.reports.append(hook.pytest_report_to_serializable(config=self._config, report=report))


def _be(
    unit: _Unit,
    config: pytest.Config,
    parent: Connection,
    folder: Path,
    prepare: Callable[[], None] = lambda: None,
) -> NoReturn:
    """Be the process of a unit."""
    status = 1
    try:
        os.setsid()
        prepare()
        folder.mkdir()
        config._tmp_path_factory._basetemp = folder  # type: ignore[attr-defined]
        _use_streams_of_its_own(config)
        teller = _Teller(config)
        config.pluginmanager.register(teller)
        for item, following in zip(unit.items, [*unit.items[1:], None], strict=True):
            teller.reports = []
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            parent.send_bytes(pickle.dumps(_Ended(item.nodeid, item.location, teller.reports)))
        parent.send_bytes(b"")
        status = 0
    except BaseException:  # noqa: BLE001  the process ends here, whatever it is
        traceback.print_exc(file=sys.__stderr__)
    finally:
        # not the parent's ends of files and hooks at exit
        os._exit(status)


def _use_streams_of_its_own(config: pytest.Config) -> None:
    """Part from the parent's terminal and from the file into which its output is captured."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    terminal: Any = config.pluginmanager.getplugin("terminalreporter")
    terminal._tw._file = Path(os.devnull).open("w")  # noqa: SIM115  open until the end
    capture.stop_global_capturing()
    capture.start_global_capturing()
