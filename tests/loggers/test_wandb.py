"""The rows of a killed W&B run: all of them, each once."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lrlhf.loggers.wandb_files import records_of, rows_on_file
from lrlhf.loggers.wandb_journal import RowJournal

wandb = pytest.importorskip("wandb")


def history(folder: Path) -> dict[str, list[dict[str, float]]]:
    """Rows by run, of all processes."""
    messages = importlib.import_module("wandb.proto.wandb_internal_pb2")
    rows: dict[str, list[dict[str, float]]] = {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in records_of(path.read_bytes()):
            record = messages.Record()
            record.ParseFromString(data)
            items = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            if items:
                rows.setdefault(path.stem.removeprefix("run-"), []).append(items)
    return rows


def run(folder: Path, *, killed_at: int = 0) -> int:
    command = [sys.executable, "-W", "ignore", "-m", "tests.loggers.wandb_process"]
    # W&B's service of this process, if an earlier test has started one, outlives the killed run
    own = {name: value for name, value in os.environ.items() if "WANDB_SERVICE" not in name}
    done = subprocess.run([*command, str(folder), str(killed_at)], check=False, env=own)
    return done.returncode


@pytest.mark.slow
def test_a_killed_run_goes_on_as_the_same_run_with_every_row_once(tmp_path: Path) -> None:
    assert run(tmp_path, killed_at=8) == -9
    # the service had all of it in memory: nothing reached the disk
    assert history(tmp_path) == {}
    assert run(tmp_path, killed_at=9) == -9
    assert run(tmp_path) == 0
    ((_, rows),) = history(tmp_path).items()
    # ten steps, validation after 4 and 8, epochs of five
    assert sorted(row["_step"] for row in rows) == list(range(14))
    by_axis = {row["trainer/global_step"] for row in rows if "train/loss" in row}
    assert by_axis == set(range(10))
    assert [row["trainer/global_step"] for row in rows if "eval/loss" in row] == [3, 7]


@pytest.mark.slow
def test_rows_that_reached_the_disk_are_not_sent_again(tmp_path: Path) -> None:
    assert run(tmp_path) == 0
    ((run_id, rows),) = history(tmp_path).items()
    assert rows_on_file(tmp_path, run_id) == set(range(14))
    assert len(rows) == 14
    # resumed from its end, with nothing left to do
    assert run(tmp_path) == 0
    ((same_id, again),) = history(tmp_path).items()
    assert (same_id, len(again)) == (run_id, 14)


def test_a_journal_forgets_what_came_after_a_position(tmp_path: Path) -> None:
    journal = RowJournal(tmp_path / "rows.jsonl")
    journal.begin("one")
    assert [journal.append({"a": value}, step=0) for value in (0.5, float("nan"), 2)] == [0, 1, 2]
    journal.append({"table": object()}, step=1)
    with journal.path.open("ab") as handle:
        handle.write(b'{"row": 4, "st')
    again = RowJournal(journal.path)
    kept = again.go_back("one", 4)
    assert [record["row"] for record in kept] == [0, 1, 2, 3]
    assert kept[0]["metrics"] == {"a": 0.5}
    assert kept[3]["metrics"] is None
    assert again.append({"a": 1}, step=2) == 4


def test_the_journal_of_another_run_is_kept(tmp_path: Path) -> None:
    journal = RowJournal(tmp_path / "rows.jsonl")
    journal.begin("one")
    journal.append({"a": 1}, step=0)
    assert RowJournal(journal.path).go_back("two", 7) == []
    assert '"one"' in (tmp_path / "rows.1.jsonl").read_text()


def test_a_journal_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"step,epoch\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl holds a line that is no JSON"):
        RowJournal(tmp_path / "rows.jsonl").go_back("one", 1)
