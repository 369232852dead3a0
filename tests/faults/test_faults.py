"""A run with a fault in it stops with a message, and what it wrote is intact, or it recovers.

The table of docs/reliability.md has a line for each.
"""

import builtins
import errno
import io
import os
import signal
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lrlhf.rollout import TransformersEngine
from tests.conftest import build_language_model, build_tokenizer
from tests.faults.cases import named
from tests.faults.faulty_runs import STEPS, Run, assert_intact, assert_same_end, sends
from tests.rewards.reward_server import Server, says, serving

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*")]

LAST = "--ckpt_path=last"
Plan = dict[str, Callable[[L.Trainer], None]]


# ---- what is done to a run


class FullFile(io.FileIO):
    """A file whose device has no space left."""

    def write(self, data: Any) -> int:
        del data
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fills(monkeypatch: pytest.MonkeyPatch, part: str) -> Callable[[L.Trainer], None]:
    """From then on, nothing can be written into files whose path holds ``part``."""
    original = builtins.open

    def opened(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if part not in str(file) or not set(mode) & set("wax+"):
            return original(file, mode, *arguments, **options)
        raw = FullFile(str(file), mode.replace("b", "").replace("t", ""))
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, write_through=True)

    def fill(_: L.Trainer) -> None:
        monkeypatch.setattr(builtins, "open", opened)
        monkeypatch.setattr(Path, "open", opened)

    return fill


def stop_after_two(run: Run) -> None:
    ended = run.fit("--trainer.max_steps=2")
    assert ended.status == 0, ended.err


def stands_in_the_way(run: Run) -> None:
    run.path("").mkdir()
    run.path("checkpoints").write_text("in the way")


def flip_a_bit(run: Run) -> None:
    """Change one bit in the middle of the largest part; between parts nobody misses one."""
    stop_after_two(run)
    path = run.path("checkpoints/last.ckpt")
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        largest = archive.read(max(archive.infolist(), key=lambda part: part.file_size))
    place = data.index(largest) + len(largest) // 2
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])


def tear_a_line(run: Run) -> None:
    stop_after_two(run)
    path = run.path("rollouts.jsonl")
    path.write_bytes(path.read_bytes() + path.read_bytes()[:50])


def widen_the_model(run: Run) -> None:
    stop_after_two(run)
    folder = run.folder / "wider"
    tokenizer = build_tokenizer()
    build_language_model(tokenizer, hidden_size=64).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    run.config["model"]["init_args"]["policy"] = str(folder)


def replace_the_data(run: Run) -> None:
    stop_after_two(run)
    run.write_prompts([f"tell {word}" for word in "abcdefghijkl"])


def rename_the_data(run: Run) -> None:
    (run.folder / "prompts.jsonl").rename(run.folder / "promts.jsonl")


def with_reward(way: str, **options: Any) -> Callable[[Run], None]:
    return lambda run: run.set_reward(way, first=3, **options)


def with_guard(**options: Any) -> Callable[[Run], None]:
    return lambda run: run.config["model"]["init_args"]["guard"].update(options)


def poisons(times: int) -> Callable[[L.Trainer], None]:
    """Makes so many gradients NaN, from now on."""

    def poison(trainer: L.Trainer) -> None:
        left = [times]

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            left[0] -= 1
            return gradient * float("nan") if left[0] >= 0 else gradient

        weight = next(p for p in trainer.lightning_module.parameters() if p.requires_grad)
        weight.register_hook(spoil)

    return poison


def breaks_the_engine(patch: pytest.MonkeyPatch) -> Callable[[L.Trainer], None]:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("the engine is gone")

    return lambda _: patch.setattr(TransformersEngine, "generate", fail)


