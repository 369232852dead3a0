import asyncio
import copy
import functools
import itertools
import math
import pickle
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import GPT2Config, GPT2ForSequenceClassification

from lrlhf.rewards import (
    CompletionText,
    CompletionTurns,
    IsolatedReward,
    LearnedReward,
    LengthPenalty,
    NumericAnswer,
    RewardError,
    RewardFunction,
    RewardResult,
    Rewards,
    TextSegment,
    completion_text,
    out_of_time,
)
from lrlhf.rewards import rewards as rewards_module
from lrlhf.rewards.dispatch import Call, CallTimeoutError, Dispatcher
from lrlhf.rewards.lookup import bind_functions
from lrlhf.rewards.reward_values import Journal
from lrlhf.rewards.rewards import metric_prefixes


def score(rewards: Rewards, count: int = 2, **columns: Sequence[Any]) -> RewardResult:
    """Score `count` responses "c0", "c1", ... to "p0", "p1", ..., with the given columns."""
    return rewards.score(
        [f"p{row}" for row in range(count)],
        [f"c{row}" for row in range(count)],
        [[row, 7] for row in range(count)],
        [{name: values[row] for name, values in columns.items()} for row in range(count)],
    )


def complaining(completions: Sequence[str]) -> list[float]:  # noqa: ARG001
    class OwnError(RewardError):
        def __init__(self, code: int, why: str) -> None:
            super().__init__(f"{code}: {why}")

    raise OwnError(7, "no quota")


def test_an_error_class_of_the_users_own_stops_the_run_by_its_text() -> None:
    with pytest.raises(RewardError, match="reward function 'complaining': 7: no quota"):
        score(Rewards([complaining]))


def ones(completions: Sequence[str]) -> list[float]:
    return [1.0] * len(completions)


def row_numbers(completions: Sequence[str]) -> list[float]:
    return [float(text[1:]) for text in completions]


def raising(completions: Sequence[str]) -> list[float]:
    raise KeyError(f"broken for {len(completions)}")


async def halves(completions: Sequence[str]) -> list[float]:
    await asyncio.sleep(0)
    return [0.5] * len(completions)


class AsyncQuarters(RewardFunction):
    async def __call__(self, *, completions: Sequence[Any], **columns: Any) -> list[float]:
        await asyncio.sleep(0)
        return [0.25] * len(completions)


class PlainClass:
    def __call__(self, completions: Sequence[str]) -> list[float]:
        return [3.0] * len(completions)


# ---------------------------------------------------------------------- scores


def test_scores_are_the_weighted_sum_in_float32() -> None:
    result = score(Rewards([ones, row_numbers], weights=[2.0, 0.5]), count=3)
    # 2·1 + 0.5·row
    assert_close(result.scores, torch.tensor([2.0, 2.5, 3.0]), rtol=0, atol=0)
    assert_close(result.per_function, torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]))
    assert result.scores.dtype == result.per_function.dtype == torch.float32
    assert result.names == ("ones", "row_numbers")


def test_columns_that_do_not_fit_the_arguments_are_named() -> None:
    def needs_solution(solution: Sequence[str]) -> list[float]:
        return [0.0] * len(solution)

    with pytest.raises(RewardError, match=r"'needs_solution'.*'solution'.*mean 'solutions'"):
        score(Rewards([needs_solution]), solutions=["a", "b"])
    with pytest.raises(RewardError, match=r"cannot be given the column 'self'.*rename the column"):
        score(Rewards([AsyncQuarters()]), self=[1, 2])

    def sums(bias: float, completions: Sequence[str], **columns: Any) -> list[float]:
        return [bias + columns["self"][row] for row in range(len(completions))]

    bound = Rewards([functools.partial(sums, 0.5)])  # which has no `self` of its own
    assert score(bound, self=[1, 2]).scores.tolist() == [1.5, 2.5]
    with pytest.raises(RewardError, match="cannot be given the column 'bias'"):
        score(bound, self=[1, 2], bias=[3, 4])


