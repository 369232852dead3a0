from collections.abc import Iterator
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from lrlhf.callbacks.output_files import atomic_folder, atomic_write, output_folder
from tests.callbacks.fakes import trainer


def fails_midway() -> Iterator[bytes]:
    yield b"ne"
    raise OSError("disk full")


def test_a_write_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.txt"
    for text in (b"one", b"two"):
        with atomic_write(path) as handle:
            handle.write(text)
    assert path.read_bytes() == b"two"
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_midway_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text("old")
    with pytest.raises(OSError, match="disk full"), atomic_write(path) as handle:
        handle.writelines(fails_midway())
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_old_file_is_readable_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    path.write_text("old")
    with atomic_write(path) as handle:
        handle.write(b"new")
        handle.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"


def test_a_folder_replaces_an_old_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "model"
    for name in ("a", "b"):
        with atomic_folder(path) as fresh:
            (fresh / name).write_text(name)
    assert [file.name for file in path.iterdir()] == ["b"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_fails_midway_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "model"
    with atomic_folder(path) as fresh:
        (fresh / "a").write_text("old")
    with pytest.raises(OSError, match="disk full"), atomic_folder(path) as fresh:
        (fresh / "a").write_bytes(b"".join(fails_midway()))
    assert (path / "a").read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_moved_aside_by_a_killed_process_comes_back(tmp_path: Path) -> None:
    # the state between the two renames: the old one aside, the new one not yet in place
    (tmp_path / ".model.old").mkdir()
    (tmp_path / ".model.old" / "a").write_text("old")
    (tmp_path / ".model.tmp").mkdir()
    with pytest.raises(OSError, match="again"), atomic_folder(tmp_path / "model"):
        raise OSError("again")
    assert (tmp_path / "model" / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_output_folder_is_the_argument_then_the_loggers_then_the_root(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path / "logs", name="run", version=3)
    logged = trainer(tmp_path, logger=logger)
    assert output_folder(logged, "given") == Path("given")
    assert output_folder(logged, None) == tmp_path / "logs" / "run" / "version_3"
    assert output_folder(trainer(tmp_path), None) == tmp_path


def test_a_trial_run_writes_to_a_folder_of_its_own(tmp_path: Path) -> None:
    trial = trainer(tmp_path, fast_dev_run=True)
    assert output_folder(trial, None) == tmp_path / "fast_dev_run"
    assert output_folder(trial, "given") == Path("given/fast_dev_run")
