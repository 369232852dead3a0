"""Facts are planted in the values of rewards: the lab tells them."""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lrlhf.apps.lab.reward_lab import Lab, Response, as_json, as_page, as_text, look_at
from lrlhf.apps.lab.reward_lab.lab import RewardStats
from lrlhf.apps.lab.reward_lab.response_inputs import of_record, read_response_inputs
from lrlhf.apps.lab.reward_lab.scoring import (
    ScoredResponses,
    reads_media,
    score_responses,
    with_times,
)
from lrlhf.datamodules.rows.media_rows import MediaReader
from lrlhf.media import MediaRefs
from lrlhf.rewards import Rewards
from lrlhf.rewards.functions.numeric_answer import NumericAnswer
from lrlhf.statistics.intervals import wilson_interval
from tests.conftest import build_tokenizer
from tests.vlms import build_vlm

NAN = math.nan


def none_for_a_tenth(completions: Sequence[str]) -> list[float | None]:
    return [None if "7" in text else float("a" in text) for text in completions]


def length(completion_ids: Sequence[Sequence[int]]) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def digit(completions: Sequence[str]) -> list[float]:
    return [float(text[0]) for text in completions]


def same_digit(completions: Sequence[str]) -> list[float]:
    return [float(text[0]) for text in completions]


def slow_at_five(prompts: Sequence[str]) -> list[float]:
    if any("prompt 5" in prompt for prompt in prompts):
        time.sleep(1.0)
    return [1.0 for _ in prompts]


def broken_at_three(prompts: Sequence[str]) -> list[float]:
    if any("prompt 3" in prompt for prompt in prompts):
        raise KeyError("no such thing")
    return [0.5 for _ in prompts]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    # without a line's end: the last row counts all the same
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def answers(folder: Path) -> Path:
    """Twelve prompts with ten completions each: ``<digit><letters>``, one in ten with a 7."""
    rows = [
        {"prompt": f"prompt {p}", "completions": [f"{(p + k) % 10}" + "ab"[k % 2] * (p + k)
                                                  for k in range(10)]}
        for p in range(12)
    ]  # fmt: skip
    return write(folder / "answers.jsonl", rows)


def scored(folder: Path, *functions: Any, **options: Any) -> ScoredResponses:
    rewards = Rewards(list(functions), max_failures=None)
    return score_responses(
        read_response_inputs(answers(folder)), rewards, build_tokenizer(), **options
    )


def part_of(lab: Lab, name: str) -> RewardStats:
    return next(part for part in lab.parts if part.name == name)


def test_responses_without_a_value_are_counted_and_named(tmp_path: Path) -> None:
    lab = look_at(scored(tmp_path, none_for_a_tenth, digit).responses)

    missing = part_of(lab, "none_for_a_tenth").missing
    assert (missing.count, missing.of) == (12, 120)
    rows = lab.without_value["none_for_a_tenth"]
    assert all(row.completion.startswith("7") for row in rows)
    assert [row.place for row in rows] == [f"answers.jsonl:{n}" for n in range(1, 13)]
    # the sum lacks a part there, and cannot be compared with the others of its prompt
    assert part_of(lab, "score").missing.count == 120
    assert part_of(lab, "digit").missing.count == 0
    assert "10.0% (5.8% to 16.7%)" in as_text(lab)  # Wilson's interval of 12 of 120


def test_a_reward_that_is_the_length_and_two_that_are_the_same_are_told(tmp_path: Path) -> None:
    lab = look_at(scored(tmp_path, length, digit, same_digit, slow_at_five).responses)

    assert lab.facts == [
        "length orders the responses exactly as their length does",
        "slow_at_five gives every response the same value, 1",
        "digit and same_digit give every response the same value",
    ]
    assert part_of(lab, "length").with_length.value == pytest.approx(1.0)
    assert lab.correlations["digit", "same_digit"].value == pytest.approx(1.0)
    assert math.isnan(lab.correlations["digit", "slow_at_five"].value)


def test_the_slow_function_and_its_responses_are_named(tmp_path: Path) -> None:
    found = scored(tmp_path, digit, slow_at_five)
    lab = with_times(look_at(found.responses), found)

    times = {one.name: one for one in lab.times}
    assert times["slow_at_five"].calls == times["digit"].calls == 12
    assert 0.75 < times["slow_at_five"].call_p99 < 20  # 0.98 of the way from the second slowest
    assert times["slow_at_five"].response_p99 == pytest.approx(
        times["slow_at_five"].call_p99 / 10, rel=1e-6
    )
    assert lab.slowest[0].response.place == "answers.jsonl:6"
    name, seconds = lab.slowest[0].detail.split()[:2]
    assert name == "slow_at_five:"
    assert float(seconds) >= 1.0