def test_a_response_without_one_of_its_parts_has_no_score() -> None:
    def learned(**_: Any) -> list[float]:
        return [-5.0, math.inf, -7.0]

    def overlong(**_: Any) -> list[float]:
        return [0.0, -1.0, 0.0]

    rewards = Rewards([learned, overlong], max_unscorable_fraction=0.4)
    scores = score(rewards, count=3).scores
    assert scores[[0, 2]].tolist() == [-5.0, -7.0]
    assert scores[1].isnan()  # and not -1, the best of all
    # unless the value may be missing
    optional = Rewards([learned, overlong], optional=["learned"])
    assert score(optional, count=3).scores.tolist() == [-5.0, -1.0, -7.0]


def by_task(prompts: Sequence[str], completions: Sequence[str]) -> list[float | None]:
    """Applies to mathematics: all of the first prompt, none of the second, half of the third."""
    applies = {"sum": True, "code": False}
    numbers = [float(len(text)) for text in completions]
    return [
        number if applies.get(prompt, bool(row % 2)) else None
        for row, (prompt, number) in enumerate(zip(prompts, numbers, strict=True))
    ]


def groups(rewards: Rewards, **options: Any) -> RewardResult:
    prompts = ["sum", "sum", "code", "code", "both", "both"]
    texts = ["a", "bb", "c", "dd", "e", "ff"]
    return rewards.score(prompts, texts, [[1]] * 6, [{}] * 6, **options)


def test_what_a_function_changes_is_its_own() -> None:
    def changes(
        prompts: list[Any], completions: list[Any], completion_ids: list[Any], answer: list[Any]
    ) -> list[float]:
        whole = prompts[0] + completions[0]
        prompts[0].append(whole[-1])
        completions[0][0]["content"] = "other"
        completions[0].append(whole[0])
        completion_ids[0].append(2)
        completions.clear()
        answer[0] = "other"
        return [1.0]

    def reads(
        prompts: list[Any], completions: list[Any], completion_ids: list[Any], answer: list[Any]
    ) -> list[float]:
        assert (prompts, completions) == ([[*prompt]], [[{"role": "assistant", "content": "4"}]])
        assert (completion_text(completions[0]), completion_ids, answer) == ("4", [[1]], ["four"])
        return [2.0]

    prompt = ({"role": "user", "content": "2 + 2?"},)
    turns = CompletionTurns(CompletionText([TextSegment("4", sampled=True)]))
    for functions in ([changes, reads], [reads, changes]):
        result = Rewards(functions).score([prompt], [turns], [[1]], [{"answer": "four"}])
        assert result.scores.tolist() == [3.0], result.failures


def test_a_function_that_declines_a_whole_group_leaves_it_to_the_others() -> None:
    def longer(completions: Sequence[str]) -> list[float]:
        return [10.0 * len(text) for text in completions]

    rewards = Rewards([by_task, longer], weights=[2.0, 1.0], max_unscorable_fraction=0.4)
    result = groups(rewards)
    # as torch.nansum over the weighted values, but where the sums of a group differ in their parts
    assert result.scores[:4].tolist() == [2 + 10, 4 + 20, 10, 20]
    assert result.scores[4:].isnan().all()
    assert result.metrics["by_task/mixed_fraction"] == pytest.approx(1 / 3)
    assert result.metrics["longer/mixed_fraction"] == 0
    assert re.search("by_task: returned None for some", result.failures[0])
    with pytest.raises(RewardError, match="could score 2 of 6 "):
        groups(Rewards([by_task, longer], max_unscorable_fraction=0.3))
    # what a group is, the caller may say; and within one that is optional, parts may be missing
    apart = groups(rewards, group_ids=range(6)).scores
    assert apart.tolist() == [12, 24, 10, 20, 10, 24]
    optional = Rewards([by_task, longer], weights=[2.0, 1.0], optional=["by_task"])
    assert groups(optional).scores.tolist() == [12, 24, 10, 20, 10, 24]


def test_a_group_that_no_function_applies_to_is_left_out_and_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def declines(prompts: Sequence[str]) -> list[float | None]:
        return [1.0 if prompt == "sum" else None for prompt in prompts]

    scores = groups(Rewards([declines], max_unscorable_fraction=0.0)).scores
    assert scores.isnan().tolist() == [False] * 2 + [True] * 4
    assert caplog.text.count("no reward function applies to some responses") == 1

    def nothing(completions: Sequence[str]) -> list[None]:
        return [None] * len(completions)

    # where it is so for every batch, nothing is ever learnt
    rewards = Rewards([nothing], max_failures=3)
    for _ in range(2):
        assert groups(rewards).scores.isnan().all()
    with pytest.raises(RewardError, match="each returned None for all 6 responses"):
        groups(rewards)


