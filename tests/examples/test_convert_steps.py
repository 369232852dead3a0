"""Published sets of judged steps become rows of `StepwiseDataModule`."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from convert_steps import main

from lrlhf.datamodules import StepwiseDataModule
from tests.datamodules.conftest import TOKENIZER


def rows_of(folder: Path, name: str, *raw: Any, flags: Sequence[str] = ()) -> list[Any]:
    file, output = folder / "raw.jsonl", folder / "steps.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in raw))
    main([name, str(file), str(output), *flags])
    return [json.loads(line) for line in output.read_text().splitlines()]


def answers(found: Sequence[Any]) -> list[Any]:
    return [(row["prompt"], row["completions"], row["labels"]) for row in found]


def rated(text: str, rating: int | None) -> dict[str, Any]:
    return {"text": text, "rating": rating, "flagged": None}


PRM800K = {
    "labeler": "l",
    "question": {"problem": "2+3+4?", "ground_truth_answer": "9"},
    "label": {
        "steps": [
            {
                "completions": [rated("2+3=6", -1), rated("2+3=5", 1)],
                "human_completion": None,
                "chosen_completion": 1,
            },
            {
                "completions": [rated("hm", 0), rated("no", -1)],
                "human_completion": rated("5+4=9", None),
                "chosen_completion": None,
            },
            {
                "completions": [rated("So 9.", 0)],
                "human_completion": None,
                "chosen_completion": 0,
            },
        ],
        "finish_reason": "solution",
    },
}


@pytest.mark.parametrize(("neutral", "label"), [("correct", 1.0), ("wrong", 0.0)])
def test_every_rating_of_prm800k_is_learnt_once(tmp_path: Path, neutral: str, label: float) -> None:
    found = rows_of(tmp_path, "prm800k", PRM800K, flags=["--neutral", neutral])
    ahead = ["2+3=5"]
    assert answers(found) == [
        ("2+3+4?", ["2+3=5", "5+4=9", "So 9."], [1.0, 1.0, label]),
        ("2+3+4?", ["2+3=6"], [0.0]),
        ("2+3+4?", [*ahead, "hm"], [None, label]),
        ("2+3+4?", [*ahead, "no"], [None, 0.0]),
    ]
    assert {row["source"] for row in found} == {"prm800k"}


def test_neutral_ratings_of_prm800k_can_be_left_out(tmp_path: Path) -> None:
    found = rows_of(tmp_path, "prm800k", PRM800K, flags=["--neutral", "unlabelled"])
    assert [row["labels"] for row in found] == [[1.0, 1.0, None], [0.0], [None, 0.0]]


def test_an_answer_of_prm800k_that_was_given_up_ends_there(tmp_path: Path) -> None:
    steps = PRM800K["label"]["steps"]  # type: ignore[index]
    ended = {**steps[1], "human_completion": None}
    found = rows_of(tmp_path, "prm800k", {**PRM800K, "label": {"steps": [steps[0], ended]}})
    assert answers(found)[0][1:] == (["2+3=5"], [1.0])
    assert [row["completions"][-1] for row in found[1:]] == ["2+3=6", "hm", "no"]


def test_steps_of_math_shepherd_end_at_its_tag(tmp_path: Path) -> None:
    asked = "Ann has 2 apples and gets 3. Step 1 counts? "
    raw = {
        "input": f"{asked}Step 1: 2+3=5 ки\nStep 2: 5+1=7 ки\nStep 3: The answer is: 7 ки",
        "label": f"{asked}Step 1: 2+3=5 +\nStep 2: 5+1=7 -\nStep 3: The answer is: 7 -",
        "task": "GSM8K",
    }
    expected = (
        asked.strip(),
        ["Step 1: 2+3=5", "Step 2: 5+1=7", "Step 3: The answer is: 7"],
        [1.0, 0.0, 0.0],
    )
    assert answers(rows_of(tmp_path, "math_shepherd", raw)) == [expected]
    quoted = {**raw, **{name: f"Step 1: Read. Step 2: {raw[name]}" for name in ("input", "label")}}
    ((prompt, *steps_and_labels),) = answers(rows_of(tmp_path, "math_shepherd", quoted))
    assert prompt == f"Step 1: Read. Step 2: {asked.strip()}"
    assert steps_and_labels == [*expected[1:]]
    other = {**raw, "input": raw["input"].replace("ки", "<s>")}
    assert answers(rows_of(tmp_path, "math_shepherd", other, flags=["--step-tag", "<s>"])) == [
        expected
    ]


def test_steps_of_processbench_are_known_up_to_the_first_error(tmp_path: Path) -> None:
    raw = {"problem": "p", "steps": ["a", "b", "c"], "final_answer_correct": False}
    found = rows_of(tmp_path, "processbench", *({**raw, "label": label} for label in (-1, 0, 1)))
    assert [row["labels"] for row in found] == [[1, 1, 1], [0, None, None], [1, 0, None]]
    assert answers(found)[0][:2] == ("p", ["a", "b", "c"])


@pytest.mark.parametrize(
    ("format", "raw", "message"),
    [
        ("prm800k", {"question": "x"}, "column 'question' is no JSON"),
        ("prm800k", {**PRM800K, "label": {"steps": []}}, "'steps' should be a list of steps"),
        ("prm800k", {**PRM800K, "label": {"steps": [7]}}, "should be a list of mappings, not int"),
        (
            "prm800k",
            {**PRM800K, "label": {"steps": [{"completions": [rated("a", 2)]}]}},
            "a completion has no rating -1, 0 or 1",
        ),
        (
            "prm800k",
            {
                **PRM800K,
                "label": {"steps": [{"completions": [rated("a", 1)], "chosen_completion": 1}]},
            },
            "chosen_completion is 1",
        ),
        (
            "prm800k",
            {**PRM800K, "label": {"steps": [{"completions": [rated("a", None)]}]}},
            "none of its completions has a rating",
        ),
        ("math_shepherd", {"input": "q Step 1: a", "label": "q Step 1: a"}, "no step tag 'ки'"),
        (
            "math_shepherd",
            {"input": "q Step 1: a ки\nStep 2: b", "label": "q Step 1: a +\nStep 2: b"},
            "nothing marks the end of the last step",
        ),
        (
            "math_shepherd",
            {"input": "q Step 1: a ки", "label": "q Step 1: a ?"},
            r"step 1 has no sign \+ or -",
        ),
        (
            "math_shepherd",
            {"input": "q Step 1: a ки", "label": "q Step 1: b +"},
            r"step 1 has no sign \+ or -",
        ),
        ("math_shepherd", {"input": "q a ки", "label": "q a +"}, "nothing begins with 'Step 1:'"),
        ("processbench", {"problem": "p", "steps": ["a"], "label": 1}, "is 1, not -1 or one of 1"),
        ("processbench", {"problem": "p", "steps": ["a"], "label": True}, "is True, not -1"),
        ("processbench", {"problem": "p", "label": 1}, "no column 'steps'"),
    ],
)
def test_rows_that_are_not_of_the_set_are_left_out_and_said(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    format: str,
    raw: dict[str, Any],
    message: str,
) -> None:
    with pytest.raises(SystemExit, match=f"no row of .* is of the form of {format}"):
        rows_of(tmp_path, format, raw)
    shown = capsys.readouterr()
    assert re.search(message, shown.err)
    assert "0 rows in " in shown.out
    assert ", 1 left out" in shown.out


def test_an_empty_tag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["math_shepherd", "x", "y", "--step-tag", ""])
    assert "--step-tag is empty" in capsys.readouterr().err


def test_what_was_converted_is_learnt(tmp_path: Path) -> None:
    rows_of(tmp_path, "prm800k", PRM800K)
    source = str(tmp_path / "steps.jsonl")
    data = StepwiseDataModule(source, tokenizer=TOKENIZER, batch_size=4, shuffle=False)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert len(batch) == 4
    # 3 + 1 + 1 + 1 ratings, each once
    assert int(batch.response_mask.sum()) == 6
    assert int(batch.step_ends.sum()) == 8
