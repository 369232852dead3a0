import csv
import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import pyarrow
import pyarrow.parquet
import pytest

from lrlhf.datamodules import BadDataError, BadRow, FileSource, HubSource, Weighted
from lrlhf.datamodules.loading.sources import components_of, resolve_source

ROWS = [{"prompt": "one", "answer": "ä"}, {"prompt": "two", "answer": "β\n"}]


def write(path: Path) -> None:
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    if plain.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), plain)
    elif plain.suffix == ".csv":
        with plain.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, ["prompt", "answer"])
            writer.writeheader()
            writer.writerows(ROWS)
    elif plain.suffix == ".json":
        plain.write_text(json.dumps(ROWS), encoding="utf-8")
    else:
        plain.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()


# a time of zero: the names of the tests must be the same in every process
CUT_GZIP = gzip.compress(b'{"a": 1}\n' * 500, mtime=0)[:-12]


@pytest.mark.parametrize("compressed", ["", ".gz"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".csv"])
def test_every_file_format_gives_the_same_rows(
    tmp_path: Path, suffix: str, compressed: str
) -> None:
    path = tmp_path / f"data.v2{suffix}{compressed}"
    write(path)
    (source,) = resolve_source(str(path))
    assert list(source.rows()) == ROWS
    assert source.name == str(path)


@pytest.mark.parametrize(
    ("named", "expected"),
    [(".", ["a.csv", "b.jsonl", "b-0.jsonl"]), ("b*.jsonl", ["b-0.jsonl", "b.jsonl"])],
)
def test_a_folder_or_pattern_gives_its_data_files_in_order(
    tmp_path: Path, named: str, expected: list[str]
) -> None:
    for name in ("b.jsonl", "b-0.jsonl", "a.csv"):
        write(tmp_path / name)
    (tmp_path / "README.md").write_text("no data")
    found = [Path(source.name).name for source in resolve_source(str(tmp_path / named))]
    assert found == sorted(expected)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("valid-*.jsonl", r"pattern '.*valid-\*\.jsonl' holds no data file"),
        ("trian.jsonl", r"no file or folder .*; did you mean 'train.jsonl'"),
        ("nowhere/train.jsonl", r"nor is there a folder .*nowhere"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, named: str, message: str) -> None:
    write(tmp_path / "train.jsonl")
    with pytest.raises(BadDataError, match=message):
        resolve_source(str(tmp_path / named))


def test_a_hub_id_that_cannot_be_reached_says_so_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the variable HF_HUB_OFFLINE is read when the package is imported, which was before
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (source,) = resolve_source("nobody/no-such-data:main@train")
    with pytest.raises(BadDataError, match=r"config 'main', split 'train'.*path of a local file"):
        list(source.rows())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("squad", ("squad", None, "train")),
        ("openai/gsm8k@test[:10%]", ("openai/gsm8k", None, "test[:10%]")),
        ("openai/gsm8k:main@test", ("openai/gsm8k", "main", "test")),
    ],
)
def test_a_hub_id_carries_config_and_split(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: tuple[Any, ...]
) -> None:
    def load_dataset(path: str, name: str | None, *, split: str) -> list[Any]:
        return [{"asked": (path, name, split)}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (source,) = resolve_source(text)
    assert isinstance(source, HubSource)
    assert list(source.rows()) == [{"asked": list(expected)}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", b'{"prompt": 1}', "it holds one dict"),
        ("x.json", b"[1", "cannot be read as .json"),
        ("x.parquet", b"PAR1", "cannot be read as .parquet"),
        ("x.jsonl.gz", b"not gzip", "cannot be read as .jsonl"),
        ("x.jsonl.gz", CUT_GZIP, "cannot be read as .jsonl"),
        ("x.csv", b'a,b\n"1,2\n', "cannot be read as .csv"),
        ("x.txt", b"hello", "not from .txt"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadDataError, match=rf"{name}: .*{message}"):
        list(FileSource(str(tmp_path / name)).rows())


def test_blank_lines_count_only_between_rows(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n\n{"a": 2}\n\n\n')
    first, blank, last = FileSource(str(path)).rows()
    assert (first, last) == ({"a": 1}, {"a": 2})
    assert isinstance(blank, BadRow)


def test_impossible_mixtures_are_refused() -> None:
    with pytest.raises(ValueError, match=r"x\.jsonl' has no weight"):
        components_of([Weighted("a/b", 2.0), "x.jsonl"])
    with pytest.raises(ValueError, match="at least one"):
        components_of([])
    with pytest.raises(ValueError, match="is no hub id"):
        resolve_source("a b c")
    for weight in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="above 0"):
            Weighted("x.jsonl", weight)