@pytest.mark.parametrize("failing", ["nan", "raises", "learned"])
def test_what_fails_declines_nothing(failing: str) -> None:
    class Learned(RewardFunction):
        none_is_missing = True

        def __call__(self, *, completions: Sequence[Any], **_: Any) -> list[None]:
            return [None] * len(completions)

    def nan(completions: Sequence[str]) -> list[float]:
        return [math.nan] * len(completions)

    function = {"nan": nan, "raises": raising, "learned": Learned()}[failing]
    with pytest.raises(RewardError, match="could score 6 of 6 "):
        groups(Rewards([function, ones]))


def test_chats_are_lists_of_messages_that_add_up_to_the_whole() -> None:
    chat = ({"role": "user", "content": "hi"},)
    answer = [{"role": "assistant", "content": "hello"}]
    seen: list[Any] = []

    def as_trl(prompts: Any, completions: Any) -> list[float]:
        for prompt, completion in zip(prompts, completions, strict=True):
            seen.append(prompt + completion)
            prompt.append({"role": "user", "content": "mine alone"})
        return [1.0] * len(prompts)

    functions = {"first": as_trl, "second": functools.partial(as_trl)}
    Rewards(functions).score([chat, chat], [answer, answer], [[1], [1]], [{}, {}])
    assert seen == [[*chat, *answer]] * 4
    assert chat == ({"role": "user", "content": "hi"},)


def test_names_of_trl_are_answered_with_what_they_are_here(tmp_path: Path) -> None:
    def asks(completions: Sequence[str], trainer_state: Any) -> list[float]:
        return [float(trainer_state.global_step)] * len(completions)

    with pytest.raises(RewardError, match="take step and max_steps"):
        score(Rewards([asks]))
    for model in ("org/reward-model-7b", "tiny_cls", "Skywork-0.6B", str(tmp_path)):
        with pytest.raises(ValueError, match=rf"LearnedReward\(source='{re.escape(model)}'\)"):
            Rewards([model])
    small = GPT2Config(n_layer=1, n_head=1, n_embd=4, vocab_size=8, num_labels=1)
    with pytest.raises(ValueError, match=r"GPT2ForSequenceClassification is a model.*LearnedRew"):
        Rewards([GPT2ForSequenceClassification(small)])


def test_sums_beyond_float32_are_refused() -> None:
    with pytest.raises(RewardError, match=r"response 0 .*float32"):
        score(Rewards([lambda completions: [3e38, 0.0]], weights=[10.0]))


# ---------------------------------------------------------------------- failures


def test_a_function_that_fails_leaves_its_values_out_and_says_why() -> None:
    def logs_nan(completions: Sequence[str], log_metric: Any) -> list[float]:
        log_metric("m", math.nan)
        return ones(completions)

    def logs_one(completions: Sequence[str], log_extra: Any) -> list[float]:
        log_extra("e", ["only one"])
        return ones(completions)

    functions = [raising, logs_nan, logs_one, ones]
    result = score(Rewards(functions, optional=["raising", "logs_nan", "logs_one"]))
    assert result.scores.tolist() == [1.0, 1.0]
    assert result.per_function[:, :3].isnan().all()
    assert result.metrics["raising/unscored_fraction"] == 1.0
    for failure, said in zip(
        result.failures,
        [r"raising: Traceback(?s:.*)KeyError: 'broken for 2'", r"'m', nan", "1 values for 2 resp"],
        strict=True,
    ):
        assert re.search(said, failure)


class Paid(RewardFunction):
    """Logs what it cost under the name that all of its class have."""

    def __init__(self, paid: float) -> None:
        self.paid = paid

    def __call__(self, *, completions: Sequence[Any], log_metric: Any, **_: Any) -> list[float]:
        if self.paid < 0:
            raise OSError("no answer")
        log_metric("judge/cost", self.paid)
        log_metric("judge/cost", self.paid + 2.0)
        return [1.0] * len(completions)


