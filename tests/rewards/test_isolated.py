import gc
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from lrlhf.rewards import IsolatedReward, RewardError, RewardResult, Rewards
from lrlhf.rewards.isolation import isolated_worker
from tests.rewards import isolated_functions

HERE = "tests.rewards.isolated_functions."


@pytest.fixture(autouse=True)
def children() -> Iterator[Callable[[], set[psutil.Process]]]:
    """Processes that the test has started; none may be left. Other tests leave theirs."""
    before = set(psutil.Process().children(recursive=True))

    def started() -> set[psutil.Process]:
        return set(psutil.Process().children(recursive=True)) - before

    yield started
    gc.collect()
    assert started() == set()


def ask(
    reward: IsolatedReward, completions: Sequence[str], quota: float = 1.0, **columns: Sequence[Any]
) -> RewardResult:
    """Score through `Rewards`, as a run does."""
    rewards = Rewards([reward], max_unscorable_fraction=quota)
    count = len(completions)
    try:
        return rewards.score(
            [f"p{row}" for row in range(count)],
            completions,
            [[row] for row in range(count)],
            [{name: values[row] for name, values in columns.items()} for row in range(count)],
        )
    finally:
        reward.close()


# ---------------------------------------------------------------------- as in the same process


def test_columns_metrics_and_extras_pass() -> None:
    # of two processes, which share the batch
    reward = IsolatedReward(f"{HERE}about", workers=2)
    result = ask(reward, ["a", "b", "c"], answer=[5, 6, 7], other=[0, 0, 0])
    assert result.scores.tolist() == [5, 6, 7]
    assert result.extras == {"shown": ["a:5", "b:6", "c:7"]}
    assert result.metrics == {
        "half": 0.5,
        "isolated/restarts": 0.0,
        "isolated/failures": 0.0,
        "isolated_reward/unscored_fraction": 0.0,
        "isolated_reward/mixed_fraction": 0.0,
    }
    with pytest.raises(RewardError, match=r"'about' takes an argument 'answer'.*'anser'"):
        ask(reward, ["a"], anser=[5])


def test_async_functions_classes_and_objects_work() -> None:
    assert ask(IsolatedReward(f"{HERE}halves"), ["a"]).scores.tolist() == [0.5]
    scaled = isolated_functions.Scaled(10.0)
    assert ask(IsolatedReward(scaled), ["abc"]).scores.tolist() == [30.0]


@pytest.mark.slow  # the library is imported in the process
def test_the_functions_of_the_library_work_and_may_stop_the_run() -> None:
    result = ask(IsolatedReward("exact_match", start_timeout=120), ["a", "b"], answer=["a", "a"])
    assert result.scores.tolist() == [1.0, 0.0]
    path = "tests.rewards.isolated_library_functions.stops_the_run"
    with pytest.raises(RewardError, match="no reward for 2"):
        ask(IsolatedReward(path, start_timeout=120), ["a", "b"])


# ---------------------------------------------------------------------- values


def test_a_value_that_is_no_number_is_reported_as_in_process() -> None:
    result = ask(IsolatedReward(f"{HERE}returns"), ["an object", ""])
    assert result.scores[0].isnan()
    assert result.scores[1] == 1.0
    assert re.search(r"position 0: .<object object", result.failures[0])
    with pytest.raises(RewardError, match="'returns' returned 1 values for 2"):
        ask(IsolatedReward(f"{HERE}returns"), ["short", ""])


def test_what_cannot_be_logged_is_refused_in_the_function_itself() -> None:
    result = ask(IsolatedReward(f"{HERE}logs_wrongly"), ["a", "bb"])
    assert result.scores.tolist() == [1.0, 2.0]
    assert result.metrics["isolated/restarts"] == 0.0
    for name, said in [
        ("nan", "must be a finite number"),
        ("too large", "must be a finite number"),
        ("too few", "1 values for 2 responses"),
    ]:
        assert said in result.extras[name][0]


def test_a_result_without_end_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_worker, "_MAX_REPLY", 10**6)
    result = ask(IsolatedReward(f"{HERE}returns", timeout=40), ["huge"])
    assert "its result is longer than 1000000 bytes" in result.failures[0]


# ---------------------------------------------------------------------- what may go wrong

