"""Pictures that are missing or broken, found before training and in the middle of it."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lrlhf.datamodules import BadDataError, PromptDataModule
from lrlhf.media import MediaOptions
from lrlhf.types import PromptBatch
from tests.datamodules.conftest import Remembers, WriteRows, resumes_alike

LOADER = "lrlhf.datamodules.loading.sources"


def rows(folder: Path, count: int) -> list[dict[str, Any]]:
    """Rows that show pictures; picture ``n`` is of the grey level ``10 n``, with some noise."""
    random = np.random.Generator(np.random.Philox(0))
    noise = random.integers(0, 3, (28, 28, 3), dtype=np.uint8)
    for number in range(count):
        Image.fromarray((noise + 10 * number).astype(np.uint8)).save(folder / f"{number}.png")
    return [
        {
            "prompt": [{"role": "user", "content": [{"type": "image"}]}],
            "image": f"{number}.png",
            "number": number,
        }
        for number in range(count)
    ]


def cut(path: Path) -> None:
    """The head stays as it is."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def load(path: str, vlm_folder: str, **options: Any) -> PromptDataModule:
    data = PromptDataModule(path, tokenizer=vlm_folder, **{"batch_size": 2, **options})
    data.prepare_data()
    data.setup("fit")
    return data


def shown(batch: PromptBatch) -> list[int]:
    """The row numbers of a batch, each by its own picture."""
    assert batch.media is not None
    found = []
    for columns, media in zip(batch.columns, batch.media, strict=True):
        assert media is not None
        number = int(np.asarray(media.images[0])[0, 0, 0]) // 10
        assert columns["number"] == number
        found.append(number)
    return found


def numbers(data: PromptDataModule) -> list[int]:
    return [number for batch in data.train_dataloader() for number in shown(batch)]


@pytest.mark.parametrize("check", ["auto", "all", "files"])
def test_bad_pictures_are_counted_before_training_with_their_names(
    tmp_path: Path, write_rows: WriteRows, vlm_folder: str, check: Any
) -> None:
    path = write_rows(rows(tmp_path, 8))
    (tmp_path / "1.png").unlink()
    (tmp_path / "3.png").write_text("<html>")
    cut(tmp_path / "4.png")
    # Qwen takes none over 200 times as long as wide
    Image.new("RGB", (300, 1)).save(tmp_path / "6.png")
    media = MediaOptions(check=check)
    with pytest.raises(BadDataError) as caught:
        load(path, vlm_folder, media=media, max_bad_fraction=0.2)
    message = str(caught.value)
    bad = ["missing file", "broken image", "broken image", "refused by the processor"]
    names = ["1.png", "3.png", "4.png", "6.png"]
    known = 2 if check == "files" else 4
    assert f"{known} of 8 rows of the train data cannot be used" in message
    assert f"{known * 12.5:.2f}%, more than max_bad_fraction=0.2" in message
    lines = message.splitlines()
    counts = {"missing file": 1, "broken image": known // 2, "refused by the processor": 1}
    for reason in bad[:known]:
        assert f"{counts[reason]:7d}  {reason}" in lines
    for place, name in zip((2, 4, 5, 7), names, strict=True):
        assert any(f"rows.jsonl:{place}: " in line and name in line for line in lines) is (
            name in names[:known]
        )


@pytest.mark.parametrize(
    ("harm", "reason", "workers"),
    [(Path.unlink, "missing file", 0), (cut, "broken image", 0), (cut, "broken image", 2)],
)
def test_a_picture_that_breaks_later_is_replaced_by_the_next_one(
    tmp_path: Path,
    write_rows: WriteRows,
    vlm_folder: str,
    caplog: pytest.LogCaptureFixture,
    workers: int,
    harm: Callable[[Path], None],
    reason: str,
) -> None:
    data = load(write_rows(rows(tmp_path, 6)), vlm_folder, num_workers=workers)
    harm(tmp_path / "2.png")
    harm(tmp_path / "3.png")
    with caplog.at_level(logging.WARNING, LOADER):
        # row 4 stands in for 2 and for 3
        assert sorted(numbers(data)) == [0, 1, 4, 4, 4, 5]
    told = [record.getMessage() for record in caplog.records]
    # in place of 2 both were tried, in place of 3 only 3: three times; told when the count doubles
    assert len(told) == 2
    assert "(1 time(s) so far)" in told[0]
    assert "(2 time(s) so far)" in told[1]
    assert all(reason in line and (".png" in line) for line in told)
    assert {"2.png", "3.png"} & {word.rstrip(":").rpartition("/")[2] for word in told[0].split()}


def test_a_validation_row_is_left_out_and_no_other_comes_twice(
    tmp_path: Path, write_rows: WriteRows, vlm_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(rows(tmp_path, 4))
    data = load(path, vlm_folder, val=path)
    (tmp_path / "1.png").unlink()
    caplog.clear()
    with caplog.at_level(logging.WARNING, LOADER):
        seen = [number for batch in data.val_dataloader() for number in shown(batch)]
    assert seen == [0, 2, 3]
    (record,) = caplog.records
    assert "missing file" in record.getMessage()
    assert "1.png" in record.getMessage()


@pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_resumed_run_puts_the_same_row_in_the_place_of_a_broken_one(
    tmp_path: Path, write_rows: WriteRows, vlm_folder: str
) -> None:
    path = write_rows(rows(tmp_path, 8))
    # only heads are looked at, so that both runs begin with the same rows
    cut(tmp_path / "2.png")
    cut(tmp_path / "5.png")

    def data() -> PromptDataModule:
        media = MediaOptions(check="files")
        return PromptDataModule(path, tokenizer=vlm_folder, batch_size=2, media=media)

    whole = resumes_alike(tmp_path, Remembers, data, (3, 6))
    assert len(whole.seen) == 3 * 4
    for epoch in range(3):
        seen = [row for step in whole.seen[4 * epoch : 4 * epoch + 4] for row in step]
        assert sorted(seen) == [0, 1, 3, 3, 4, 6, 6, 7]
