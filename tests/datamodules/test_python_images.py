"""Images in rows that Python objects hold are read as those that the rows of a file name."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from lrlhf.datamodules import BadDataError, MemorySource, PromptDataModule
from lrlhf.media.path_safety import FOREIGN
from tests.datamodules.conftest import WriteRows

Data = Any


def picture(number: int) -> Image.Image:
    return Image.fromarray(np.full((28, 56, 3), 10 * number, dtype=np.uint8))


def encoded(number: int) -> bytes:
    stream = io.BytesIO()
    picture(number).save(stream, "PNG")
    return stream.getvalue()


SHOWN: dict[str, Callable[[int], Any]] = {
    "PIL": picture,
    "array": lambda n: np.asarray(picture(n)),
    "bytes": encoded,
    "several": lambda n: [picture(n)],
}


HELD: dict[str, Callable[[list[dict[str, Any]]], Data]] = {
    "list": list,
    "DataFrame": pd.DataFrame,
    "dict of columns": lambda rows: {name: [row[name] for row in rows] for name in rows[0]},
}


@pytest.mark.parametrize("held", [*HELD, "datasets"])
@pytest.mark.parametrize("shown", SHOWN)
def test_images_in_rows_are_read_as_those_that_files_name(
    tmp_path: Path, vlm_folder: str, write_rows: WriteRows, held: str, shown: str
) -> None:
    def seen(train: Data) -> Any:
        data = PromptDataModule(train, tokenizer=vlm_folder, batch_size=2, shuffle=False)
        data.setup("fit")
        return [
            (
                batch.input_ids.tolist(),
                [media.tensors["pixel_values"].sum() for media in batch.media],
            )
            for batch in data.train_dataloader()
        ]

    column = "images" if shown == "several" else "image"
    asked = [{"role": "user", "content": "what is it?"}]
    for n in range(2):
        picture(n).save(tmp_path / f"{n}.png")
    named = write_rows(
        {"prompt": asked, column: f"{n}.png" if column == "image" else [f"{n}.png"]}
        for n in range(2)
    )
    rows = [{"prompt": asked, column: SHOWN[shown](n)} for n in range(2)]
    if held == "datasets":
        feature = datasets.Image() if column == "image" else datasets.List(datasets.Image())
        data = datasets.Dataset.from_list([{"prompt": asked}] * 2).add_column(
            column, [encoded(n) if column == "image" else [encoded(n)] for n in range(2)]
        )
        train: Data = data.cast_column(column, feature)
    else:
        train = HELD[held](rows)
    assert seen(train) == seen(named)
    assert seen(train)[0][1][0] != seen(train)[0][1][1]


def test_images_of_a_data_set_are_kept_as_their_bytes_until_a_batch_wants_them() -> None:
    features = datasets.Features(
        {"images": datasets.List(datasets.Image()), "n": {"image": datasets.Image()}}
    )
    rows = [{"images": [encoded(1)], "n": {"image": encoded(2)}}]
    (row,) = MemorySource(datasets.Dataset.from_list(rows, features=features)).rows()
    assert row["images"][0]["bytes"] == encoded(1)
    assert row["n"]["image"]["bytes"] == encoded(2)


def test_relative_paths_start_from_the_folder_that_was_given(
    tmp_path: Path, vlm_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    picture(1).save(tmp_path / "1.png")
    monkeypatch.chdir(tmp_path / "here")
    rows = [{"prompt": [{"role": "user", "content": "?"}], "image": "1.png"}]
    data = PromptDataModule(MemorySource(rows, folder=tmp_path), tokenizer=vlm_folder, batch_size=1)
    data.setup("fit")
    assert len(list(data.train_dataloader())) == 1
    with pytest.raises(BadDataError, match=r"1\.png"):
        PromptDataModule(rows, tokenizer=vlm_folder, batch_size=1).setup("fit")


def test_rows_that_were_loaded_from_the_hub_name_no_file_of_this_machine() -> None:
    data = datasets.Dataset.from_list([{"prompt": "x", "image": "/etc/hostname"}])
    assert MemorySource(data).folder is None
    data.info.download_checksums = {"hf://datasets/a/b@0/data.parquet": {"num_bytes": 1}}
    assert MemorySource(data.filter(lambda row: True)).folder == FOREIGN
    assert MemorySource(data, folder="/data").folder == Path("/data")
