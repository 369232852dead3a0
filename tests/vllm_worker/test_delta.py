import struct

import pytest
import torch
from torch import Tensor

from lrlhf.vllm_worker.delta import apply_changes, changes

DTYPES = [torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.float64, torch.int64]
SIZES = [(), (1,), (0, 3), (2, 127), (3, 5, 17), (70_001,)]


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        (first[name].dtype, first[name].shape) == (tensor.dtype, tensor.shape)
        and bits(first[name]) == bits(tensor)
        for name, tensor in second.items()
    )


def words_of(*words: int) -> Tensor:
    """Numbers of 16 bits with these bits."""
    return torch.tensor(words, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


class Ends:
    """Copies on both sides."""

    def __init__(self, **tensors: Tensor) -> None:
        self.own: dict[str, Tensor] = {}
        self.other: dict[str, Tensor] = {}
        self.send(**tensors)

    def send(self, **tensors: Tensor) -> dict[str, Tensor]:
        """Send the changes through bytes, as a network does; returns what was sent."""
        sent = {name: tensor.clone() for name, tensor in changes(tensors.items(), self.own)}
        apply_changes(self.other, sent.items())
        assert same(self.own, tensors)
        assert same(self.other, tensors)
        return sent


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_share_of_changes_arrives_bit_for_bit_and_never_in_more_bytes(
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in SIZES:
        size = torch.empty(shape, dtype=dtype).nbytes
        high = 2 if dtype == torch.bool else 256
        data = torch.randint(high, (size,), generator=generator, dtype=torch.uint8)
        tensor = data.view(dtype).view(shape)
        ends = Ends(a=tensor, b=torch.ones(3))
        for share in (0.0, 1e-4, 1e-3, 0.02, 0.5, 0.9, 1.0, 0.0):
            turned = torch.rand(size, generator=generator) < share
            data = torch.where(turned, ((data.int() + 1) % high).to(torch.uint8), data)
            tensor = data.view(dtype).view(shape)
            sent = ends.send(a=tensor, b=torch.ones(3))
            assert "b" not in sent
            assert ("a" in "".join(sent)) == bool(turned.any())
            assert sum(each.nbytes for each in sent.values()) <= size


def test_what_is_equal_as_a_number_is_sent_where_its_bits_differ() -> None:
    # 0.0 and -0.0; NaN that is quiet, signals, is negative, or has a payload; infinity; a denormal
    before = words_of(0x0000, 0x8000, 0x7FC0, 0x7F81, 0xFFC0, 0x7FC1, 0x7F80, 0x0001, *[5] * 40)
    after = words_of(0x8000, 0x0000, 0x7F81, 0x7FC0, 0x7FC0, 0x7FC2, 0x7F81, 0x0000, *[5] * 40)
    ends = Ends(a=before)
    (sent,) = ends.send(a=after).values()
    assert sent.nbytes == 8 * 3
    assert not ends.send(a=after)  # NaN differs from itself only as a number


@pytest.mark.parametrize(
    ("positions", "codes"),
    [
        ([0], [0]),
        ([254, 255], [254, 0]),
        ([255], [255, 0]),  # 255 unchanged, and no more before the changed one
        ([0, 256, 767, 1278], [0, 255, 0, 255, 255, 0, 255, 255, 0]),
        ([1, 600], [1, 255, 255, 88]),  # 598 between them
    ],
)
def test_the_bytes_of_changes_are_values_and_counts_of_unchanged_words(
    positions: list[int], codes: list[int]
) -> None:
    before, after = torch.zeros(2000, dtype=torch.int16), torch.zeros(2000, dtype=torch.int16)
    after[positions] = torch.arange(300, 300 + len(positions), dtype=torch.int16)
    ends = Ends(a=before)
    ((name, sent),) = ends.send(a=after).items()
    assert name == f"a changed {len(positions)}"
    values = struct.pack(f"<{len(positions)}h", *range(300, 300 + len(positions)))
    assert sent.dtype == torch.uint8
    assert bytes(sent.tolist()) == values + bytes(codes)


def test_a_tensor_is_sent_whole_where_changes_do_not_halve_its_bytes() -> None:
    before = torch.zeros(300, dtype=torch.bfloat16)  # 600 bytes, and 3 for each change
    for count, name in ((100, "a changed 100"), (101, "a"), (300, "a")):
        ends, after = Ends(a=before), before.clone()
        after[:count] = 1.0
        assert list(ends.send(a=after)) == [name]


@pytest.mark.parametrize(
    "after",
    [
        torch.arange(12.0).view(4, 3),  # the words stay, with another shape
        torch.arange(12.0).view(torch.int32).view(3, 4),  # or type
        torch.zeros(1),
        torch.zeros(3, 5),
    ],
)
def test_a_tensor_of_another_shape_or_type_is_sent_whole(after: Tensor) -> None:
    ends = Ends(a=torch.arange(12.0).view(3, 4))
    assert list(ends.send(a=after)) == ["a"]


def test_copies_are_neither_the_policys_own_memory_nor_laid_out_as_it_is() -> None:
    weight = torch.arange(6000.0).view(60, 100).t()  # not contiguous
    ends = Ends(a=weight)
    for number in range(3):
        weight[number, 7] = -1.0  # in place, as an optimizer does
        assert list(ends.send(a=weight)) == ["a changed 1"]


def test_tied_weights_may_come_under_two_names_and_new_ones_later() -> None:
    weight = torch.zeros(1000)
    ends = Ends(a=weight, b=weight)
    weight[3] = 1.0
    assert list(ends.send(a=weight, b=weight)) == ["a changed 1", "b changed 1"]
    assert list(ends.send(a=weight, b=weight, c=weight)) == ["c"]


def test_changes_of_a_tensor_that_was_never_sent_are_refused() -> None:
    with pytest.raises(KeyError, match="a"):
        apply_changes({}, [("a changed 1", torch.zeros(5, dtype=torch.uint8))])
