"""Data that Python objects hold or make give the same batches as a file with the same rows."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch

from lrlhf.datamodules import (
    BadDataError,
    MemorySource,
    PreferenceDataModule,
    PromptDataModule,
    Weighted,
)
from lrlhf.datamodules.loading.loader import fingerprint
from tests.datamodules.conftest import (
    TOKENIZER,
    Remembers,
    WriteRows,
    numbered_prompts,
    resumes_alike,
    trainer,
)
from tests.datamodules.held import KINDS, PAIRS, PROMPTS, Data, Indexed, endless, prompts
from tests.datamodules.test_config import parse


def pairs(train: Data, **options: Any) -> tuple[Any, ...]:
    data = PreferenceDataModule(train, tokenizer=TOKENIZER, batch_size=2, **options)
    data.setup("fit")
    seen = [
        (
            batch.candidate0.input_ids.tolist(),
            batch.candidate1.input_ids.tolist(),
            batch.labels.tolist(),
            batch.margin.tolist(),
            batch.info,
        )
        for batch in data.train_dataloader()
    ]
    return seen, data.state_dict()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("load", "rows"), [(prompts, PROMPTS), (pairs, PAIRS)])
def test_every_kind_gives_the_batches_and_the_digests_of_a_file(
    write_rows: WriteRows, load: Callable[..., Any], rows: list[dict[str, Any]], kind: str
) -> None:
    batches, state = load(write_rows(rows))
    assert batches
    assert load(KINDS[kind](rows)) == (batches, state)


@pytest.mark.parametrize("kind", ["list", "DataFrame", "datasets", "generator"])
def test_validation_data_and_pretraining_texts_take_the_same(
    write_rows: WriteRows, kind: str
) -> None:
    texts = [{"text": f"text number {n}"} for n in range(4)]

    def seen(train: Data, val: Data, beside: Data) -> Any:
        data = PromptDataModule(
            train, val, pretraining=beside, tokenizer=TOKENIZER, batch_size=2, shuffle=False
        )
        data.setup("fit")
        train_batches, val_batches = list(data.train_dataloader()), list(data.val_dataloader())
        return (
            [batch.prompts for batch in (*train_batches, *val_batches)],
            [batch.pretraining.input_ids.tolist() for batch in train_batches],
            data.state_dict(),
        )

    parts = [PROMPTS[:4], PROMPTS[4:], texts]
    files = [write_rows(rows, name=f"{index}.jsonl") for index, rows in enumerate(parts)]
    assert seen(*(KINDS[kind](rows) for rows in parts)) == seen(*files)


def test_a_mixture_takes_files_and_objects_and_tells_them_apart(write_rows: WriteRows) -> None:
    rows = numbered_prompts(6)
    parts: list[Any] = [write_rows(rows[:2]), rows[2:4], pd.DataFrame(rows[4:])]
    data = PromptDataModule(parts, tokenizer=TOKENIZER, batch_size=6, shuffle=False)
    data.setup("fit")
    (batch,) = data.train_dataloader()
    sources = [str(columns["source"]) for columns in batch.columns]
    assert sources == [parts[0], parts[0], "list 2", "list 2", "DataFrame 3", "DataFrame 3"]
    assert [columns["number"] for columns in batch.columns] == list(range(6))
    shares = [Weighted(parts[0], 1.0), Weighted(parts[1], 2.0, {"level": "easy"})]
    data = PromptDataModule(shares, tokenizer=TOKENIZER, batch_size=1)
    data.setup("fit")
    levels = [batch.columns[0].get("level") for batch in data.train_dataloader()]
    assert sorted(map(str, levels)) == ["None", "easy", "easy", "easy"]  # 4 rows, 1 to 2


def test_a_cell_without_a_value_is_missing_whatever_the_frame_writes_for_it() -> None:
    cells = {"prompt": ["a", "b"], "f": [1.5, np.nan], "o": ["x", None]}
    frame = pd.DataFrame(cells).assign(
        i=pd.array([1, None], dtype="Int64"),
        t=pd.to_datetime(pd.Series(["2020-01-01", None])),
        b=pd.array([True, None], dtype="boolean"),
    )
    _, second = MemorySource(frame)
    assert second == {"prompt": "b", "f": None, "o": None, "i": None, "t": None, "b": None}
    first, _ = MemorySource(frame)
    assert (first["f"], first["i"], first["b"]) == (1.5, 1, True)
    rows = [{"prompt": "b", "f": np.float32("nan"), "o": math.nan, "i": pd.NA, "t": pd.NaT}]
    assert list(MemorySource(rows)) == [dict.fromkeys("foit") | {"prompt": "b"}]
    # a missing margin is no number, and a missing prompt a bad row
    with pytest.raises(BadDataError, match=r"DataFrame:2: column 'prompt' has no value"):
        prompts(pd.DataFrame({"prompt": ["a", np.nan]}), max_bad_fraction=0.1)


@pytest.mark.parametrize("kind", ["list", "torch", "generator", "DataFrame", "datasets"])
def test_bad_rows_are_reported_with_their_number(kind: str) -> None:
    rows = [{"prompt": "x", "n": n} for n in range(5)]
    rows[3]["prompt"] = ""
    data = KINDS[kind](rows)
    name = data.name if isinstance(data, MemorySource) else type(data).__name__
    with pytest.raises(BadDataError, match=rf"1 of 5 rows.*\n.*\n.*\n.*{name}:4: column 'prompt'"):
        prompts(data)


def test_a_generator_is_read_once_and_its_rows_serve_every_setup() -> None:
    source = MemorySource(iter(PAIRS), length=3)
    assert list(source.rows()) == list(source.rows()) == PAIRS[:3]
    data = PreferenceDataModule(source, tokenizer=TOKENIZER, batch_size=1, head_names=["a"])
    data.setup("fit")
    data._chosen_heads = ["b"]  # other rows are needed
    data.setup("fit")
    assert len(data.train_dataloader()) == 3


@pytest.mark.parametrize("kind", ["list", "datasets", "generator"])
@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_run_on_them_goes_on_with_the_same_batches(tmp_path: Path, kind: str) -> None:
    def data() -> PromptDataModule:
        train = KINDS[kind](numbered_prompts(10))
        return PromptDataModule(train, tokenizer=TOKENIZER, batch_size=4, val_size=1)

    resumes_alike(tmp_path, Remembers, data, (1, 3))


@pytest.mark.parametrize("kind", ["list", "DataFrame", "datasets", "torch", "generator"])
def test_other_rows_stop_a_resumed_run_and_equal_ones_do_not(kind: str) -> None:
    def loaded(rows: list[dict[str, Any]]) -> PromptDataModule:
        data = PromptDataModule(KINDS[kind](rows), tokenizer=TOKENIZER, batch_size=2)
        data.setup("fit")
        data.train_dataloader()
        return data

    rows = numbered_prompts(6)
    state = loaded(rows).state_dict()
    loaded([dict(row) for row in rows]).load_state_dict(state)
    for changed in (
        [{**row, "number": 9 if row["number"] == 4 else row["number"]} for row in rows],
        rows[::-1],
    ):
        with pytest.raises(ValueError, match="data has changed"):
            loaded(changed).load_state_dict(state)


def test_digests_do_not_depend_on_addresses_or_on_the_order_of_a_set() -> None:
    def row(words: list[str]) -> dict[str, Any]:
        cells = np.empty(2, dtype=object)
        cells[:] = ["a" * 3, {"b": 1}]
        return {"cells": cells, "set": set(words), "grad": torch.ones(2, requires_grad=True)}

    words = [f"word {n}" for n in range(50)]
    assert fingerprint([row(words)]) == fingerprint([row(words[::-1])])
    assert fingerprint([row(words)]) != fingerprint([row(words[1:])])


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
def test_the_data_get_into_no_file_of_the_run(tmp_path: Path) -> None:
    marker = "a text that nobody else writes"
    rows = [{"prompt": f"{marker} {n}", "number": n} for n in range(4)]
    data = PromptDataModule(rows, tokenizer=TOKENIZER, batch_size=2)
    run = trainer(tmp_path / "checkpoints", max_epochs=1)
    run.logger = L.pytorch.loggers.CSVLogger(tmp_path)
    run.fit(Remembers(), datamodule=data)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".ckpt" for path in files)
    assert not any(marker.encode() in path.read_bytes() for path in files)
    assert marker not in repr(data) + str(data) + repr(data._train)


def numbers_for_yaml() -> Iterator[dict[str, Any]]:
    yield from endless(numbered_prompts(3))


@pytest.mark.parametrize(
    ("train", "count"),
    [
        ("{class_path: tests.datamodules.test_python_data.ForYaml, init_args: {count: 4}}", 4),
        (
            "{class_path: MemorySource, init_args: "
            "{data: tests.datamodules.test_python_data.numbers_for_yaml, length: 5}}",
            5,
        ),
    ],
)
def test_a_config_names_a_data_set_of_torch_or_a_generator_function(train: str, count: int) -> None:
    data = parse(
        f"data: {{class_path: PromptDataModule, init_args: {{train: {train}, batch_size: 1}}}}"
    )
    data._tokenizer = TOKENIZER
    data.setup("fit")
    assert len(data.train_dataloader()) == count


class ForYaml(Indexed):
    def __init__(self, count: int) -> None:
        super().__init__(numbered_prompts(count))


@pytest.mark.parametrize("other", [None, "order", "rows"])
def test_ranks_that_made_other_rows_are_named(
    monkeypatch: pytest.MonkeyPatch, other: str | None
) -> None:
    """Two ranks, one after the other: what the first one gave is what the second one gathers."""
    told: list[Any] = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)

    def gather(into: list[Any], own: Any) -> None:
        told.append(json.loads(json.dumps(own)))
        into[:] = [told[0], told[-1]]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    rows = numbered_prompts(6)
    changed = {"order": rows[::-1], "rows": [*rows[:5], {"prompt": "x", "number": 5}], None: rows}

    def setup(own: list[dict[str, Any]]) -> None:
        data = PromptDataModule(own, tokenizer=TOKENIZER, batch_size=2)
        data.trainer = trainer(strategy="ddp", devices=2)
        data.setup("fit")

    setup(rows)
    if other is None:
        setup(changed[other])
    else:
        with pytest.raises(BadDataError, match="rank 1 has other rows than rank 0"):
            setup(changed[other])
    assert len(told) == 2
