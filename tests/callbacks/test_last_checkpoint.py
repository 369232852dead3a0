"""``--ckpt_path last``: the newest checkpoint that is whole, whatever became of the others."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lrlhf.callbacks import AtomicCheckpointIO, RLCheckpoint
from lrlhf.run.atomic import atomic_link
from lrlhf.run.checkpoints.checkpoint_reader import NotACheckpointError, flaw_of
from lrlhf.run.checkpoints.checkpoint_search import newest_intact
from lrlhf.run.checkpoints.sharded_checkpoint import convert_checkpoint
from tests.callbacks.fakes import ToyPolicy, batches, trainer


def fit(
    tmp_path: Path, steps: int, *, ckpt_path: Any = None, **options: Any
) -> tuple[ToyPolicy, RLCheckpoint]:
    place = options.pop("place", tmp_path / "ck")
    module = ToyPolicy(fail_at_step=options.pop("fail_at_step", None))
    callback = RLCheckpoint(place, **({"every_n_train_steps": 2} | options))
    run = trainer(
        tmp_path,
        callback,
        enable_checkpointing=True,
        plugins=[AtomicCheckpointIO()],
        max_steps=steps,
        max_epochs=-1,
    )
    run.fit(module, batches(100), ckpt_path=ckpt_path, weights_only=True)
    return module, callback


def names(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "ck").iterdir()}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    """Change one bit of the trained weight, which PyTorch reads without a word."""
    content = bytearray(path.read_bytes())
    place = content.index(torch.tensor(4.0).numpy().tobytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert torch.load(path, weights_only=True)["state_dict"]["policy.trained"] != 4.0


def flip_at(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 16
    path.write_bytes(content)


def fit_to_a_folder(tmp_path: Path) -> Path:
    """Train 4 steps, and turn the newest checkpoint into a folder of shards."""
    fit(tmp_path, 4)
    newest = tmp_path / "ck" / "step=000004.ckpt"
    newest.rename(tmp_path / "file")
    convert_checkpoint(tmp_path / "file", newest, "sharded")
    return newest


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (cut, "it is cut short"),
    "one bit": (flip, "has other bytes than were written"),
    "empty": (lambda path: path.write_bytes(b""), "it is empty"),
    "another kind": (lambda path: path.write_text("hello " * 50), "a file of another kind"),
}
ALL = {"step=000002.ckpt", "step=000004.ckpt", "last.ckpt"}


@pytest.mark.filterwarnings("ignore:.*is passed over")
def test_the_one_before_a_damaged_one_is_taken_and_the_end_is_the_same(tmp_path: Path) -> None:
    fit(tmp_path, 4)
    flip(tmp_path / "ck" / "step=000004.ckpt")
    with pytest.warns(UserWarning, match=r"is passed over, and step=000002\.ckpt is .*other bytes"):
        module, _ = fit(tmp_path, 6, ckpt_path="last")
    assert module.weight == 6.0
    # nothing is lost: what is damaged is kept under another name
    kept = {"step=000004.ckpt.damaged", "step=000006.ckpt"}
    assert names(tmp_path) == (ALL | kept) - {"step=000002.ckpt"}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_that_was_named_is_an_error(damage: str, tmp_path: Path) -> None:
    fit(tmp_path, 4)
    spoil, reason = DAMAGES[damage]
    named = tmp_path / "ck" / "step=000004.ckpt"
    spoil(named)
    with pytest.raises(NotACheckpointError, match=reason) as caught:
        fit(tmp_path, 6, ckpt_path=named)
    assert str(named) in str(caught.value)
    assert "--ckpt_path last takes the newest whole one" in str(caught.value)
    assert newest_intact(tmp_path / "ck", "last").path == tmp_path / "ck" / "step=000002.ckpt"


def test_no_whole_one_is_an_error_and_no_fresh_start(tmp_path: Path) -> None:
    fit(tmp_path, 4)
    for path in (tmp_path / "ck").glob("step*"):
        cut(path)
    with pytest.raises(
        NotACheckpointError, match=r"none of them can be used.*step=000002\.ckpt: it is cut short"
    ):
        fit(tmp_path, 6, ckpt_path="last")
    assert names(tmp_path) == ALL


def test_where_nothing_is_the_run_starts_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="lrlhf"):
        module, _ = fit(tmp_path, 2, ckpt_path="last")
    assert module.weight == 2.0
    assert sum("starts from the beginning" in line for line in caplog.messages) == 1
    assert not any("no last checkpoint" in line for line in caplog.messages)


@pytest.mark.filterwarnings("ignore:.*is passed over")
def test_a_link_that_leads_nowhere_is_passed_over(tmp_path: Path) -> None:
    fit(tmp_path, 4)
    (tmp_path / "ck" / "step=000004.ckpt").unlink()
    with pytest.warns(UserWarning, match=r"a link to step=000004\.ckpt, which is not there"):
        module, _ = fit(tmp_path, 5, ckpt_path="last")
    assert module.weight == 5.0
    assert names(tmp_path) == ALL


@pytest.mark.filterwarnings("ignore:.*is passed over")
@pytest.mark.parametrize(
    ("part", "missing"), [("__0_0.distcp", False), ("meta.pt", True), (".metadata", False)]
)
def test_a_folder_with_a_damaged_part_is_passed_over(
    part: str, missing: bool, tmp_path: Path
) -> None:
    newest = fit_to_a_folder(tmp_path)
    assert newest_intact(tmp_path / "ck", "last").path == tmp_path / "ck" / "last.ckpt"
    if missing:
        (newest / part).unlink()
    else:
        flip_at(newest / part, (newest / part).stat().st_size // 3)
    found = newest_intact(tmp_path / "ck", "last")
    assert found.path == tmp_path / "ck" / "step=000002.ckpt"
    assert part in next(iter(found.passed.values()))


def test_a_damaged_list_of_parts_is_found_wherever_the_damage_is(tmp_path: Path) -> None:
    """At every byte, since what is in the list differs from run to run."""
    newest = fit_to_a_folder(tmp_path)
    content = (newest / "checksums.json").read_bytes()
    flaws = []
    for place in range(len(content)):
        flip_at(newest / "checksums.json", place)
        flaws.append(flaw_of(newest))
        (newest / "checksums.json").write_bytes(content)
    assert flaw_of(newest) == ""
    assert all(flaws), content[flaws.index("") :][:20]
    # a list that is readable and wrong puts the blame on what it lists
    for words in ("checksums.json cannot be read", "has other bytes", "is not there"):
        assert any(words in flaw for flaw in flaws), words


def test_the_steps_count_and_not_the_times_of_the_files(tmp_path: Path) -> None:
    fit(tmp_path, 6, save_top_k=-1)
    folder = tmp_path / "ck"
    (folder / "last.ckpt").unlink()
    for age, step in enumerate((6, 4, 2)):  # the oldest file has the most steps
        os.utime(folder / f"step=00000{step}.ckpt", (1e9 + age, 1e9 + age))
    (folder / "step=000006.ckpt").rename(folder / "b.ckpt")
    assert newest_intact(folder, "last").path == folder / "b.ckpt"


# at 4 nothing has been removed yet, at 10 the oldest ones have
@pytest.mark.parametrize("step", [4, 10])
def test_a_kill_before_last_was_led_on_loses_nothing(
    step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(path: Path, target: Path) -> None:
        if target.name == f"step={step:06d}.ckpt":
            raise Killed
        atomic_link(path, target)

    with monkeypatch.context() as patched:
        patched.setattr("lrlhf.callbacks.rl_checkpoint.atomic_link", killed)
        with pytest.raises(Killed):
            fit(tmp_path, step + 2)
    killed_at = tmp_path / "ck" / f"step={step:06d}.ckpt"
    assert (tmp_path / "ck" / "last.ckpt").resolve().name == f"step={step - 2:06d}.ckpt"
    assert newest_intact(tmp_path / "ck", "last").path == killed_at
    module, _ = fit(tmp_path, step + 4, ckpt_path="last")
    assert module.weight == step + 4
    newest = {f"step={step + 2:06d}.ckpt", f"step={step + 4:06d}.ckpt"}
    assert names(tmp_path) == {*newest, "last.ckpt"}


def test_another_branch_is_not_taken_for_the_newest(tmp_path: Path) -> None:
    fit(tmp_path, 8, save_top_k=-1)
    fit(tmp_path, 4, save_top_k=-1, ckpt_path=tmp_path / "ck" / "step=000002.ckpt")
    # step 8 is there still, but what was done last is the second step 4
    last = newest_intact(tmp_path / "ck", "last").path
    assert last is not None
    assert last.name == "last.ckpt"
    assert last.resolve().name == "step=000004-v1.ckpt"


@pytest.mark.filterwarnings("ignore:.*checkpoints of an earlier run")
def test_a_folder_of_weights_alone_has_no_place_to_go_on_from(tmp_path: Path) -> None:
    fit(tmp_path, 2, save_weights_only=True)
    with pytest.raises(NotACheckpointError, match="holds weights only"):
        fit(tmp_path, 4, ckpt_path="last")


@pytest.mark.parametrize("links", [True, False])
def test_last_is_a_link_or_where_links_are_refused_a_copy(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError("not on this file system")

    if not links:
        monkeypatch.setattr(Path, "symlink_to", refused)
    fit(tmp_path, 4)
    assert (tmp_path / "ck" / "last.ckpt").is_symlink() == links
    # the folder can be moved
    (tmp_path / "ck").rename(tmp_path / "moved")
    assert torch.load(tmp_path / "moved" / "last.ckpt", weights_only=True)["global_step"] == 4


def test_a_link_takes_the_place_of_anything_and_anything_its_place(tmp_path: Path) -> None:
    file, folder, link = tmp_path / "file", tmp_path / "folder", tmp_path / "last.ckpt"
    file.write_text("file")
    folder.mkdir()
    for before in (None, file, folder, tmp_path / "nowhere"):
        for target in (file, folder):
            if before is not None and before.is_dir():
                shutil.copytree(before, link)
            elif before is not None:
                link.symlink_to(before)
            atomic_link(link, target)
            assert link.readlink() == Path(target.name)
            link.unlink()
    assert sorted(tmp_path.iterdir()) == [file, folder]


def test_a_run_that_goes_on_writes_no_second_copy_and_removes_what_a_kill_left(
    tmp_path: Path,
) -> None:
    fit(tmp_path, 4)
    fit(tmp_path, 4, ckpt_path="last")
    assert names(tmp_path) == ALL
    assert (tmp_path / "ck" / "last.ckpt").is_symlink()
    shutil.copy(tmp_path / "ck" / "step=000002.ckpt", tmp_path / "kept")
    fit(tmp_path, 6, ckpt_path="last")
    assert names(tmp_path) == {"step=000004.ckpt", "step=000006.ckpt", "last.ckpt"}
    # as if it had come before the removal of step 2
    shutil.copy(tmp_path / "kept", tmp_path / "ck" / "step=000002.ckpt")
    fit(tmp_path, 8, ckpt_path="last")
    assert names(tmp_path) == {"step=000006.ckpt", "step=000008.ckpt", "last.ckpt"}


def test_what_lies_below_is_another_runs(tmp_path: Path) -> None:
    fit(tmp_path / "ck" / "below", 8)  # its checkpoints are in ck/below/ck
    busy = tmp_path / "ck" / "below" / "ck" / ".step=000010.ckpt.tmp"
    busy.write_bytes(b"another process writes here")
    assert newest_intact(tmp_path / "ck", "last").path is None
    fit(tmp_path, 4)
    assert newest_intact(tmp_path / "ck", "last").path == tmp_path / "ck" / "last.ckpt"
    assert busy.exists()


def test_a_disk_that_does_not_answer_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tmp_path, 4)
    real = Path.open

    def failing(path: Path, *args: Any, **options: Any) -> Any:
        if path.suffix == ".ckpt":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", failing)
        with pytest.raises(OSError, match="Input/output error"):
            newest_intact(tmp_path / "ck", "last")
    assert names(tmp_path) == ALL


def test_a_run_goes_on_from_a_folder_elsewhere(tmp_path: Path) -> None:
    # what has a protocol is Lightning's to write and to find
    place = f"memory://{tmp_path.name}"
    fit(tmp_path, 4, place=place)
    # from the beginning it would fail
    module, _ = fit(tmp_path, 6, ckpt_path="last", place=place, fail_at_step=1)
    assert module.weight == 6.0