def costs(functions: dict[str, Any], count: int = 2, **columns: Sequence[Any]) -> dict[str, float]:
    recipe = {name: {name: 1.0} for name in functions} if columns else None
    rewards = Rewards(functions, recipe=recipe, max_unscorable_fraction=1.0)
    metrics = score(rewards, count=count, **columns).metrics
    return {name: value for name, value in metrics.items() if name.endswith("cost")}


def test_metrics_of_one_class_are_told_apart_by_their_functions() -> None:
    both = {"one": Paid(1.0), "other": Paid(5.0)}
    assert costs(both) == {"one/judge/cost": 2.0, "other/judge/cost": 6.0}
    assert costs({"one": Paid(1.0), "ones": ones}) == {"judge/cost": 2.0}  # which logs nothing


def test_the_name_of_a_metric_does_not_depend_on_who_was_asked_or_failed() -> None:
    both = {"one": Paid(1.0), "other": Paid(5.0)}
    assert costs(both, label=["one", "one"]) == {"one/judge/cost": 2.0}
    assert costs(both, label=["other", "other"]) == {"other/judge/cost": 6.0}
    fails = {"one": Paid(-1.0), "other": Paid(5.0)}
    assert costs(fails) == {"other/judge/cost": 6.0}


def test_the_users_own_functions_that_log_are_told_apart_whatever_they_are() -> None:
    def plain(completions: Sequence[str], log_metric: Any) -> list[float]:
        log_metric("judge/cost", 7.0)
        return ones(completions)

    expected = {"one/judge/cost": 2.0, "plain/judge/cost": 7.0}
    assert costs({"one": Paid(1.0), "plain": functools.partial(plain)}) == expected
    # functions of the library have names that nobody else uses
    beside = metric_prefixes(bind_functions([plain, NumericAnswer(), LengthPenalty(8, 0.1)]))
    assert set(beside.values()) == {""}
    isolated = {
        "plain": plain,
        "isolated": IsolatedReward("tests.rewards.isolated_functions.about"),
    }
    assert metric_prefixes(bind_functions(isolated)) == {
        "plain": "plain/", "isolated": "isolated/",
    }  # fmt: skip


def test_failures_are_counted_over_the_run_and_not_only_in_a_row() -> None:
    fails = itertools.cycle([True, False])

    def flaky(completions: Sequence[str]) -> list[float]:
        if next(fails):
            raise OSError("no answer")
        return ones(completions)

    rewards = Rewards([flaky, ones], optional=["flaky"])
    for _ in range(20):
        score(rewards)
    # the 11th failure: 10 successes made up for one
    with pytest.raises(RewardError, match=r"'flaky' failed in 10 batches(?s:.*)no answer"):
        score(rewards)


def test_a_batch_that_fails_in_part_counts_in_part() -> None:
    # each batch counts for 0.5, less half of a tenth: 0.45
    half = {"half": lambda completions: [math.inf, 1.0], "ones": ones}
    rewards = Rewards(half, optional=["half"], max_failures=1)
    for _ in range(2):
        score(rewards)
    with pytest.raises(RewardError, match="'half' failed in 1 batches"):
        score(rewards)


def test_sys_exit_in_a_function_is_its_failure() -> None:
    def leaves(**_: Any) -> list[float]:
        raise SystemExit(3)

    async def leaves_too(**_: Any) -> list[float]:
        leaves()
        return []

    rewards = Rewards([leaves, leaves_too, halves], optional=["leaves", "leaves_too"])
    assert len(score(rewards).failures) == 2
    assert score(rewards).scores.tolist() == [0.5, 0.5]  # the event loop still runs


def test_too_many_unscorable_responses_stop_the_run() -> None:
    def mostly(completions: Sequence[str]) -> list[float | None]:
        return [math.nan if row < 3 else 1.0 for row in range(len(completions))]

    score(Rewards([mostly], max_unscorable_fraction=0.3), count=10)
    with pytest.raises(RewardError, match=r"could score 3 of 10 .*29%") as caught:
        score(Rewards([mostly], max_unscorable_fraction=0.29), count=10)
    assert "mostly (3 without a value)" in str(caught.value)
    assert "max_unscorable_fraction" in str(caught.value)


# ---------------------------------------------------------------------- time