def die(_: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def kills_a_worker(trainer: L.Trainer) -> None:
    loader: Any = trainer.train_dataloader
    object.__setattr__(loader._fetching, "collate", die)


def answer_interrupts(_: Run) -> None:
    # a shell starts what runs in its background with the signal ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)


# ---- faults that stop a run


@dataclass(frozen=True)
class Fault:
    """What is done to a run, and what it says when it stops."""

    culprits: tuple[str, ...]
    arrange: Callable[[Run], None] = lambda _: None
    """Before it starts."""
    plan: Callable[[pytest.MonkeyPatch], Plan] = lambda _: {}
    """While it trains; what is patched ends with it."""
    flag: str = "--trainer.max_epochs=-1"
    steps: int = 0
    """That its last checkpoint holds."""
    status: int = 1
    traceback: bool = False
    ends_the_same: bool = False
    """Whether it is continued, and compared with a run that nothing disturbed."""


FULL = os.strerror(errno.ENOSPC)
TERMINATED = "terminated; --ckpt_path last continues"
FAULTS = {
    "disk full while a checkpoint is written": Fault(
        (FULL, "step=000003.ckpt"),
        plan=lambda patch: {"phase_update_3": fills(patch, "checkpoints")},
        ends_the_same=True,
    ),
    "disk full while rollouts are written": Fault(
        (FULL, "run/rollouts.jsonl"),
        plan=lambda patch: {"step_2": fills(patch, "rollouts.jsonl")},
        ends_the_same=True,
    ),
    "disk full while metrics are written": Fault(
        (FULL, "run/metrics/metrics.csv"),
        plan=lambda patch: {"step_2": fills(patch, "metrics.csv")},
        ends_the_same=True,
    ),
    "a folder cannot be made": Fault(("run/checkpoints",), arrange=stands_in_the_way, status=2),
    "the named checkpoint is damaged": Fault(
        ("last.ckpt",), arrange=flip_a_bit, flag="--ckpt_path=run/checkpoints/last.ckpt", status=2
    ),
    "the checkpoint has another shape": Fault(
        ("embed_tokens.weight: [260, 32] there, [260, 64] in this model",),
        arrange=widen_the_model,
        flag=LAST,
        status=2,
    ),
    "a reward raises": Fault(
        ("faulty", "the reward is broken"), arrange=with_reward("raise"), steps=2, traceback=True
    ),
    "a reward calls exit": Fault(("faulty",), arrange=with_reward("exit"), steps=2, traceback=True),
    "a reward hangs": Fault(
        ("faulty", "no result after 1 s"), arrange=with_reward("hang", timeout=1.0), steps=2
    ),
    "every gradient is NaN": Fault(
        ("max_skipped", "gradient"),
        arrange=with_guard(max_skipped=1),
        plan=lambda _: {"step_2": poisons(10**9)},
        steps=3,
    ),
    "the engine raises": Fault(
        ("the engine is gone",),
        plan=lambda patch: {"step_2": breaks_the_engine(patch)},
        steps=2,
        traceback=True,
    ),
    "data replaced before resume": Fault(
        ("train data has changed", "--data.accept_changed_data true"),
        arrange=replace_the_data,
        flag=LAST,
        steps=2,
        status=2,
    ),
    "data missing": Fault(
        ("prompts.jsonl", "did you mean 'promts.jsonl'?"), arrange=rename_the_data, status=2
    ),
    "a loader's worker is killed": Fault(
        ("DataLoader worker", "data.num_workers (it is 2)"),
        plan=lambda _: {"start": kills_a_worker},
        flag="--data.num_workers=2",
    ),
    "Ctrl-C": Fault(
        ("interrupted; --ckpt_path last continues from",),
        arrange=answer_interrupts,
        plan=lambda _: {"phase_update_3": sends(signal.SIGINT)},
        status=130,
        ends_the_same=True,
    ),
    "SIGTERM in an update": Fault(
        (TERMINATED,),
        plan=lambda _: {"phase_update_2": sends(signal.SIGTERM)},
        status=143,
        ends_the_same=True,
    ),
    "SIGTERM in a validation": Fault(
        (TERMINATED,),
        plan=lambda _: {"validation": sends(signal.SIGTERM)},
        status=143,
        ends_the_same=True,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_stops_the_run_with_a_message(
    name: str, run: Run, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    fault.arrange(run)
    with monkeypatch.context() as patch:
        ended = run.fit(fault.flag, **fault.plan(patch))
    assert ended.status == fault.status, ended
    assert ("Traceback" in ended.err) == fault.traceback, ended.err
    for culprit in fault.culprits:
        assert culprit in ended.message, ended.err
    if fault.steps:
        assert_intact(run, fault.steps)
    if fault.ends_the_same:
        again = run.fit(LAST)
        assert again.status == 0, again.err
        assert_same_end(run, undisturbed)


# ---- faults that a run survives


@pytest.mark.parametrize("spoil", [flip_a_bit, tear_a_line])
def test_damage_of_the_newest_files_changes_nothing(
    spoil: Callable[[Run], None], run: Run, undisturbed: Run
) -> None:
    spoil(run)
    ended = run.fit(LAST)
    assert ended.status == 0, ended.err
    assert_same_end(run, undisturbed)


def test_a_reward_that_raises_once_costs_the_scores_of_its_responses(run: Run) -> None:
    run.set_reward("raise", first=1, last=2, max_unscorable_fraction=1.0)
    ended = run.fit()
    assert ended.status == 0, ended.err
    assert_intact(run, STEPS)
    assert [record["step"] for record in run.records() if record["score"] is None] == [2] * 8


def test_a_gradient_that_is_nan_once_moves_nothing(run: Run, undisturbed: Run) -> None:
    ended = run.fit(step_2=poisons(1))
    assert ended.status == 0, ended.err
    assert run.last()["global_step"] == STEPS
    assert all(torch.isfinite(value).all() for value in run.weights().values())
    # iterations 0 to 2 drew from the same weights in both runs, and 3 did not
    same = [a == b for a, b in zip(run.records(), undisturbed.records(), strict=True)]
    assert same[:24] == [True] * 24
    assert not all(same[24:])


# ---- a reward service


@pytest.fixture
def server(run: Run) -> Iterator[Server]:
    """One that the run asks, quick to give up."""
    with serving() as started:
        settings = {"retries": 1, "timeout": 2.0}
        function = named("lrlhf.rewards.RemoteReward", urls=started.url, **settings)
        run.config["model"]["init_args"]["rewards"]["init_args"] = {"functions": [function]}
        yield started


def test_a_service_that_fails_once_is_asked_again(run: Run, server: Server) -> None:
    ended = run.fit(step_2=lambda _: server.script.append(says({"detail": "oh"}, 500)))
    assert ended.status == 0, ended.err
    assert_intact(run, STEPS)
    assert not [record for record in run.records() if record["score"] is None]


@pytest.mark.parametrize("way", ["gone", "refuses the token"])
def test_a_service_that_is_lost_stops_the_run(
    run: Run, server: Server, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setitem(os.environ, "LRLHF_REWARD_TOKEN", "t0ken-of-the-test")

    def closes(handler: Any) -> None:
        handler.close_connection = True

    def begin(_: L.Trainer) -> None:
        server.always = closes if way == "gone" else says({"detail": "wrong token"}, 401)
        if way == "gone":
            server.shutdown()
            server.socket.close()

    ended = run.fit(step_2=begin)
    assert ended.status == 1, ended
    assert server.url in ended.message
    assert way == "gone" or "401: wrong token" in ended.message
    assert "t0ken-of-the-test" not in ended.err + ended.out
    assert_intact(run, 2)
