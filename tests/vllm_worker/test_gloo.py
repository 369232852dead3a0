"""How tensors are put together for the way, and what becomes of a group that breaks."""

import itertools
import sys
import threading
import time
from collections import deque

import pytest
import torch

from lrlhf.vllm_worker import gloo
from tests.forked import Popen


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([3, 3, 4, 1], [3, 1]),  # 10 bytes go together, one more does not
        ([25, 1, 30, 2, 2], [1, 1, 1, 2]),  # what is larger goes alone
        ([0, 10, 0, 0], [4]),
    ],
)
def test_buckets_are_full_and_no_larger(
    sizes: list[int], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo, "BUCKET", 10)
    assert list(gloo.buckets(sizes)) == expected


def test_packed_tensors_come_out_as_they_went_in() -> None:
    tensors = [
        torch.randn(3, 1).bfloat16(),  # 6 bytes: what follows is not aligned
        torch.tensor([2**40, -1]),
        torch.randn(4, 5).T,
        torch.zeros(0, 3),
        torch.tensor(True),
        torch.randn(()),
    ]
    data = gloo.pack(tensors)
    assert data.dtype == torch.uint8
    assert len(data) == 6 + 16 + 80 + 0 + 1 + 4
    kinds = [(tensor.dtype, list(tensor.shape)) for tensor in tensors]
    for tensor, found in zip(tensors, gloo.unpack(data, kinds), strict=True):
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)
    alone = torch.randn(50)
    assert gloo.pack([alone]).data_ptr() == alone.data_ptr()  # no copy of a large one


def test_a_store_listens_on_one_address_only() -> None:
    store = gloo.open_store("127.0.0.1", 2.0)
    other = gloo.join_store("127.0.0.1", store.port, 2.0)
    other.set("worker", "here")
    assert store.check(["worker"])
    with pytest.raises(torch.distributed.DistError):
        gloo.join_store("127.0.0.2", store.port, 0.5)


MEMBER = """
import os, sys, time, torch
from lrlhf.vllm_worker import gloo
port, rank, size, ends = map(int, sys.argv[1:])
store = gloo.join_store("127.0.0.1", port, 60)
group = gloo.GlooGroup(store, host="127.0.0.1", token="t", rank=rank, size=size, timeout=120)
data = torch.empty(2**20)
try:
    for number in range(2**20):
        if rank == size - 1 and number == 3:
            os._exit(9) if ends else time.sleep(600)
        group.broadcast(data)
except RuntimeError:
    os._exit(0)
"""


@pytest.mark.parametrize("ends", [True, False], ids=["lost", "hung"])
@pytest.mark.parametrize("size", [3, 5])
def test_members_of_a_broken_group_fail_long_before_its_timeout(size: int, ends: bool) -> None:
    store = gloo.open_store("127.0.0.1", 60)
    told = [
        [str(int(number)) for number in (store.port, rank, size, ends)] for rank in range(1, size)
    ]
    members = [Popen([sys.executable, "-c", MEMBER, *one]) for one in told]
    try:
        group = gloo.GlooGroup(store, host="127.0.0.1", token="t", rank=0, size=size, timeout=120)
        data, begun = torch.zeros(2**20), time.monotonic()
        if not ends:  # who notices is another thread: the server does not answer
            threading.Timer(2.0, group.destroy).start()
        with pytest.raises(RuntimeError):  # endlessly
            deque(map(group.broadcast, itertools.repeat(data)), maxlen=0)
        group.destroy()
        assert [member.wait(30) for member in members[:-1]] == [0] * (size - 2)
        assert time.monotonic() - begun < 40
        with pytest.raises(RuntimeError, match="closed"):
            group.broadcast(data)
    finally:
        for member in members:
            member.kill()
            member.wait()
