import pytest
import torch
from torch import Tensor

from lrlhf.vllm_worker import fingerprint as module
from lrlhf.vllm_worker.fingerprint import Fingerprinted, as_text

WRAP = 2**64
MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio
SIZES = {torch.uint8: 1, torch.bool: 1, torch.bfloat16: 2, torch.float16: 2}
DTYPES = [*SIZES, torch.float32, torch.int32, torch.float64, torch.int64]


def fingerprint(tensor: Tensor, turn: int = 0) -> int:
    return int(module.fingerprint(tensor, turn=turn))


def signed(number: int, bits: int) -> int:
    """What an integer of so many bits is worth in two's complement."""
    number %= 2**bits
    return number - 2**bits if number >= 2 ** (bits - 1) else number


def weight(place: int) -> int:
    mixed = signed((place + 1) * MIX, 64)
    return (mixed ^ (mixed >> 29)) * MIX % WRAP | 1


def slow_fingerprint(tensor: Tensor, *, row: int = 2**16) -> int:
    """The documented sum with Python's own integers, which never wrap around by themselves."""
    values = tensor.flatten()
    if tensor.dtype == torch.bfloat16:  # which numpy lacks: the upper half of a float32
        wide = values.float().numpy().tobytes()
        data = bytes(wide[at] for start in range(0, len(wide), 4) for at in (start + 2, start + 3))
    else:
        data = bytes(values.numpy().tobytes())
    size = SIZES.get(tensor.dtype, 4)
    words = [
        int.from_bytes(data[start : start + size], "little", signed=size > 1)
        for start in range(0, len(data), size)
    ]
    total = sum(
        signed((word ^ (word >> 15 & 0x1FFFF)) * weight(place % row), 32) * weight(place // row)
        for place, word in enumerate(words)
    )
    return signed(total, 64)


def some(dtype: torch.dtype, *shape: int) -> Tensor:
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=torch.float64).to(dtype)
    return torch.randint(torch.iinfo(dtype).min, torch.iinfo(dtype).max, shape, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_documented_sum_and_tells_places_apart(dtype: torch.dtype) -> None:
    for shape in ((), (7,), (33, 31), (3, 0)):
        tensor = some(dtype, *shape)
        assert fingerprint(tensor) == slow_fingerprint(tensor)
    square = some(dtype, 64, 64)
    assert fingerprint(square) != fingerprint(square.T)
    assert fingerprint(square) != fingerprint(square.flatten().roll(1))


@pytest.mark.parametrize("size", [1024, 1025, 5000])
def test_rows_are_weighted_by_their_place(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROW", 1024)
    tensor = some(torch.int32, size)
    assert fingerprint(tensor) == slow_fingerprint(tensor, row=1024)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_every_single_bit_shows(dtype: torch.dtype) -> None:
    tensor = some(dtype, 40)
    seen = {fingerprint(tensor)}
    bits = torch.iinfo(dtype).bits
    for place in range(40):
        for bit in range(bits):
            other = tensor.clone()
            other[place] ^= signed(1 << bit, bits) if dtype != torch.uint8 else 1 << bit
            seen.add(fingerprint(other))
    assert len(seen) == 40 * bits + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_signs_that_are_turned_in_pairs_show(dtype: torch.dtype) -> None:
    tensor = torch.ones(4096, dtype=dtype)
    for first, second in ((0, 1), (1024, 1030), (1024, 3072)):
        other = tensor.clone()
        other[[first, second]] = -1
        assert fingerprint(tensor) != fingerprint(other)
    assert fingerprint(tensor) != fingerprint(-tensor)


def test_small_steps_in_opposite_directions_do_not_cancel() -> None:
    # as an older weight differs from a newer one: some words one up, as many one down
    tensor = torch.ones(64, dtype=torch.bfloat16)
    seen = {fingerprint(tensor)}
    for up in range(64):
        for down in range(up):
            bits = tensor.view(torch.int16).clone()
            bits[up] += 1
            bits[down] -= 1
            seen.add(fingerprint(bits.view(torch.bfloat16)))
    assert len(seen) == 64 * 63 // 2 + 1


def test_a_view_agrees_with_its_contiguous_copy() -> None:
    whole = torch.nn.Parameter(torch.randn(60, 70))
    for view in (whole.T, whole[::2, ::3], whole[0].expand(9, 70), whole.unfold(1, 4, 2)):
        assert fingerprint(view) == fingerprint(view.clone(memory_format=torch.contiguous_format))


WHOLE, EVERY = 2**18, 7
LARGE = 512, 600  # of which 43885 or 43886 words count


def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tensors of more than 100 words count as large."""
    monkeypatch.setattr(module, "_COMPLETE", 100)


@pytest.mark.parametrize("turn", [0, 3, 6, 9])
def test_of_a_large_tensor_every_seventh_word_counts_from_another_on_each_turn(
    turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few(monkeypatch)
    words = some(torch.int32, 101)
    sampled = torch.stack([words[place] for place in range(turn % 7, 101, 7)])
    assert fingerprint(words, turn) == slow_fingerprint(sampled)
    assert fingerprint(words[:100], turn) == slow_fingerprint(words[:100])


def test_every_bit_of_a_large_tensor_shows_within_seven_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few(monkeypatch)
    words = some(torch.int16, 130)
    for place in range(130):
        other = words.clone()
        other[place] ^= 1 << 14
        seen = [turn for turn in range(7) if fingerprint(words, turn) != fingerprint(other, turn)]
        assert seen == [place % 7]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_large_tensor_that_is_stale_transposed_or_shifted_shows_in_every_turn(
    dtype: torch.dtype,
) -> None:
    tensor = some(dtype, *LARGE)
    assert tensor.numel() * max(1, tensor.element_size() // 4) > WHOLE
    one_row = tensor.clone()
    one_row[200] += 1  # as where an update touches the embedding of one token
    one_column = tensor.clone()
    one_column[:, 7] += 1
    wrong = [one_row, one_column, tensor.T.contiguous(), tensor.flatten().roll(1)]
    for turn in range(EVERY):
        right = fingerprint(tensor, turn)
        assert all(fingerprint(other, turn) != right for other in wrong)


def test_fingerprints_are_read_all_at_once_and_noted_where_one_says() -> None:
    weights = {"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.int64)}
    seen: dict[str, Tensor] = {"earlier": torch.tensor(-5)}
    passed = list(Fingerprinted(weights.items(), turn=2, seen=seen))
    assert [name for name, _ in passed] == ["a", "b"]
    assert all(tensor is weights[name] for name, tensor in passed)
    found = {"earlier": "-5", "a": str(fingerprint(weights["a"])), "b": "0"}
    assert as_text(seen) == found
    assert as_text({}) == {}
