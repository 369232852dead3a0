"""A disk that takes no more: the system's own words, with the name of what was written."""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lrlhf.run import AtomicCheckpointIO
from lrlhf.run.atomic import atomic_folder, naming
from lrlhf.run.checkpoints.sharded_checkpoint import convert_checkpoint, save_folder

LIMIT = 100_000
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "many tensors": {"state_dict": {str(n): torch.randn(2_000) for n in range(60)}},
    "one tensor": {"state_dict": {"w": torch.randn(100_000)}},
    "no tensors": {"state_dict": {}, "words": [f"{n:050d}" for n in range(10_000)]},
}


@pytest.fixture
def full() -> Iterator[None]:
    """No file can grow above a size: the system answers as it does when a disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def as_file(checkpoint: dict[str, Any], path: Path) -> None:
    AtomicCheckpointIO().save_checkpoint(checkpoint, path)


def as_folder(checkpoint: dict[str, Any], path: Path) -> None:
    with atomic_folder(path) as fresh:
        save_folder(checkpoint, fresh, None)


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("save", [as_file, as_folder])
def test_a_checkpoint_that_does_not_fit_is_named_and_the_one_before_stays(
    save: Callable[[dict[str, Any], Path], None], kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "last.ckpt"
    save({"state_dict": {}, "n": 1}, path)
    with pytest.raises(OSError, match="File too large") as caught:
        save(CHECKPOINTS[kind], path)
    assert caught.value.errno == errno.EFBIG
    assert Path(caught.value.filename).is_relative_to(path)
    assert AtomicCheckpointIO().load_checkpoint(path)["n"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_conversion_and_an_export_that_do_not_fit_are_named(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    as_folder(CHECKPOINTS["one tensor"], tmp_path / "a.ckpt")
    request.getfixturevalue("full")
    with pytest.raises(OSError, match=r"File too large: '.*/b\.ckpt'"):
        convert_checkpoint(tmp_path / "a.ckpt", tmp_path / "b.ckpt", "full")
    with (
        pytest.raises(OSError, match=r"/export cannot be written: .*File too large"),
        atomic_folder(tmp_path / "export") as fresh,
    ):
        save_file(CHECKPOINTS["one tensor"]["state_dict"], fresh / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_an_error_that_the_system_has_no_part_in_stays_what_it_is(tmp_path: Path) -> None:
    def fail() -> None:
        try:
            raise OSError(errno.ENOENT, "of another place")
        except OSError:
            with naming(tmp_path):  # while that one is dealt with
                raise RuntimeError("shapes differ") from None

    with pytest.raises(RuntimeError, match="shapes differ"):
        fail()
