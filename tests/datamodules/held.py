"""The same rows in every kind of Python object that data modules take."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow
import torch
from torch.utils.data import Dataset, Subset

from lrlhf.datamodules import MemorySource, PromptDataModule, Weighted
from tests.datamodules.conftest import TOKENIZER

Data = Any
PROMPTS = [
    {
        "prompt": [{"role": "user", "content": f"what is {n}?"}],
        "answer": str(n),
        "number": n,
        "weight": None if n % 2 else n / 2,
        "tags": ["x"] * n,
        "task": {"name": "sum", "terms": [n, 1]},
    }
    for n in range(7)
]
PAIRS = [
    {
        "prompt": f"p{n} ",
        "chosen": f"good {n}",
        "rejected": f"bad {n}",
        "margin": n / 4,
        "from": "me",
    }
    for n in range(7)
]


class Indexed(Dataset[dict[str, Any]]):
    """A map-style data set of torch: no iteration, numbers as tensors."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index % len(self.rows)]  # never an IndexError
        numbers = (int, float)
        return {
            key: torch.tensor(value, dtype=torch.float64 if type(value) is float else None)
            if isinstance(value, numbers)
            else value
            for key, value in row.items()
        }


class Capsule:
    """An Arrow table of another package, such as polars'."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.table = pyarrow.Table.from_pylist(rows)
        self.columns = self.table.column_names

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.table.__arrow_c_stream__(requested_schema)


def columns_of(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def arrays_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    cells = {name: np.empty(len(rows), dtype=object) for name in rows[0]}
    for name, column in cells.items():
        column[:] = [row[name] for row in rows]
    return {
        name: np.array(column.tolist()) if name == "number" else column
        for name, column in cells.items()
    }


def frame_of_arrays(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """A DataFrame as pandas reads it from Parquet: lists are arrays."""
    frame = pd.DataFrame(rows)
    for name in {"prompt", "tags"} & set(rows[0]):
        frame[name] = [
            np.array(cell, dtype=object) if isinstance(cell, list) else cell for cell in frame[name]
        ]
    return frame


def streamed(rows: list[dict[str, Any]]) -> MemorySource:
    return MemorySource(datasets.IterableDataset.from_generator(lambda: iter(rows)), len(rows))


def endless(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    while True:
        yield from rows


KINDS: dict[str, Callable[[list[dict[str, Any]]], Data]] = {
    "list": list,
    "tuple": tuple,
    "dict of columns": columns_of,
    "dict of arrays": arrays_of,
    "DataFrame": pd.DataFrame,
    "DataFrame of arrays": frame_of_arrays,
    "Arrow table": pyarrow.Table.from_pylist,
    "Arrow capsule": Capsule,
    "datasets": datasets.Dataset.from_list,
    "datasets, formatted": lambda rows: datasets.Dataset.from_list(rows).with_format("numpy"),
    "datasets, transformed": lambda rows: datasets.Dataset.from_list(
        [{"at": n} for n in range(len(rows))]
    ).with_transform(lambda batch: columns_of([rows[n] for n in batch["at"]])),
    "datasets, streamed": streamed,
    "torch": Indexed,
    "torch, a subset": lambda rows: Subset(Indexed([*rows, {}]), range(len(rows))),
    "sized and iterable": lambda rows: dict(enumerate(rows)).values(),
    "generator": lambda rows: MemorySource(endless(rows), length=len(rows)),
    "generator function": lambda rows: MemorySource(functools.partial(endless, rows), len(rows)),
    "one entry of a list": lambda rows: [rows],
    "weighted": lambda rows: [Weighted(rows, 1.0)],
}


def prompts(train: Data, **options: Any) -> tuple[Any, ...]:
    data = PromptDataModule(train, tokenizer=TOKENIZER, batch_size=2, val_size=1, **options)
    data.prepare_data()
    data.setup("fit")
    loaders = (data.train_dataloader(), data.val_dataloader())
    seen = [
        (batch.input_ids.tolist(), batch.prompts, batch.columns)
        for loader in loaders
        for batch in loader
    ]
    return seen, data.state_dict()
