import csv
import gzip
import json
import math
import os
import re
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub.constants
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from lrlhf.datamodules import BadDataError, BadRow, FileSource, HubSource, MemorySource, Weighted
from lrlhf.datamodules.loading import files
from lrlhf.datamodules.loading.sources import components_of, resolve_source

ROWS = [{"prompt": "one", "answer": "ä"}, {"prompt": "two", "answer": "β\n"}]


def write(path: Path) -> None:
    plain = path.with_suffix("") if path.suffix in (".gz", ".zst") else path
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
    if path.suffix == ".zst":
        path.write_bytes(pyarrow.compress(plain.read_bytes(), codec="zstd", asbytes=True))
        plain.unlink()
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(plain.read_bytes()))
        plain.unlink()


# a time of zero: the names of the tests must be the same in every process
CUT_GZIP = gzip.compress(b'{"a": 1}\n' * 500, mtime=0)[:-12]


@pytest.mark.parametrize("compressed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".csv"])
def test_every_file_format_gives_the_same_rows(
    tmp_path: Path, suffix: str, compressed: str
) -> None:
    path = tmp_path / f"data.v2{suffix}{compressed}"
    write(path)
    (source,) = resolve_source(str(path))
    assert list(source) == ROWS
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


def test_what_datasets_saved_is_not_read_as_rows(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{"a": 1}])
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=rows).save_to_disk(tmp_path / "several")
    for name in ("one", "several"):
        with pytest.raises(BadDataError, match=rf"{name}' is what save_to_disk .*to_parquet"):
            resolve_source(str(tmp_path / name))


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
    assert list(source) == [{"asked": list(expected)}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", b'{\n"prompt": 1}', "it holds one dict"),
        ("x.json", b"[1", "cannot be read as .json"),
        ("x.parquet", b"PAR1", "cannot be read as .parquet"),
        ("x.jsonl.gz", b"not gzip", "cannot be read as .jsonl"),
        ("x.jsonl.gz", CUT_GZIP, "cannot be read as .jsonl"),
        ("x.csv", b'a,b\n"1,2\n', "cannot be read as .csv"),
        ("x.csv", b"a;b\n1;2\n", "separated by ';': write it with commas"),
        ("x.csv", b"a\tb\n1\t2,5\n", "separated by .*: write it with commas"),
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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"a": 1, "a": 2}', r"the key 'a' stands twice"),
        ("x.jsonl", b'{"a": {"b": 1, "b": 2}}', r"the key 'b' stands twice"),
        ("x.jsonl", '{"a": "\u00e9"}'.encode("cp1252"), r"0xE9.* is no UTF-8"),
        ("x.json", '[{"a": "\u00e9"}]'.encode("cp1252"), r"0xE9.* is no UTF-8"),
        ("x.csv", "a\n\u00e9\n".encode("cp1252"), r"0xE9.* is no UTF-8"),
        ("x.jsonl", b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}", "without end"),
    ],
)
def test_a_row_that_would_be_misread_is_a_bad_row(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    (row,) = FileSource(str(tmp_path / name))
    assert isinstance(row, BadRow)
    assert re.search(message, row.detail)


def test_columns_that_stand_twice_are_refused_by_name(tmp_path: Path) -> None:
    twice = pyarrow.table([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    pyarrow.parquet.write_table(twice, tmp_path / "x.parquet")
    (tmp_path / "x.csv").write_text("a,b,a\n1,2,3\n")
    pairs = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    a_map = pyarrow.table({"m": pyarrow.array([[("k", 1), ("k", 2)]], pairs)})
    for data in (tmp_path / "x.parquet", tmp_path / "x.csv", twice, a_map):
        source = FileSource(str(data)) if isinstance(data, Path) else MemorySource(data)
        with pytest.raises(BadDataError, match=r"several columns 'a'|two columns 'a'|key was 'k'"):
            list(source)


def test_what_never_ends_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "device.csv").symlink_to("/dev/zero")
    for name in ("pipe.jsonl", "device.csv"):
        with pytest.raises(BadDataError, match=f"{name}: .* it is no regular file"):
            list(FileSource(str(tmp_path / name)))
        with pytest.raises(BadDataError, match=f"{name}' is a pipe or a device"):
            resolve_source(str(tmp_path / name))
    for name in (".", "*.jsonl"):
        with pytest.raises(BadDataError, match=r"no data file but pipes or devices .*'pipe.jsonl'"):
            resolve_source(str(tmp_path / name))
    monkeypatch.setattr(files, "_LONGEST", 2**16)
    endless = gzip.compress(b"[" * 2**20)
    for name in ("x.jsonl.gz", "x.json.gz", "x.csv.gz"):
        (tmp_path / name).write_bytes(endless)
        with pytest.raises(BadDataError, match=f"{name}: .* more than 65,536 characters"):
            list(FileSource(str(tmp_path / name)))
    # all in one row, which Parquet stores as a number and how often it comes
    pyarrow.parquet.write_table(
        pyarrow.table({"a": [np.zeros(2**16 + 1, dtype=np.int8)]}), tmp_path / "x.parquet"
    )
    monkeypatch.setattr(files, "_RATIO", 10)
    with pytest.raises(BadDataError, match=r"x.parquet: .* far more than its own size"):
        list(FileSource(str(tmp_path / "x.parquet")))
    monkeypatch.setattr(files, "_UNPACKED", 2**16)
    monkeypatch.setattr(files, "_ROWS", 1000)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b"\n" * 2000 + b"{}"))
    with pytest.raises(BadDataError, match="more than 1,000 empty lines"):
        list(FileSource(str(tmp_path / "x.jsonl.gz")))
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * 2000))
    with pytest.raises(BadDataError, match="unpacks to more than 1,000 rows"):
        list(FileSource(str(tmp_path / "x.jsonl.gz")))
    row = b'{"a": "' + b"x" * 1000 + b'"}\n'
    for name, content in (
        ("x.jsonl.gz", gzip.compress(row * 200)),
        ("x.jsonl.zst", pyarrow.compress(row * 200, codec="zstd", asbytes=True)),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadDataError, match=f"{name}: .* far more than its own size"):
            list(FileSource(str(tmp_path / name)))
    pyarrow.parquet.write_table(
        pyarrow.table({"a": ["x" * 1000] * 1000}), tmp_path / "x.parquet", compression="zstd"
    )
    with pytest.raises(BadDataError, match=r"x.parquet: .* far more than its own size"):
        list(FileSource(str(tmp_path / "x.parquet")))


