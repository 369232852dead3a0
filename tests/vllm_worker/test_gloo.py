"""How tensors are put together for the way."""

import pytest
import torch

from lrlhf.vllm_worker import gloo


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
