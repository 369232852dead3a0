"""Files and folders that take each other's place: the old one or the new one, also after a kill."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lrlhf.run.atomic import atomic_folder, atomic_write, recover_folder


class Killed(BaseException):
    """What nothing catches, as a kill."""


def write_a_file(path: Path, text: str) -> None:
    with atomic_write(path) as handle:
        handle.write(text.encode())


def write_a_folder(path: Path, text: str) -> None:
    with atomic_folder(path) as fresh:
        (fresh / "part").write_text(text)


def text_of(path: Path) -> str:
    return (path / "part" if path.is_dir() else path).read_text()


KINDS = (write_a_file, write_a_folder)
Write = Callable[[Path, str], None]


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_a_kill_between_any_two_steps_leaves_one_of_them(
    first: Write, second: Write, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    first(path, "old")
    left = steps

    def killed_when_none_is_left(change: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object, **options: object) -> object:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return change(*arguments, **options)

        return wrapped

    with monkeypatch.context() as patched:
        for name in ("rename", "replace", "unlink"):
            patched.setattr(Path, name, killed_when_none_is_left(getattr(Path, name)))
        patched.setattr("shutil.rmtree", lambda *_, **__: None)  # a kill leaves all of it
        try:
            second(path, "new")
            done = True
        except Killed:
            done = False

    recover_folder(path)
    assert text_of(path) == "new" if done else text_of(path) in ("old", "new")
    # what is left over is in nobody's way
    for again in KINDS:
        again(path, "newer")
        assert text_of(path) == "newer"
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("first", KINDS)
def test_either_kind_takes_the_place_of_either_unless_it_fails_midway(
    first: Write, tmp_path: Path
) -> None:
    path = tmp_path / "last.ckpt"
    first(path, "old")
    for write in (atomic_write, atomic_folder):
        with pytest.raises(OSError, match="disk full"), write(path):  # type: ignore[operator]
            raise OSError("disk full")
        assert text_of(path) == "old"
        assert list(tmp_path.iterdir()) == [path]
    for second in KINDS:
        second(path, "new")
        assert text_of(path) == "new"
        assert path.is_dir() == (second is write_a_folder)
        assert list(tmp_path.iterdir()) == [path]


def test_the_newer_of_two_wins_when_both_are_there(tmp_path: Path) -> None:
    # killed after both renames, before the old folder was removed
    write_a_folder(tmp_path / "a", "new")
    write_a_folder(tmp_path / ".a.old", "old")
    recover_folder(tmp_path / "a")
    assert text_of(tmp_path / "a") == "new"
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_a_link_to_a_checkpoint_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    target, link = tmp_path / "kept", tmp_path / "last"
    for first in KINDS:
        first(target, "kept")
        for write in KINDS:
            link.symlink_to(target)
            write(link, "new")
            assert not link.is_symlink()
            assert text_of(link) == "new"
            assert text_of(target) == "kept"
            assert sorted(tmp_path.iterdir()) == [target, link]
            write_a_file(link, "")
            link.unlink()


@pytest.mark.parametrize("write", KINDS)
@pytest.mark.parametrize("first", [atomic_write, atomic_folder])
def test_two_that_write_at_a_time_do_not_touch_each_other(
    first: Callable[[Path], Any], write: Write, tmp_path: Path
) -> None:
    path = tmp_path / "last.ckpt"
    with first(path) as unfinished:
        (unfinished.write if first is atomic_write else (unfinished / "part").write_bytes)(b"first")
        write(path, "second")
        assert text_of(path) == "second"
    assert text_of(path) == "first"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="a process is forked")
@pytest.mark.parametrize("write", [atomic_write, atomic_folder])
def test_what_a_killed_process_was_writing_is_removed_and_what_a_living_one_writes_is_not(
    write: Callable[[Path], Any], tmp_path: Path
) -> None:
    path = tmp_path / "step=[1].ckpt"
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with write(path):
            os.write(writing, b"x")
            time.sleep(60)
        os._exit(1)
    os.close(writing)
    assert os.read(reading, 1)  # it writes, and holds what it writes
    os.close(reading)
    write_a_file(path, "mine")
    assert len(list(tmp_path.iterdir())) == 2
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    write_a_file(path, "mine")
    assert list(tmp_path.iterdir()) == [path]