def test_calls_hold_whole_prompts(tmp_path: Path) -> None:
    found = scored(tmp_path, digit, prompts_per_call=5)

    assert [one.responses for one in found.timings] == [50, 50, 20]


def test_failures_are_told_and_stop_nothing(tmp_path: Path) -> None:
    found = scored(tmp_path, digit, broken_at_three)
    lab = with_times(look_at(found.responses), found)

    assert lab.failures == {"broken_at_three: KeyError: 'no such thing'": 1}
    assert part_of(lab, "broken_at_three").missing.count == 10
    assert "1 calls: broken_at_three: KeyError" in as_text(lab)


def test_rows_and_messages_reach_the_functions(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def looks(prompts: Any, completions: Any, answer: Any) -> list[float]:
        seen.update(prompts=prompts, completions=completions, answer=answer)
        return [1.0] * len(prompts)

    chat = [{"role": "user", "content": "2 + 2?"}]
    path = write(tmp_path / "chat.jsonl", [{"prompt": chat, "completion": "4", "answer": "four"}])

    score_responses(read_response_inputs(path), Rewards([looks]), build_tokenizer())

    assert seen["prompts"] == [chat]
    assert seen["completions"] == [[{"role": "assistant", "content": "4"}]]
    assert seen["answer"] == ["four"]


def groups_of(path: Path, *functions: Any, media: MediaReader = MediaReader()) -> list[int]:  # noqa: B008
    """Number the group of each response in the order of the file."""
    given = read_response_inputs(path, media)
    found = score_responses(given, Rewards(list(functions)), build_tokenizer(), media=media)
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(one.group, len(numbers)) for one in found.responses]


def test_functions_get_the_columns_that_a_run_adds_and_those_that_other_rows_have(
    tmp_path: Path,
) -> None:
    seen: dict[str, list[Any]] = {"step": [], "max_steps": [], "answer": []}

    def looks(completions: Any, step: Any, max_steps: Any, answer: Any) -> list[float]:
        for name, values in (("step", step), ("max_steps", max_steps), ("answer", answer)):
            seen[name] += values
        return [1.0] * len(completions)

    path = write(tmp_path / "rows.jsonl", [
        {"prompt": "a", "completion": "b", "answer": "x"},
        {"prompt": "c", "completion": "d"},
        {"prompt": "e", "completion": "f", "step": 7},
        {"prompt": "g", "completion": "h", "columns": {"answer": "y"}, "rewards": {}, "step": 30,
         "rank": 0, "group": 0},
    ])  # fmt: skip

    score_responses(read_response_inputs(path), Rewards([looks]), build_tokenizer(), max_steps=40)

    assert seen == {"step": [0, 0, 7, 30], "max_steps": [40] * 4, "answer": ["x", None, None, "y"]}


def test_a_prompt_stands_in_for_messages_that_are_null(tmp_path: Path) -> None:
    path = write(
        tmp_path / "rows.jsonl", [{"messages": None, "prompt": "asked", "completion": "b"}]
    )

    assert [one.prompt for one in read_response_inputs(path)] == ["asked"]


def evaluated(**more: Any) -> dict[str, Any]:
    """A line of an evaluation: the first prompt of its batch has the group 0."""
    return {"step": 5, "group": 0, "prompt": "p", "completion": "1a", "columns": {}, "rewards": {},
            **more}  # fmt: skip


def test_evaluations_of_several_sets_and_batches_are_not_merged(tmp_path: Path) -> None:
    path = write(tmp_path / "eval_scores_5.jsonl", [
        evaluated(set="one", source="a.jsonl", row=1, sample=0),
        evaluated(set="one", source="a.jsonl", row=1, sample=1),
        evaluated(set="one", source="a.jsonl", row=2),  # of the next batch
        evaluated(set="two", source="a.jsonl", row=1),
        evaluated(set="one", source="b.jsonl", row=1),
        evaluated(set="one", source="a.jsonl", row=1, temperature=1.0),
        evaluated(set="one", source="a.jsonl", row=1, step=6),
    ])  # fmt: skip

    assert groups_of(path, digit) == [0, 0, 1, 2, 3, 4, 5]