def test_functions_run_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=20)  # one after the other would never meet

    def meets(completions: Sequence[str]) -> list[float]:
        together.wait()
        return ones(completions)

    async def meets_async(completions: Sequence[str]) -> list[float]:
        await asyncio.to_thread(together.wait)
        return ones(completions)

    assert score(Rewards({"a": meets, "b": meets, "c": meets_async})).scores.tolist() == [3, 3]


def test_a_slow_async_function_is_cancelled() -> None:
    cancelled = threading.Event()

    async def slow(completions: Sequence[str]) -> list[float]:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return ones(completions)

    result = score(Rewards([slow, ones], timeout=0.5, optional=["slow"]))
    assert result.failures[0].startswith("slow: no result after 0.5 s")
    assert cancelled.wait(20)


def test_who_waits_for_an_earlier_call_has_no_more_time_than_others() -> None:
    cancelled: list[float] = []

    async def endless(*, second: bool) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            if second:
                cancelled.append(time.monotonic())
                ended.set()

    def first_blocks_then_awaits() -> Any:
        second = blocked.is_set()
        if not second:
            blocked.set()
            time.sleep(3.4)
        return endless(second=second)

    blocked, ended, dispatcher = threading.Event(), threading.Event(), Dispatcher(timeout=2.0)
    call = Call("f", first_blocks_then_awaits, {})
    assert isinstance(dispatcher.run([call])[0].error, CallTimeoutError)
    started = time.monotonic()
    assert isinstance(dispatcher.run([call])[0].error, CallTimeoutError)
    assert ended.wait(20)
    assert cancelled[0] - started < 2.9  # and not 1.4 until its turn came and then 2.0


def test_a_late_result_is_not_mixed_into_a_later_call() -> None:
    release = threading.Event()
    calls: list[int] = []

    def late(completions: Sequence[str], log_metric: Any, log_extra: Any) -> list[float]:
        calls.append(len(completions))
        value = 100.0 * len(calls)
        if len(calls) == 1:
            release.wait(10)
        log_metric("value", value)
        log_extra("value", [value] * len(completions))
        return [value] * len(completions)

    rewards = Rewards([late, ones], timeout=0.8, optional=["late"])
    first = score(rewards)
    assert "value" not in first.metrics
    release.set()
    second = score(rewards)
    assert second.metrics["value"] == 200.0
    assert second.extras["value"] == [200.0, 200.0]
    assert second.per_function[:, 0].tolist() == [200.0, 200.0]
    assert first.extras == {}
    # nor into what was taken from the journal of the call
    journal = Journal(1)
    logged = journal.close()
    journal.log_metric("value", 1.0)
    assert logged.metrics == {}


def test_a_function_is_not_entered_again_before_it_is_done() -> None:
    release = threading.Event()
    entered: list[int] = []

    def hangs(completions: Sequence[str]) -> list[float]:
        entered.append(1)
        release.wait(10)
        return ones(completions)

    rewards = Rewards([hangs, ones], timeout=0.5, optional=["hangs"])
    for _ in range(3):
        assert score(rewards).failures[0].startswith("hangs: no result after 0.5 s")
    assert entered == [1]
    release.set()


def test_the_default_timeout_spares_functions_that_end_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Slow(RewardFunction):
        def __call__(self, *, completions: Sequence[Any], **columns: Any) -> list[float]:
            time.sleep(0.3)
            return [1.0] * len(completions)

    class Computing(Slow):
        ends_by_itself = True

    assert 600 <= rewards_module._TIMEOUT_S <= 7200  # of the phase: see Deadlines
    monkeypatch.setattr(rewards_module, "_TIMEOUT_S", 0.1)
    assert not score(Rewards([Computing()])).failures
    for function, options in ((Slow(), {}), (Computing(), {"timeout": 0.1})):
        rewards = Rewards([function], max_unscorable_fraction=1.0, **options)
        assert "no result after 0.1 s" in score(rewards).failures[0]
    assert LearnedReward.ends_by_itself


