"""`StepwiseDataModule`: where steps end, what labels are, and what published formats say."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lrlhf.datamodules import BadDataError, BadRow, PublishedSteps, StepwiseDataModule
from lrlhf.types import StepBatch
from tests.datamodules.conftest import TOKENIZER, Rows

ROW = {"prompt": "2+3", "completions": ["ab", "c"], "labels": [True, False]}


def load(*rows: Any, **options: Any) -> StepwiseDataModule:
    data = StepwiseDataModule(
        Rows(rows), **{"tokenizer": TOKENIZER, "batch_size": len(rows), "shuffle": False, **options}
    )
    data.setup("fit")
    return data


def batch_of(*rows: Any, **options: Any) -> StepBatch:
    (batch,) = load(*rows, **options).train_dataloader()
    return batch


def text_of(batch: StepBatch, row: int = 0) -> str:
    return str(TOKENIZER.decode(batch.input_ids[row, batch.attention_mask[row]]))


# ---- rows


def test_a_step_is_judged_at_the_end_of_the_separator_behind_it() -> None:
    batch = batch_of(ROW, {"prompt": "x", "completions": ["y"], "labels": [0.25]})
    assert [text_of(batch, row) for row in (0, 1)] == ["2+3ab\nc\n", "xy\n"]
    # 2 + 3 a b \n c \n
    assert batch.step_ends.long().tolist() == [[0, 0, 0, 0, 0, 1, 0, 1], [0, 0, 1, 0, 0, 0, 0, 0]]
    assert batch.labels.tolist() == [[0, 0, 0, 0, 0, 1, 0, 0], [0, 0, 0.25, 0, 0, 0, 0, 0]]
    assert batch.response_mask.equal(batch.step_ends)
    assert batch.starts.tolist() == [3, 1]
    assert batch.places == ("rows.jsonl:1", "rows.jsonl:2")


def test_a_separator_of_several_tokens() -> None:
    batch = batch_of(ROW, step_separator=" ;;")
    assert text_of(batch) == "2+3ab ;;c ;;"
    assert batch.step_ends[0].nonzero()[:, 0].tolist() == [7, 11]


def test_a_step_without_a_label_ends_and_is_not_trained_on() -> None:
    batch = batch_of({**ROW, "labels": [None, 0]})
    assert batch.step_ends[0].nonzero()[:, 0].tolist() == [5, 7]
    assert batch.response_mask[0].nonzero()[:, 0].tolist() == [7]
    assert batch.labels.isfinite().all()


def test_prompts_of_chats_leave_the_assistants_turn_open() -> None:
    chat = "<|im_start|>user\n2+3<|im_end|>\n<|im_start|>assistant\n"
    turns = {**ROW, "prompt": [{"role": "user", "content": "2+3"}]}
    assert text_of(batch_of(turns)) == text_of(batch_of(ROW, as_chat=True)) == f"{chat}ab\nc\n"
    told = batch_of(ROW, as_chat=True, system_prompt="s")
    assert text_of(told).startswith("<|im_start|>system\ns<|im_end|>\n<|im_start|>user")


def test_columns_have_names_of_the_users_and_may_be_arrays_or_json() -> None:
    row = {"problem": "2+3", "steps": json.dumps(["ab", "c"]), "ok": "[1, 0.0]"}
    names = {"prompt_column": "problem", "steps_column": "steps", "labels_column": "ok"}
    assert text_of(batch_of(row, **names)) == "2+3ab\nc\n"
    arrays = {**ROW, "completions": np.array(["ab", "c"]), "labels": np.array([1.0, 0.0])}
    data = StepwiseDataModule([arrays], tokenizer=TOKENIZER, batch_size=1)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert batch.labels[0].nonzero()[:, 0].tolist() == [5]


def test_one_prompt_is_never_in_both_splits() -> None:
    rows = [{**ROW, "prompt": f"p{n % 5}", "completions": [f"{n}", "x"]} for n in range(40)]
    data = load(*rows, val_fraction=0.2, batch_size=4)
    prompts = [
        {text_of(batch, row)[:2] for batch in loader for row in range(len(batch))}
        for loader in (data.train_dataloader(), data.val_dataloader())
    ]
    assert prompts[0].isdisjoint(prompts[1])
    assert len(prompts[0] | prompts[1]) == 5


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"labels": [True]}, "1 labels for the 2 steps of 'completions'"),
        ({"labels": [None, None]}, "no step has a label"),
        ({"labels": [True, "+"]}, r"label 2 of column 'labels' is '\+'"),
        ({"labels": [True, 1.5]}, r"label 2 of column 'labels' is 1\.5"),
        ({"labels": [True, -100]}, "label 2 of column 'labels' is -100"),
        ({"labels": 1}, "column 'labels' should be a list, not int 1"),
        ({"completions": []}, "column 'completions' is an empty list"),
        ({"completions": ["a", " "]}, "step 2 of column 'completions' is empty"),
        ({"completions": ["a", 3]}, "step 2 of column 'completions' should be text, not 3"),
        ({"completions": None}, "column 'completions' has no value"),
        ({"prompt": ""}, "column 'prompt' is empty"),
    ],
)
def test_a_bad_row_is_counted_and_too_many_are_refused(row: dict[str, Any], message: str) -> None:
    bad = {**ROW, **row}
    with pytest.raises(BadDataError, match=message):
        load(ROW, bad)
    assert len(batch_of(ROW, bad, max_bad_fraction=0.5, batch_size=1)) == 1


def test_long_rows_are_left_out_and_missing_columns_are_named() -> None:
    long = {**ROW, "prompt": "2" * 9}
    kept = batch_of(ROW, long, max_tokens=8, max_bad_fraction=0.5, batch_size=1)
    assert text_of(kept) == "2+3ab\nc\n"
    with pytest.raises(BadDataError, match="it has 14 tokens, max_tokens=8"):
        load(long, max_tokens=8)
    with pytest.raises(BadDataError, match="no column 'labels'; did you mean 'label'"):
        load({"prompt": "a", "completions": ["b"], "label": [1]})
    with pytest.raises(ValueError, match="step_separator is empty"):
        StepwiseDataModule([ROW], step_separator="")


# ---- published data sets


def rows_of(folder: Path, format: str, *raw: Any, **options: Any) -> list[Any]:
    file = folder / "raw.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in raw))
    return list(PublishedSteps(format, str(file), **options).rows())


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
    found = rows_of(tmp_path, "prm800k", PRM800K, neutral=neutral)
    ahead = ["2+3=5"]
    assert answers(found) == [
        ("2+3+4?", ["2+3=5", "5+4=9", "So 9."], [1.0, 1.0, label]),
        ("2+3+4?", ["2+3=6"], [0.0]),
        ("2+3+4?", [*ahead, "hm"], [None, label]),
        ("2+3+4?", [*ahead, "no"], [None, 0.0]),
    ]
    assert {row["source"] for row in found} == {"prm800k"}


def test_neutral_ratings_of_prm800k_can_be_left_out(tmp_path: Path) -> None:
    found = rows_of(tmp_path, "prm800k", PRM800K, neutral="unlabelled")
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
    assert answers(rows_of(tmp_path, "math_shepherd", other, step_tag="<s>")) == [expected]


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
def test_rows_that_are_not_of_the_format_are_bad_rows(
    tmp_path: Path, format: str, raw: dict[str, Any], message: str
) -> None:
    (problem,) = rows_of(tmp_path, format, raw)
    assert isinstance(problem, BadRow)
    with pytest.raises(BadRow, match=message):
        raise problem
    assert "raw.jsonl" in str(problem.detail)


def test_unknown_formats_and_options_are_refused() -> None:
    with pytest.raises(BadDataError, match="did you mean 'math_shepherd'"):
        PublishedSteps("math_shepard", "x")
    with pytest.raises(BadDataError, match="neutral is 'maybe'"):
        PublishedSteps("prm800k", "x", neutral="maybe")  # type: ignore[arg-type]
    with pytest.raises(BadDataError, match="step_tag is empty"):
        PublishedSteps("math_shepherd", "x", step_tag="")


def test_a_published_set_is_a_source_of_the_data_module(tmp_path: Path) -> None:
    file = tmp_path / "raw.jsonl"
    file.write_text(json.dumps(PRM800K) + "\n")
    source = PublishedSteps("prm800k", str(file))
    data = StepwiseDataModule(source, tokenizer=TOKENIZER, batch_size=4, shuffle=False)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    assert len(batch) == 4
    # 3 + 1 + 1 + 1 ratings, each once
    assert int(batch.response_mask.sum()) == 6
    assert int(batch.step_ends.sum()) == 8
