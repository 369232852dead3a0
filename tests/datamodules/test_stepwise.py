"""`StepwiseDataModule`: where steps end, and what labels are."""

import json
from typing import Any

import numpy as np
import pytest

from lrlhf.datamodules import BadDataError, StepwiseDataModule
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