def test_a_function_can_ask_whether_it_has_run_out_of_time() -> None:
    ended = threading.Event()

    def computes(completions: Sequence[str]) -> list[float]:
        assert not out_of_time()
        while not out_of_time():
            time.sleep(0.02)
        ended.set()
        return ones(completions)

    result = score(Rewards([computes, ones], timeout=0.5, optional=["computes"]))
    assert result.failures[0].startswith("computes: no result after 0.5 s")
    assert ended.wait(20)
    assert not out_of_time()  # there is no call here


def test_preparing_happens_in_the_callers_thread_and_outside_the_timeout() -> None:
    class Heavy(RewardFunction):
        def prepare(self) -> None:
            self.thread = threading.current_thread()
            time.sleep(0.9)

        def __call__(self, *, completions: Sequence[Any], **columns: Any) -> list[float]:
            return [1.0] * len(completions)

    heavy = Heavy()
    assert score(Rewards([heavy], timeout=0.8)).scores.tolist() == [1.0, 1.0]
    assert heavy.thread is threading.current_thread()


# ---------------------------------------------------------------------- kinds of functions


def test_every_kind_of_function_is_called() -> None:
    functions = {
        "function": ones,
        "async": halves,
        "object": PlainClass(),
        "async object": AsyncQuarters(),
        "async partial": functools.partial(halves),
        "class": PlainClass,
        "awaitable": lambda completions: halves(completions),
        "path": "tests.rewards.test_rewards.ones",
        "class path": "tests.rewards.test_rewards.PlainClass",
    }
    result = score(Rewards(functions))
    assert result.per_function[0].tolist() == [1.0, 0.5, 3.0, 0.25, 0.5, 3.0, 0.5, 1.0, 3.0]


def test_copies_and_pickles_work_like_the_original() -> None:
    rewards = Rewards([ones, halves])
    score(rewards)
    for other in (copy.deepcopy(rewards), pickle.loads(pickle.dumps(rewards))):
        assert score(other).scores.tolist() == [1.5, 1.5]


# ---------------------------------------------------------------------- wrong options


def positional(completions: Sequence[str], /) -> list[float]:
    return ones(completions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"functions": ones}, "must be a list"),
        ({"functions": ["exact_mach"]}, "did you mean 'exact_match'"),
        ({"functions": ["regex_format"]}, "needs pattern: .*class_path.*RegexFormat"),
        ({"functions": [positional]}, "'completions' by position only"),
        ({"functions": [ones, ones]}, "2 reward functions are called 'ones'.*mapping"),
        ({"functions": [ones], "weights": [1.0, 2.0]}, r"2 entries for 1 reward.*\(ones\)"),
        ({"functions": [ones], "weights": {"one": 1.0}}, "'one'; did you mean 'ones'"),
        ({"functions": {"a": ones, "b": ones}, "weights": {"a": 1.0}}, "lacks 'b'"),
        ({"functions": [ones], "weights": [0.0]}, "every weight is 0"),
        ({"functions": [ones], "timeout": 0.0}, "timeout is 0.0"),
        ({"functions": [ones], "max_failures": 0}, "max_failures is 0"),
        ({"functions": [ones], "optional": ["one"]}, "optional: .*'one'; did you mean 'ones'"),
    ],
)
def test_wrong_options_are_explained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rewards(**options)


def test_only_a_column_that_responses_are_compared_with_is_a_right_answer() -> None:
    def begins_with(completions: Sequence[str], letter: Sequence[str]) -> list[float]:
        return [float(text.startswith(own)) for text, own in zip(completions, letter, strict=True)]

    def lies_between(completions: Sequence[str], low: Any, high: Any) -> list[float]:
        return [
            float(own < text < top) for text, own, top in zip(completions, low, high, strict=True)
        ]

    def is_as_long(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
        return [float(len(own) == len(text)) for own, text in zip(completions, answer, strict=True)]

    functions = [begins_with, lies_between, is_as_long, NumericAnswer(answer_column="answer")]
    headings = {"letter": "letter", "answer": "right answer"}
    assert Rewards(functions).answer_columns == headings


def test_a_failure_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def broken(**_: object) -> list[float]:
        raise KeyError("gold")

    with pytest.raises(RewardError, match=r"First failure: broken: KeyError: 'gold'$"):
        Rewards([broken]).score(["p"], ["a"], [[1]], [{}])
    (told,) = caplog.messages
    assert told.count("Traceback") == 1
    assert 'raise KeyError("gold")' in told