def test_functions_are_told_what_a_run_has_cut_off(tmp_path: Path) -> None:
    def cut(truncated: Sequence[bool]) -> list[float]:
        return [float(one) for one in truncated]

    lines = [evaluated(finish_reason="length"), evaluated(finish_reason="stop"), evaluated()]
    lines.append({"prompt": "p", "completion": "1a", "finish_reason": "length"})  # a user's column
    path = write(tmp_path / "rollouts.jsonl", lines)
    found = score_responses(read_response_inputs(path), Rewards([cut]), build_tokenizer())
    assert [one.score for one in found.responses] == [1.0, 0.0, 0.0, 0.0]


def test_the_ranks_of_a_run_are_not_merged(tmp_path: Path) -> None:
    places = [(0, 0, 1), (0, 0, 1), (1, 0, 1), (0, 1, 1)]
    path = write(tmp_path / "rollouts.jsonl", [
        evaluated(rank=rank, group=group, source="a.jsonl", row=row) for rank, group, row in places
    ])  # fmt: skip

    # the same row again in a step is a group of its own
    assert groups_of(path, digit) == [0, 0, 1, 2]


def test_prompts_with_equal_text_and_other_answers_are_not_the_same(tmp_path: Path) -> None:
    def right(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
        return [float(one == wanted) for one, wanted in zip(completions, answer, strict=True)]

    rows = [{"prompt": "p", "completion": "1", "answer": answer, "id": at}
            for at, answer in enumerate("1121")]  # fmt: skip
    path = write(tmp_path / "rows.jsonl", rows)

    assert groups_of(path, right) == [0, 0, 1, 0]
    assert groups_of(path, digit) == [0, 0, 0, 0]
    assert groups_of(path, NumericAnswer(answer_column="answer")) == [0, 0, 1, 0]


def image(folder: Path, name: str, width: int) -> str:
    Image.new("RGB", (width, 8)).save(folder / name)
    return name


def test_images_of_rows_reach_the_functions_and_tell_prompts_apart(tmp_path: Path) -> None:
    media = MediaReader(build_vlm("qwen2_vl").processor)
    small, large = image(tmp_path, "small.png", 8), image(tmp_path, "large.png", 16)
    turns = [{"role": "user", "content": [{"type": "image", "image": small},
                                          {"type": "text", "text": "What is it?"}]}]  # fmt: skip
    bare = [{"role": "user", "content": [{"type": "image"}]}]
    path = write(tmp_path / "rows.jsonl", [
        {"prompt": "p", "completions": ["1a", "2b"], "image": small},
        {"prompt": "p", "completion": "3c", "images": [large, small]},
        {"prompt": turns, "completion": "4d"},
        evaluated(source="s", row=1, messages=bare, media=[str(tmp_path / large)]),
        {"prompt": "p", "completion": "5e"},
    ])  # fmt: skip
    seen: list[Any] = []

    def looks(prompts: Any, images: Any, videos: Any) -> list[float]:
        assert videos == [[]] * len(prompts)
        seen.extend([one.width for one in shown] for shown in images)
        return [1.0] * len(prompts)

    assert groups_of(path, looks, media=media) == [0, 0, 1, 2, 3, 4]
    assert seen == [[8], [8], [16, 8], [8], [16], []]
    assert read_response_inputs(path, media)[3].prompt == (
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
    )
    assert groups_of(path, digit, media=media) == [0, 0, 1, 2, 3, 4]


def test_an_image_that_cannot_be_read_is_named_where_a_function_asks_for_it(tmp_path: Path) -> None:
    media = MediaReader(build_vlm("qwen2_vl").processor)
    path = write(tmp_path / "rows.jsonl", [
        {"prompt": "p", "completion": "1", "image": image(tmp_path, "there.png", 8)},
        {"prompt": "p", "completion": "1", "image": "missing.png"},
    ])  # fmt: skip

    def looks(images: Sequence[Any]) -> list[float]:
        return [1.0 for _ in images]

    assert (reads_media(Rewards([looks])), reads_media(Rewards([digit]))) == (True, False)
    with pytest.raises(ValueError, match=r"row 2: .*missing\.png"):
        read_response_inputs(path, media, reads_media=True)
    assert len(read_response_inputs(path, media)) == 2


def test_videos_of_a_run_are_told_from_images() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "video"}]
    chat = evaluated(messages=[{"role": "user", "content": parts}], media=["a.png", "b.gif"])

    assert of_record(chat) == MediaRefs(("a.png",), ("b.gif",))
    assert of_record(evaluated(media=["a.png", "b.mp4"])) == MediaRefs(("a.png",), ("b.mp4",))
    assert of_record(evaluated()) == MediaRefs()


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "response": "b"}, "row 2: there is no column completion or completions"),
        ({"completion": "b"}, "row 2: prompt is None"),
        ({"prompt": "a", "completions": []}, "row 2: completions is an empty list"),
        ({"prompt": "a", "completion": 3}, "row 2: completion is 3"),
        ({"prompt": "a", "completion": [{"content": "b"}]}, "row 2: completion has a turn without"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, row: dict[str, Any], said: str) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}, row])

    with pytest.raises(ValueError, match=said):
        read_response_inputs(path)


