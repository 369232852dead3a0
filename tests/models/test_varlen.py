"""Packed rows that share nothing, through FlashAttention's varlen kernel.

CPUs have no such kernel. Here a loop over the rows, written from its documentation, stands in for
torch's function; the numbers expected are those of the path that packed rows take on CPUs.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from lrlhf.models import allow_packing, backbone, sequence_logprobs
from lrlhf.models.packed import packed_attention as attention
from lrlhf.models.packed.packing import RowBounds, compact, find_trees, pack
from lrlhf.types import SequenceBatch
from tests.models.families import granite, llama, seeded
from tests.models.test_flex_attention import flexible
from tests.models.test_forks import BATCH as FORKS
from tests.models.test_packing import BATCH, assert_same_gradients, gradients, mistral, qwen2

ALONE = replace(BATCH, group_ids=None)


def by_row(  # noqa: PLR0913  the signature of torch's function
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Attention of `[tokens, heads, D]`, one row after another."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    ends = cu_seq_q.tolist()
    assert (ends[0], ends[-1]) == (0, len(query))
    assert cu_seq_k.tolist() == ends
    assert max_q == max_k == max(b - a for a, b in pairwise(ends))
    results = []
    for start, end in pairwise(ends):
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        left, right = window_size
        seen = (distance >= -right) & ((distance <= left) | (left < 0))
        parts = (part[start:end].transpose(0, 1) for part in (query, key, value))
        own = scaled_dot_product_attention(
            *parts, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
        )
        results.append(own.transpose(0, 1))
    return torch.cat(results)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The windows that the kernel was called with; rows go through it on CPUs too."""
    windows: list[tuple[int, int]] = []

    def noting(*inputs: Any, **options: Any) -> Tensor:
        windows.append(options["window_size"])
        return by_row(*inputs, **options)

    monkeypatch.setattr(varlen, "varlen_attn", noting)
    monkeypatch.setattr(attention, "varlen_obstacle", lambda *_, **__: None)
    monkeypatch.setattr(backbone, "_uses_depth_first_order", lambda *_: True)
    return windows


def bounds(
    ids: list[list[int]], groups: list[int] | None = None, forks: list[list[int]] | None = None
) -> RowBounds | None:
    tokens = torch.tensor(ids)
    rows = compact(tokens, tokens != 0, None if forks is None else torch.tensor(forks))
    trees = find_trees(rows, None if groups is None else torch.tensor(groups))
    return pack(rows, trees, depth_first=True).segments.bounds