def test_the_values_of_tables_are_those_of_json() -> None:
    """Dates are text in JSON, decimals numbers, maps objects, and tuples lists."""
    table = pyarrow.table(
        {
            "at": pyarrow.array([datetime(2020, 1, 2, 3)], pyarrow.timestamp("ns")),
            "day": [date(2020, 1, 2)],
            "price": [Decimal("1.50")],
            "counts": pyarrow.array(
                [[("k", 1), ("l", None)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())
            ),
            "word": pyarrow.array(["x"]).dictionary_encode(),
            "long": pyarrow.array([["x"]], pyarrow.large_list(pyarrow.large_string())),
            "view": pyarrow.array([["x"]], pyarrow.list_view(pyarrow.string())),
        }
    )
    expected = {
        **{"at": "2020-01-02T03:00:00", "day": "2020-01-02", "price": 1.5, "counts": {"k": 1}},
        **{"word": "x", "long": ["x"], "view": ["x"]},
    }
    assert list(MemorySource(table)) == [expected]
    held = {"at": np.datetime64("2020-01-02T03", "ns"), "day": date(2020, 1, 2)}
    held |= {"price": Decimal("1.50"), "counts": {"k": np.int8(1), "l": math.nan}}
    held |= {"word": np.str_("x"), "long": ("x",), "view": np.array(["x"])}
    assert list(MemorySource([held])) == [expected]


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
