import errno
from pathlib import Path

import pytest

from lrlhf.loggers.csv_table import CSVTable
from lrlhf.loggers.growing_file import GrowingFile


def test_new_columns_are_put_in_their_place(tmp_path: Path) -> None:
    table = CSVTable(tmp_path / "t.csv")
    table.append({"step": 0, "b": 0.25})
    table.append({"a": 1e-300, "epoch": 0, "step": 1})
    assert table.path.read_text() == "step,epoch,a,b\n0,,,0.25\n1,0,1e-300,\n"


def test_going_back_forgets_rows_and_columns(tmp_path: Path) -> None:
    table = CSVTable(tmp_path / "t.csv")
    table.append({"step": 0, "b": 1})
    table.append({"step": 1, "a": 2})
    again = CSVTable(tmp_path / "t.csv")
    assert again.go_back(1, ["step", "b"]) == 2
    assert again.path.read_text() == "step,b\n0,1\n"
    again.append({"step": 1, "b": 3})
    assert again.path.read_text() == "step,b\n0,1\n1,3\n"


def test_text_stays_in_its_cell_and_its_line(tmp_path: Path) -> None:
    table = CSVTable(tmp_path / "t.csv")
    table.append({"step": 0, "note": 'one, "two"\nthree'})
    assert CSVTable(table.path).go_back(5, ["step", "note"]) == 1
    assert table.path.read_text() == 'step,note\n0,"one, ""two"" three"\n'


def test_a_row_that_did_not_fit_on_the_disk_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = CSVTable(tmp_path / "t.csv")
    table.append({"step": 0})

    def half(self: GrowingFile, data: bytes) -> None:
        with self.path.open("ab") as handle:
            handle.write(data[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(GrowingFile, "append", half)
        with pytest.raises(OSError, match="No space"):
            table.append({"step": 10})
    table.append({"step": 1})
    assert table.path.read_text() == "step\n0\n1\n"


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match=r"t\.csv is no table of metrics"):
        CSVTable(path).take_up()