FATES = {
    "loop": "no result after 1 s",
    "eat": "MemoryError",
    "segfault": "killed by SIGSEGV",
    "sys.exit": "called sys.exit(3)",
    "abandon": "no result after 1 s",
    "hide": "no result after 1 s",
    "spoil": "reply",
    "close": "ended with exit status",
    "kill group": "killed by SIGKILL",
}


@pytest.mark.parametrize("act", FATES)
def test_a_response_that_makes_it_fail_costs_the_others_nothing(act: str) -> None:
    reward = IsolatedReward(
        f"{HERE}acting", timeout=1 if "after 1 s" in FATES[act] else 5, memory_gb=0.1
    )
    result = ask(reward, ["print", act, "ccc"])  # what is printed is taken for no reply
    assert result.scores[[0, 2]].tolist() == [5.0, 3.0]
    assert result.scores[1].isnan()
    (failure,) = result.failures
    assert "acting failed on 1 of 3 responses, the first is response 1" in failure
    assert FATES[act] in failure
    assert result.metrics["isolated/failures"] == 1.0
    until = time.monotonic() + 12
    while act in ("abandon", "hide") and _abandoned():  # a signal takes its time
        assert time.monotonic() < until, "what the process started has survived it"
        time.sleep(0.05)


def _abandoned() -> bool:
    """Whether a process of a process lives on; it is nobody's child, but says whose it was."""
    lines = (one.info["cmdline"] or [""] for one in psutil.process_iter(["cmdline"]))
    return any(line[-1].endswith(f"# of {os.getpid()}") for line in lines)


def test_what_is_too_slow_as_a_whole_is_scored_one_by_one_until_the_time_is_over() -> None:
    result = ask(IsolatedReward(f"{HERE}slow_together", timeout=0.7), ["a", "bb", "ccc"])
    assert result.scores.tolist() == [1.0, 2.0, 3.0]
    assert not result.failures
    assert result.metrics["isolated/restarts"] == 1.0
    reward = IsolatedReward(f"{HERE}acting", timeout=0.4, total_timeout=1.5)
    reward.prepare()
    started = time.monotonic()
    result = ask(reward, ["loop"] * 20)
    assert time.monotonic() - started < 10
    assert "failed on 20 of 20 responses" in result.failures[0]


# ---------------------------------------------------------------------- surroundings


def test_a_process_has_no_secrets_and_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("MY_SETTING", "given")
    result = ask(IsolatedReward(f"{HERE}surroundings", env=["MY_SETTING"]), ["a"])
    (seen,) = result.extras["seen"]
    assert "WANDB_API_KEY" not in seen["env"]
    assert seen["env"]["MY_SETTING"] == "given"
    assert seen["pid"] != os.getpid()
    assert seen["cwd"] != str(Path.cwd())
    assert not Path(seen["cwd"]).exists()  # removed at the end


def test_a_process_ends_with_its_reward(children: Callable[[], set[psutil.Process]]) -> None:
    reward = IsolatedReward(f"{HERE}lengths", workers=2)
    reward.prepare()
    assert len(children()) == 4  # with their guards; and the fixture finds none


def test_each_response_gets_its_own_score_though_a_function_comes_back_twice() -> None:
    reward = IsolatedReward(f"{HERE}forks")
    rewards = Rewards([reward])
    for texts in (["a", "bb"], ["ccc", "dddd"], ["e", "ffffff"]) * 5:
        result = rewards.score(["p", "q"], texts, [[1], [2]], [{}, {}])
        assert result.scores.tolist() == [float(len(text)) for text in texts]
        assert result.metrics["isolated/restarts"] == 0.0
    reward.close()


def test_a_reply_that_nobody_asked_for_scores_nothing() -> None:
    result = ask(IsolatedReward(f"{HERE}answers_twice"), ["a"])
    assert result.scores.isnan().all()
    # the second where both come at once
    assert re.search("a reply to another request|more than one reply", result.failures[0])


# ---------------------------------------------------------------------- settings


def test_a_function_that_cannot_be_loaded_stops_the_start() -> None:
    for path, said in [(f"{HERE}no_such", "no_such"), (f"{HERE}ACTS", "is a dict, not a function")]:
        with pytest.raises(RewardError, match=f"cannot be loaded in its process(?s:.*){said}"):
            IsolatedReward(path).prepare()


def test_a_function_of_the_script_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_functions.lengths, "__module__", "__main__")
    with pytest.raises(ValueError, match="move it to a module"):
        IsolatedReward(isolated_functions.lengths)
