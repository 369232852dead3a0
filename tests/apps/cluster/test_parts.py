"""Parts of a launch that need no cluster."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from lrlhf.apps.cluster import Cluster, Trainers, launch, trainers
from lrlhf.apps.cluster import rewards as rewards_module
from lrlhf.apps.cluster.connection import ENVIRONMENT
from lrlhf.apps.cluster.guarded_program import GuardedProgram
from lrlhf.apps.cluster.rewards import RayRewards, RewardWorker, packed, unpacked
from lrlhf.apps.cluster.trainers import TrainerStatus, _wait_for_program
from lrlhf.media import Audio, Video
from lrlhf.noted_signals import noted_signals
from lrlhf.rewards import Rewards, completion_segments
from lrlhf.rewards.function import CompletionText, CompletionTurns, RewardError, TextSegment
from lrlhf.run.run_folder import FOLDER_WAIT
from tests.apps.cluster.local_cluster import ends_within
from tests.apps.cluster.toys import darkened, sampled_characters

# three characters of the policy's, and two that it was given
SEGMENTS = [TextSegment("abc", sampled=True), TextSegment("de", sampled=False)]


def test_completions_keep_their_segments_on_the_way_to_a_worker() -> None:
    text = CompletionText(SEGMENTS)
    turns = CompletionTurns(text, [{"role": "assistant", "content": "abc"}])
    sent = pickle.loads(pickle.dumps(packed([text, turns, "plain"])))
    found = unpacked(sent)
    assert found == ["abcde", [{"role": "assistant", "content": "abc"}], "plain"]
    assert [completion_segments(one) for one in found[:2]] == [(*SEGMENTS,)] * 2
    assert type(found[2]) is str


def test_a_worker_scores_as_the_rewards_that_it_was_given() -> None:
    rewards = Rewards([sampled_characters], weights=[2.0])
    worker = RewardWorker(pickle.dumps(rewards), ["/code/of/a/user"])
    assert sys.path.pop() == "/code/of/a/user"
    worker.prepare()
    result = worker.score(
        ["q", "q"], packed([CompletionText(SEGMENTS), "four"]), [[1], [2]], [{}, {}], limited=True
    )
    assert result.scores.tolist() == [6.0, 8.0]


def test_a_function_may_write_into_arrays_as_it_may_without_workers() -> None:
    frames = np.full((2, 1, 1, 3), 4, dtype=np.uint8)
    samples = np.array([1.0, 3.0], dtype=np.float32)
    for one in (frames, samples):
        one.flags.writeable = False  # as Ray gives them
    shown = {"images": [], "videos": [Video(frames, 2.0)], "audios": [Audio(samples, 10)]}
    worker = RewardWorker(pickle.dumps(Rewards([darkened])), [])
    result = worker.score(["q"], packed(["a"]), [[1]], [shown], limited=True)
    # the second frame's 3 * 4 over 2 fps, and two samples that are 1 off their mean
    assert result.scores.tolist() == [6.0 + 20.0]


def fails(**_: Any) -> list[float]:
    raise OSError("no luck")


class Worker:
    """A `RewardWorker` as its actor handle is asked."""

    def __init__(self, rewards: Rewards) -> None:
        worker = RewardWorker(pickle.dumps(rewards), [])
        self.score = SimpleNamespace(remote=partial(partial, worker.score))


def test_failures_beside_a_run_count_apart_from_it_in_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ask(rewards: Rewards) -> None:
        rewards.score(["q"], ["a"], [[1]], [{}], limited=False)

    errors = SimpleNamespace(RayTaskError=ChildProcessError, RayActorError=ProcessLookupError)
    ray = SimpleNamespace(get=lambda call: call(), exceptions=errors)
    monkeypatch.setattr(rewards_module, "import_ray", lambda: ray)
    rewards = RayRewards([fails], max_failures=2)
    rewards._worker = Worker(Rewards([fails], max_failures=2))
    beside = rewards.with_own_failures()
    ask(beside)
    with pytest.raises(RewardError, match="failed in 2 batches"):
        ask(beside)
    ask(rewards)  # the first failure of the run
    with pytest.raises(RewardError, match="failed in 2 batches"):
        ask(rewards)


def guarded(folder: Path, script: str) -> GuardedProgram:
    return GuardedProgram(
        [sys.executable, "-c", script], env=dict(os.environ), folder=folder, log_file=folder / "log"
    )


def test_a_program_ends_with_its_status_and_writes_where_it_is_told(tmp_path: Path) -> None:
    program = guarded(tmp_path, "import os; print(os.getcwd()); raise SystemExit(7)")
    assert program.wait(60) == 7
    assert (tmp_path / "log").read_text().split() == [str(tmp_path)]


def test_a_program_that_is_asked_to_end_does_so_itself(tmp_path: Path) -> None:
    program = guarded(
        tmp_path,
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(4), sys.exit(9)))\n"
        "print('ready', flush=True); time.sleep(1000)",
    )
    while "ready" not in (tmp_path / "log").read_text():
        time.sleep(0.1)
    assert program.wait(0.1) is None
    assert program.ask_to_end()
    # longer than a guard that was asked would wait
    assert program.wait(60) == 9


WORKER = """
import os, sys, time
from pathlib import Path
from lrlhf.apps.cluster.guarded_program import GuardedProgram
child = "import time; time.sleep(1000)"
starts = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
program = GuardedProgram([sys.executable, "-c", starts], env=dict(os.environ), folder=Path.cwd())
program.wait(1000) if sys.argv[1] == "wait" else (time.sleep(2), program.stop())
"""


@pytest.mark.parametrize(
    "end", ["stop", "kill the worker", "kill its child, as Ray does", "kill the guard"]
)
def test_nothing_is_left_of_a_program_that_started_others(end: str) -> None:
    task = "stop" if end == "stop" else "wait"
    worker = subprocess.Popen([sys.executable, "-c", WORKER, task])
    family: list[psutil.Process] = []
    while len(family) < 4:  # what stands between, guard, program and its child
        time.sleep(0.02)
        family = psutil.Process(worker.pid).children(recursive=True)
    if end == "kill the worker":
        worker.kill()
    elif end != "stop":
        family[1 if end == "kill the guard" else 0].kill()
    assert ends_within(15, lambda: any(one.is_running() for one in family))
    worker.kill()
    worker.wait()


def test_the_first_signal_is_noted_and_the_second_interrupts() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with noted_signals(second_interrupts=True) as asked:
        signal.raise_signal(signal.SIGTERM)
        assert asked == [signal.SIGTERM]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_board_counts_looks_and_passes_on_what_was_asked(tmp_path: Path) -> None:
    actor = TrainerStatus(str(tmp_path / "notes"))
    assert [actor.look("a"), actor.look("a")] == [(False, None), (False, None)]
    assert actor.ask_to_end() == actor.looks() == 2
    assert actor.look("a") == (True, None)


def test_a_board_keeps_the_first_end_of_each_attempt_also_when_it_is_started_again(
    tmp_path: Path,
) -> None:
    notes = str(tmp_path / "ray" / "notes.json")
    actor = TrainerStatus(notes)
    assert actor.look("a") == (False, None)
    actor.end("a", 2)
    actor.end("a", 143)
    for one in (actor, TrainerStatus(notes)):
        assert one.look("a") == (False, 2)
        assert one.look("b") == (False, None)
        assert one.attempts() == 2


class Ends:
    """A program that ends so long after it was told, which it hears from the third time on."""

    def __init__(self, after: int) -> None:
        self.told, self.left, self.stopped = 0, after, False

    def wait(self, seconds: float) -> int | None:
        self.left -= self.told >= 3
        return 7 if self.left < 0 else None

    def ask_to_end(self) -> bool:
        self.told += 1
        return self.told >= 3

    def stop(self) -> None:
        self.stopped = True


def test_a_program_that_has_not_begun_is_asked_to_end_again() -> None:
    program: Any = Ends(after=3)
    assert _wait_for_program(program, lambda: (True, None)) == 7
    assert program.told == 3
    assert not program.stopped


@pytest.mark.parametrize("first", [2, 143])
def test_a_trainer_ends_as_the_first_of_the_others_has(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    monkeypatch.setitem(trainers._OTHERS_SECONDS, first, 0.01)
    program: Any = Ends(after=3)
    assert _wait_for_program(program, lambda: (False, first)) == first
    assert program.stopped


def test_a_trainer_that_hangs_though_another_is_through_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(trainers._OTHERS_SECONDS, 0, 0.01)
    with pytest.raises(trainers.TrainerLostError, match="does not end"):
        _wait_for_program(Ends(after=3), lambda: (False, 0))  # type: ignore[arg-type]


def test_a_trainer_sees_no_gpu_without_a_share_of_one_and_waits_for_its_folder() -> None:
    command = trainers.TrainerCommand(
        [], "/", "run", "10.0.0.1:6379", "ns", environment={"OWN": "1"}
    )
    told = trainers._environment(command, 1, 2, ("10.0.0.7", 81))
    expected = {"RANK": "1", "OWN": "1", "CUDA_VISIBLE_DEVICES": "", FOLDER_WAIT: "180"}
    assert {name: told[name] for name in expected} == expected
    assert json.loads(told[ENVIRONMENT]) == {"OWN": "1"}


def test_a_program_is_stopped_before_its_guard_has_begun(tmp_path: Path) -> None:
    program = guarded(tmp_path, "import time; time.sleep(1000)")
    began = time.monotonic()
    program.stop()
    assert time.monotonic() - began < 10
    assert program.wait(0) is not None


def test_a_program_whose_guard_alone_is_ended_is_not_through(tmp_path: Path) -> None:
    program = guarded(tmp_path, "import time; print('ready', flush=True); time.sleep(1000)")
    while "ready" not in (tmp_path / "log").read_text():
        time.sleep(0.1)
    (guard,) = program._below(1)
    guard.terminate()
    assert program.wait(60) == 128 + signal.SIGTERM


def test_a_batch_that_kills_every_worker_is_an_error_of_the_rewards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def get(_: object) -> None:
        raise ProcessLookupError

    errors = SimpleNamespace(RayTaskError=ChildProcessError, RayActorError=ProcessLookupError)
    ray = SimpleNamespace(get=get, exceptions=errors)
    monkeypatch.setattr(rewards_module, "import_ray", lambda: ray)
    with pytest.raises(RewardError, match="lost, and 3 times again on the same batch"):
        RayRewards._result_of(None)


def test_without_a_cluster_a_launch_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(_: object) -> None:
        raise ConnectionError("set the `--address` flag")

    monkeypatch.setattr(launch, "connect", connect)
    with pytest.raises(launch.LaunchError, match=r"ray start --head, or .* --cluster.address null"):
        launch._connected(Cluster(), "ns")


class Fitting:
    """Stands for Ray Train's trainer: so many starts of trainers until each loss of a controller.

    It is a board too, which counts them.
    """

    def __init__(self, starts: Sequence[int]) -> None:
        self.starts = list(starts)
        self.count = 0
        self.allowed: list[int] = []
        self.attempts = SimpleNamespace(remote=lambda: self.count)

    def __call__(self, cluster: Cluster, _: Any) -> Any:
        self.allowed.append(cluster.max_failures)
        return SimpleNamespace(fit=self.fit)

    def fit(self) -> str:
        if not self.starts:
            return "through"
        self.count += self.starts.pop(0)
        raise ProcessLookupError


RAY = SimpleNamespace(
    exceptions=SimpleNamespace(RayActorError=ProcessLookupError), get=lambda count: count
)


@pytest.mark.parametrize(
    ("most", "starts", "allowed"),
    [
        (2, [1, 1], [2, 1, 0]),
        (5, [3, 1], [5, 2, 1]),  # two restarts of Ray Train, then the controller, then it again
        (5, [0, 0], [5, 4, 3]),  # lost before any trainer
        (-1, [4, 4], [-1, -1, -1]),
    ],
)
def test_a_controller_that_is_started_again_may_restart_as_often_as_is_left(
    monkeypatch: pytest.MonkeyPatch, most: int, starts: list[int], allowed: list[int]
) -> None:
    fitting: Any = Fitting(starts)
    monkeypatch.setattr(launch, "trainers", fitting)
    command: Any = None
    assert launch._fitted(RAY, Cluster(max_failures=most), command, fitting) == "through"
    assert fitting.allowed == allowed


@pytest.mark.parametrize(("starts", "again"), [([1, 1, 1], 2), ([3], 2), ([0, 0, 0], 2)])
def test_a_controller_that_is_lost_too_often_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, starts: list[int], again: int
) -> None:
    fitting: Any = Fitting(starts)
    monkeypatch.setattr(launch, "trainers", fitting)
    command: Any = None
    with pytest.raises(launch.LaunchError, match=f"again {again} times, and max_failures"):
        launch._fitted(RAY, Cluster(max_failures=2), command, fitting)


def test_what_waits_for_room_is_of_this_run_alone() -> None:
    def group(state: str, *bundles: dict[str, float]) -> dict[str, Any]:
        return {"name": "", "state": state, "bundles": dict(enumerate(bundles))}

    table = {
        "aa": group("PENDING", {"CPU": 1.0}),
        "bb": group("CREATED", {"CPU": 2.0}),
        "cc": group("PENDING", {"CPU": 6.0, "GPU": 1.0}, {"CPU": 6.0, "GPU": 1.0}),
        "dd": group("PENDING", {"CPU": 4.0}),  # another run's
    }
    util = SimpleNamespace(placement_group_table=lambda: table)
    own = {
        name: SimpleNamespace(id=SimpleNamespace(hex=lambda number=number: number))
        for name, number in (("rewards", "aa"), ("rollouts", "bb"))
    }
    cluster = Cluster(trainers=Trainers(workers=2, gpus=1, cpus=6))
    assert launch._waiting(SimpleNamespace(util=util), cluster, own) == ["rewards", "trainers"]
