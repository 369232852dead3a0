"""A checkpoint that several processes go on from is read once by all of them together."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.multiprocessing
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lrlhf.run.checkpoints.checkpoint_reader import read_checkpoint
from lrlhf.run.checkpoints.checkpoint_search import check
from lrlhf.run.checkpoints.sharded_checkpoint import save_folder
from tests.strategies.test_checkpoint_search import bytes_read
from tests.strategies.test_sharded_checkpoint import Ranks

KEYS = tuple(map(str, range(8)))
ROWS = 1024


def numbers(rows: int, key: str) -> Tensor:
    return torch.arange(rows * 256.0).view(rows, 256) + int(key)


def resume(rank: int, folder: Path, ranks: int) -> None:
    """Read a checkpoint of 8 MB of split tensors, as a run that goes on does."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/again", rank=rank, world_size=ranks
    )
    mesh = init_device_mesh("cpu", (ranks,))
    for name, rows in (("small", 2), ("large", ROWS)):  # the first imports what is needed
        before = bytes_read()
        check(folder / name, together=True)
        stored = read_checkpoint(folder / name)["state_dict"]
        for key in sorted(stored):
            weight = distribute_tensor(torch.zeros(rows, 256), mesh, [Shard(0)])
            part = stored.read_like(key, weight)
            assert torch.equal(part.to_local(), numbers(rows, key).chunk(ranks)[rank])
    (folder / f"read{rank}").write_text(str(bytes_read() - before))
    torch.distributed.destroy_process_group()


def save_both(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    mesh = init_device_mesh("cpu", (2,))
    for name, rows in (("small", 2), ("large", ROWS)):
        tensors = {key: distribute_tensor(numbers(rows, key), mesh, [Shard(0)]) for key in KEYS}
        if rank == 0:
            (folder / name).mkdir()
        torch.distributed.barrier()
        save_folder({"state_dict": tensors}, folder / name, cast(Strategy, Ranks()))
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="nothing counts what is read")
@pytest.mark.parametrize("room", [True, False])
def test_what_two_ranks_verify_is_what_they_load_and_is_read_once(
    room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not room:
        nothing = SimpleNamespace(available=1000)
        monkeypatch.setattr("psutil.virtual_memory", lambda: nothing)
    for work in (save_both, partial(resume, ranks=2)):
        torch.multiprocessing.start_processes(work, args=(tmp_path,), nprocs=2, start_method="fork")
    size = sum(path.stat().st_size for path in (tmp_path / "large").iterdir())
    assert size > 8 * 1024 * 1024
    read = [int((tmp_path / f"read{rank}").read_text()) for rank in range(2)]
    # without room for it, what was verified is read again
    once = size if room else 2 * size
    assert sum(read) == pytest.approx(once, rel=0.05)
    assert read[0] == pytest.approx(read[1], rel=0.05)