def test_bounds_are_those_of_the_rows_as_they_are_packed() -> None:
    # the longest first, and a row without tokens is none
    found = bounds([[7, 0, 0, 0], [1, 2, 3, 4], [0, 0, 0, 0], [5, 6, 5, 0]])
    assert found is not None
    assert found.cu_seqlens.tolist() == [0, 4, 7, 8]
    assert found.cu_seqlens.dtype == torch.int32
    assert found.max_seqlen == 4
    # of one group, but nothing in common
    unlike = bounds([[1, 2], [2, 1]], [0, 0])
    assert unlike is not None
    assert unlike.cu_seqlens.tolist() == [0, 2, 4]
    assert bounds([[1, 2], [1, 1]], [0, 0]) is None
    # rows that are equal as far as they go, and behind one of them two tokens that follow nothing
    ids = [[1, 2, 3, 4], [1, 2, 0, 0], [5, 0, 0, 0]]
    forked = bounds(ids, [0, 0, 1], [[0, 0, 2, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    assert forked is not None
    assert forked.cu_seqlens.tolist() == [0, 2, 4, 5]


@pytest.mark.parametrize(
    ("build", "windows"),
    [
        (llama, [(-1, 0)] * 3),  # grouped heads
        (granite, [(-1, 0)] * 3),  # scores are scaled by 1
        (mistral, [(4, 0)] * 3),  # a query sees 5 keys: itself and 4 before it
        (qwen2, [(3, 0), (-1, 0), (3, 0)]),
    ],
)
def test_log_probabilities_and_gradients_are_those_of_the_path_on_cpus(
    build: Callable[[], PreTrainedModel],
    windows: list[tuple[int, int]],
    request: pytest.FixtureRequest,
) -> None:
    model = seeded(build).double()
    assert allow_packing(model)
    expected = gradients(model, lambda: sequence_logprobs(model, ALONE))
    calls = request.getfixturevalue("calls")
    actual = gradients(model, lambda: sequence_logprobs(model, ALONE))
    assert calls == windows
    assert_same_gradients(actual, expected, atol=1e-6)


@pytest.mark.parametrize("batch", [BATCH, FORKS], ids=["siblings", "forks"])
def test_rows_with_a_common_beginning_do_not_go_through_it(
    batch: SequenceBatch, calls: list[tuple[int, int]]
) -> None:
    model = seeded(llama)
    assert allow_packing(model)
    gradients(model, lambda: sequence_logprobs(model, batch))
    assert calls == []


def test_flex_attention_that_was_asked_for_stays(calls: list[tuple[int, int]]) -> None:
    model = seeded(llama)
    flexible(model)
    gradients(model, lambda: sequence_logprobs(model, ALONE))
    assert calls == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float16, "size": 256}, None),
        ({"window": 300}, None),
        ({"size": 8}, None),
        ({"dropout": 0.1}, "dropout"),
        ({"options": {"softcap": 50.0}}, "the option 'softcap'"),
        ({"options": {"s_aux": torch.zeros(4)}}, "the option 's_aux'"),
        ({"dtype": torch.float32}, "products of torch.float32"),
        ({"values": torch.float16}, "products of torch.bfloat16 with torch.float16"),
        ({"device": "cpu"}, "attention on CPUs"),
        ({"size": 60}, "heads of 60 and 60 numbers"),
        ({"size": 264}, "heads of 264 and 264 numbers"),
        ({"value_size": 32}, "heads of 64 and 32 numbers"),
    ],
)
def test_which_rows_go_through_it(
    changed: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the meta device stands in for CUDA
    tried: list[dict[str, Any]] = []
    monkeypatch.setattr(attention, "tried", lambda *_, **options: tried.append(options))
    dtype, size = changed.get("dtype", torch.bfloat16), changed.get("size", 64)
    query, key, value = (
        torch.zeros(1, heads, 5, last, dtype=kind, device=changed.get("device", "meta"))
        for heads, last, kind in (
            (4, size, dtype),
            (2, size, dtype),
            (2, changed.get("value_size", size), changed.get("values", dtype)),
        )
    )
    window = changed.get("window")
    found = attention.varlen_obstacle(
        (query, key, value),
        window=window,
        dropout=changed.get("dropout", 0.0),
        options=changed.get("options", {}),
    )
    assert found == reason
    short = None if window is None else 128
    assert tried == ([{"varlen": True, "window": short}] if reason is None else [])


@pytest.mark.parametrize(
    ("fault", "window", "reason"),
    [
        (None, None, None),
        (None, 128, None),
        ("no window", 128, "attention here as sdpa does"),
        ("an older torch", None, "anything here (TypeError: no enable_gqa)"),
    ],
)
def test_a_kernel_is_tried_before_anything_depends_on_it(
    fault: str | None, window: int | None, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(*inputs: Any, **options: Any) -> Tensor:
        if fault == "an older torch":
            raise TypeError("no enable_gqa")
        if fault == "no window":
            options["window_size"] = (-1, 0)
        return by_row(*inputs, **options)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    shapes = ((4, 16), (2, 16), (2, 16))
    untried = attention.tried.__wrapped__
    found = untried(shapes, torch.float32, torch.device("cpu"), varlen=True, window=window)
    assert found == reason


def test_a_trial_within_a_checkpointed_layer_leaves_its_backward_pass_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", by_row)
    tried = functools.cache(attention.tried.__wrapped__)
    found = []

    def layer(states: Tensor) -> Tensor:
        shapes = ((4, 16), (2, 16), (2, 16))
        found.append(tried(shapes, torch.float32, torch.device("cpu"), varlen=True))
        return states.sin().exp()

    states = torch.arange(3.0, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, states, use_reentrant=False).sum().backward()
    assert found == [None, None]  # a forward pass, and its repetition
    torch.testing.assert_close(states.grad, states.cos() * states.sin().exp())