def response(group: int, score: float, length: int = 1, step: int = 1, **parts: float) -> Response:
    return Response(
        place=f"rollouts.jsonl:{group}", group=(step, group), prompt_key=group, step=step,
        prompt="p", completion="c", length=length, score=score, parts=parts or {"part": score},
    )  # fmt: skip


def test_signal_and_variance_are_those_of_the_groups() -> None:
    lab = look_at(
        [response(0, 1), response(0, 3), response(1, 6), response(1, 6), response(2, NAN),
         response(2, 9), response(3, 0), response(3, 0)]
    )  # fmt: skip

    score = part_of(lab, "score")
    # prompt 2 has a single score; of 0, 1 and 3 the second and third have no signal
    assert (score.no_signal.count, score.no_signal.of) == (2, 3)
    # around the means of the prompts: 1 + 1; around the mean of all, 16 / 6: 82 - 6 (16 / 6)²
    assert score.within_groups == pytest.approx(2 / (82 - 256 / 6))
    # of 0, 0, 1, 3, 6, 6, 9
    assert score.distribution.median == 3
    assert score.distribution.mean == pytest.approx(25 / 7)
    assert score.distribution.distinct == 5


def test_responses_to_one_prompt_are_a_cluster_of_the_intervals() -> None:
    # in each of 40 steps the same four responses to one of 20 prompts, of a few no score
    rows = [
        response(step % 20, NAN if step % 20 < 3 else float(k), step=step)
        for step in range(40)
        for k in range(4)
    ]

    score = part_of(look_at(rows), "score")

    assert (score.missing.count, score.missing.of) == (24, 160)
    # 20 prompts of which each says as much as one outcome, fewer by (z / t)² of 19 degrees
    effective = 20 * (1.959964 / 2.093024) ** 2
    assert score.missing.interval == pytest.approx(wilson_interval(0.15 * effective, effective))
    assert (score.no_signal.count, score.no_signal.of) == (0, 34)
    assert score.no_signal.interval == pytest.approx(wilson_interval(0, 17))


def test_odd_rows_are_the_high_and_short_ones_and_those_that_parts_dispute() -> None:
    rows = [response(n, float(n), length=n + 1, one=n, two=n) for n in range(12)]
    rows.append(response(12, 50.0, length=1, one=12, two=-1))

    lab = look_at(rows)

    assert lab.short_and_high[0].response is rows[12]
    assert lab.short_and_high[0].detail == "score 50 for 1 tokens"
    assert lab.disputed[0].response is rows[12]
    assert lab.disputed[0].value == 1.0
    assert lab.disputed[0].detail == "one 12, two -1"


def test_the_order_of_the_responses_changes_no_figure() -> None:
    rows = [
        response(n // 4, float((n * 7) % 5), length=n % 6 + 1, a=n % 3, b=n % 5) for n in range(64)
    ]

    lab, turned = look_at(rows), look_at(rows[::-1])

    for one, other in zip(lab.parts, turned.parts, strict=True):
        assert one.missing == other.missing
        assert one.no_signal == other.no_signal
        assert one.distribution == pytest.approx(other.distribution)
        assert one.with_length.value == pytest.approx(other.with_length.value)


def test_a_report_holds_every_figure(tmp_path: Path) -> None:
    found = scored(tmp_path, none_for_a_tenth, digit)
    lab = with_times(look_at(found.responses), found)

    report = json.loads(json.dumps(as_json(lab), allow_nan=False))

    assert [part["name"] for part in report["parts"]] == ["none_for_a_tenth", "digit", "score"]
    assert len(report["without_value"]["none_for_a_tenth"]) == 12
    assert report["parts"][0]["missing"]["share"] == pytest.approx(0.1)
    assert "raises no alarm" in report["what"]
    page = as_page(lab, tmp_path / "rewards.html", "Rewards").read_text()
    assert "Without a value of none_for_a_tenth" in page
    assert "raises no alarm" in page
    assert 'data-value="0.1">10.0% (5.8% to 16.7%)<' in page
