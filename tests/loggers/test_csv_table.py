from pathlib import Path

import pytest

from lrlhf.loggers.csv import CSVTable


@pytest.fixture
def table(tmp_path: Path) -> CSVTable:
    return CSVTable(tmp_path / "t.csv")


def test_new_columns_are_put_in_their_place_and_forgotten_with_their_rows(table: CSVTable) -> None:
    table.append({"step": 0, "b": 0.25})
    table.append({"a": 1e-300, "epoch": 0, "step": 1})
    assert table.path.read_text() == "step,epoch,a,b\n0,,,0.25\n1,0,1e-300,\n"
    again = CSVTable(table.path)
    assert again.cut_back(1) == 2
    assert again.path.read_text() == "step,b\n0,0.25\n"
    again.append({"step": 1, "b": 3})
    assert again.path.read_text() == "step,b\n0,0.25\n1,3\n"


def test_text_stays_in_its_cell_and_its_line(table: CSVTable) -> None:
    table.append({"step": 0, "note": 'one, "two"\nthree'})
    assert CSVTable(table.path).cut_back() == 1
    assert table.path.read_text() == 'step,note\n0,"one, ""two"" three"\n'


def test_a_row_that_did_not_fit_on_the_disk_is_overwritten(table: CSVTable) -> None:
    table.append({"step": 0})
    with table.path.open("ab") as handle:
        handle.write(b"1")
    table.append({"step": 1})
    assert table.path.read_text() == "step\n0\n1\n"


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"\xff\xfe\n", "is no table of metrics"),
        (b"step,epoch\n1\n", "line 2: more or fewer cells than the header"),
        (b"step,epoch\n1,2,3\n", "line 2: more or fewer cells"),
    ],
)
def test_a_file_that_is_no_table_is_named(table: CSVTable, content: bytes, what: str) -> None:
    table.path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"t\.csv.*{what}"):
        table.cut_back()
