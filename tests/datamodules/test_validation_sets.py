"""One validation set or several by their names, in YAML's types and in Python's."""

from typing import Any

import pandas as pd
import pytest

from lrlhf.datamodules import (
    MemorySource,
    PreferenceDataModule,
    PromptDataModule,
    ValidationSet,
    Weighted,
)
from lrlhf.datamodules.loading.validation import is_named
from tests.datamodules.conftest import TOKENIZER, WriteRows, numbered_prompts

ROWS = [{"prompt": "a", "number": 1}]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"one": "a.jsonl"}, True),
        ({"one": "owner/name:main@test", "two": ["a.jsonl", "b.parquet"]}, True),
        ({"one": ROWS}, True),
        ({"one": MemorySource(ROWS), "two": pd.DataFrame(ROWS)}, True),
        ({"one": [Weighted("a.jsonl")], "two": ValidationSet(ROWS)}, True),
        # columns
        ({"prompt": ["a", "b"], "number": [1, 2]}, False),
        ({"prompt": [[{"role": "user", "content": "a"}]]}, False),
        ({"prompt": ["a"], "extra": [{"level": 1}]}, False),
        # one set
        ("a.jsonl", False),
        (ROWS, False),
        (pd.DataFrame(ROWS), False),
        ({}, False),
    ],
)
def test_names_of_sets_are_told_from_names_of_columns(given: Any, named: bool) -> None:
    assert is_named(given) is named


def prompts(val: Any, **options: Any) -> PromptDataModule:
    data = PromptDataModule(numbered_prompts(3), val, tokenizer=TOKENIZER, batch_size=2, **options)
    data.prepare_data()
    data.setup("fit")
    return data


def numbers(loader: Any) -> list[list[int]]:
    return [[columns["number"] for columns in batch.columns] for batch in loader]


def test_each_set_has_a_loader_of_all_its_rows(
    write_rows: WriteRows, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(numbered_prompts(5)[2:])
    asked = [{"question": f"q {n}", "number": n} for n in (7, 8)]
    val = {"file": path, "asked": ValidationSet(asked, {"prompt_template": "{{ question }}?"})}
    data = prompts(val)
    assert data.val_names == ("file", "asked")
    first, second = data.val_dataloader()
    assert numbers(first) == [[2, 3], [4]]
    assert numbers(second) == [[7, 8]]
    assert next(iter(second)).prompts == ("q 7?", "q 8?")
    assert "1 of 3 file validation rows share a prompt" in caplog.text
    assert "  val file: 3 rows from" in repr(data)
    assert "  val asked: 2 rows from" in repr(data)


def test_a_set_without_a_name_stays_a_loader() -> None:
    data = prompts(numbered_prompts(9)[4:])
    assert data.val_names == ("",)
    assert numbers(data.val_dataloader()) == [[4, 5], [6, 7], [8]]
    # names of columns
    columns = prompts({"prompt": ["a", "b"], "number": [3, 4]})
    assert numbers(columns.val_dataloader()) == [[3, 4]]
    held = prompts(None, val_size=1)
    assert held.val_names == ("",)
    assert len(numbers(held.val_dataloader())) == 1
    assert prompts(None).val_names == ()


def test_pairs_of_a_set_have_columns_of_their_own() -> None:
    rows = [{"prompt": "p", "good": "x", "bad": "y"}]
    own = {"chosen_column": "good", "rejected_column": "bad"}
    train = [{"prompt": "q", "chosen": "a", "rejected": "b"}]
    data = PreferenceDataModule(
        train, {"own": ValidationSet(rows, own), "same": train}, tokenizer=TOKENIZER, batch_size=1
    )
    data.setup("fit")
    ((first,), (second,)) = map(list, data.val_dataloader())
    assert TOKENIZER.decode(first.candidate0.input_ids[0]).startswith("px")
    assert TOKENIZER.decode(second.candidate0.input_ids[0]).startswith("qa")


def test_first_rows_are_of_every_set() -> None:
    class Module:
        tokenizer = TOKENIZER
        processor = None

    data = PromptDataModule(numbered_prompts(3), {"one": ROWS, "two": ROWS * 2})
    found = data.first_rows(Module(), 10)
    assert [(one.what, len(one.rows)) for one in found] == [
        ("train", 3),
        ("one validation", 1),
        ("two validation", 2),
    ]


@pytest.mark.parametrize(
    ("val", "message"),
    [
        ({"a b": ROWS}, "'a b' cannot name a validation set"),
        ({"t1": ROWS}, "'t1' cannot name a validation set"),
        ({"one": ValidationSet(ROWS, {"batch_size": 3})}, r"val\.one\.options: PromptDataModule"),
        ({"one": [Weighted(ROWS, weight=1.0)]}, "its sources have no weights"),
        ({"one": ValidationSet(ROWS, {"prompt_column": "x"})}, "the one validation data"),
    ],
)
def test_what_cannot_be_a_set_is_refused(val: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prompts(val)


def test_held_out_rows_and_sets_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="val and val_size are given"):
        prompts({"one": ROWS}, val_size=1)
