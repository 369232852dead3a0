"""What data modules say of data that Python objects hold, and of themselves."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import pandas as pd
import pytest
from torch.utils.data import DataLoader

from lrlhf.datamodules import (
    BadDataError,
    MemorySource,
    PreferenceDataModule,
    PromptDataModule,
    RowDataModule,
)
from tests.datamodules.conftest import TOKENIZER
from tests.datamodules.held import PAIRS, PROMPTS, Data, Indexed, prompts, streamed


def test_what_is_no_row_is_a_bad_row() -> None:
    with pytest.raises(BadDataError, match=r"list:2: a row is a dict of columns, not \(1, 2\)"):
        prompts([{"prompt": "x"}, (1, 2)])
    with pytest.raises(BadDataError, match=r"DataFrame:1: columns are named by text, not by 0"):
        prompts(pd.DataFrame([["x", 2]]))
    with pytest.raises(BadDataError, match=r"several columns 'a'"):
        prompts(pd.DataFrame([["x", 2]], columns=["a", "a"]))


def one_row() -> Iterator[dict[str, Any]]:
    yield {"prompt": "x"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, r"^train: cannot read rows from an int: give a path, a hub id, a list of dicts"),
        (None, r"^train: cannot read rows from a NoneType"),
        ([3], r"^train\[0\]: cannot read rows from an int"),
        ([], r"^train: the list of data sources is empty"),
        (["a.jsonl", {"prompt": "x"}], r"^train\[1\] is a dict and train\[0\] 'a.jsonl' is not"),
        ({"prompt": "x"}, r"its 'prompt' is a str; a row is written in a list"),
        ({"prompt": ["x"], "answer": []}, r"different lengths: 'prompt' 1, 'answer' 0$"),
        (
            datasets.DatasetDict({"train": datasets.Dataset.from_list(PAIRS), "test": None}),
            r"a DatasetDict holds several data sets \(train, test\).*such as data\['train'\]$",
        ),
        (streamed(PAIRS)._data, r"an IterableDataset does not say how many rows it has: .*length="),
        (one_row(), r"a generator does not say how many rows"),
        (one_row, r"a function does not say how many rows"),
        (DataLoader(Indexed(PAIRS)), r"a DataLoader gives batches, not rows"),
        (pd.Series(["x"]), r"a Series holds one column: give it by its name"),
        (Indexed, r"the class Indexed is no data: give an instance"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_holds_no_rows_is_refused_in_one_line_before_anything_is_read(
    data: Data, message: str
) -> None:
    with pytest.raises(BadDataError, match=message) as caught:
        PromptDataModule(data)
    assert "\n" not in str(caught.value)


def test_a_generator_that_ends_early_says_so() -> None:
    with pytest.raises(BadDataError, match=r"^one_row: there are 1 rows, and length=2"):
        prompts(MemorySource(one_row(), 2))
    with pytest.raises(ValueError, match=r"length=0: give 1 or more"):
        MemorySource(one_row(), 0)


def test_the_representation_says_what_is_read_and_how_many_rows() -> None:
    data = PromptDataModule(PROMPTS, val_size=2, tokenizer=TOKENIZER, batch_size=3)
    columns = "prompt, answer, number, weight, tags, task"
    assert str(data) == repr(data)
    assert repr(data).splitlines() == [
        "PromptDataModule(batch_size=3)",
        f"  train: MemorySource(list, 7 rows: {columns})",
        "  val: 2 of the train rows, held out",
    ]
    data.setup("fit")
    assert repr(data).splitlines()[1] == f"  train: 5 rows from list; columns: {columns}"
    files = ["a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl"]
    data = PromptDataModule(files, val=pd.DataFrame(PAIRS), batch_size=3)
    assert repr(data).splitlines()[1:] == [
        "  train: a.jsonl, b.jsonl, c.jsonl and 1 more",
        "  val: MemorySource(DataFrame, 7 rows: prompt, chosen, rejected, margin, from)",
    ]
    secret = PromptDataModule("https://me:pass-word@host/rows.jsonl", tokenizer=TOKENIZER)
    assert repr(secret).splitlines()[1] == "  train: https://***@host/rows.jsonl"
    assert repr(MemorySource(one_row(), 1200)) == "MemorySource(one_row, 1,200 rows)"
    assert repr(MemorySource(Indexed(PAIRS), name="mine")) == "MemorySource(mine, 7 rows)"


class Mine(PromptDataModule):
    def __init__(self, train: Any, *, level: int = 0, **options: Any) -> None:
        super().__init__(train, **options)


@pytest.mark.parametrize(
    ("kind", "option", "meant"),
    [
        (PromptDataModule, "bach_size", "batch_size"),
        (PreferenceDataModule, "tokeniser", "tokenizer"),
        (Mine, "prompt_colum", "prompt_column"),
        (Mine, "levle", "level"),
    ],
)
def test_a_misspelt_option_names_the_class_that_was_written(
    kind: Callable[..., RowDataModule[Any, Any]], option: str, meant: str
) -> None:
    said = f"{kind.__name__} has no option '{option}'; did you mean '{meant}'?"  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=re.escape(said)):
        kind(PROMPTS, **{option: 3})


def test_an_option_of_another_trainer_is_answered_with_ours() -> None:
    said = (
        "PromptDataModule has no option 'per_device_train_batch_size'; did you mean "
        "data.batch_size (prompts, each with model.num_generations responses, or pairs)?"
    )
    with pytest.raises(TypeError, match=re.escape(said)):
        PromptDataModule(PROMPTS, per_device_train_batch_size=4)
