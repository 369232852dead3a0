"""Attention over packed rows: every segment sees itself, and a branch sees its prefix.

It is registered with ``transformers`` under names of its own. Without the segments of a packed
row, as in generation, it is the library's ``sdpa``, or for models that ask for more than that
computes (Gemma 2's bounded scores) the attention that is written in the model's own file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from lrlhf.models.modes import in_trial
from lrlhf.models.packed.packing import BranchRun, Run, Segments

PACKED_ATTENTION = "lrlhf_packed"
"""The name in a model's config of attention that computes segments with ``sdpa``."""

PACKED_OWN_ATTENTION = "lrlhf_packed_own"
"""Of the one that computes them as the model's own file does."""

OWN_ATTENTION = "lrlhf_own"
"""Of that where the model computes padded rows."""

SEGMENTS = "packed_segments"
"""Keyword of a forward pass under which the segments travel to the attention."""

_BLOCK = 512
"""Queries of a long branch that are computed together: each block sees no key behind its end."""


_IRRELEVANT = {
    *("position_ids", "is_causal", "use_cache", "cache_position", "return_dict"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "num_items_in_batch"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
}
"""Keywords that reach an attention function and say nothing that packed rows do not know."""


def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "1 Q N D"],
    key: Float[Tensor, "1 K N D"],
    value: Float[Tensor, "1 K N D"],
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "1 N Q D"], None]:
    """Compute attention as ``transformers`` asks its attention functions to.

    With ``packed_segments`` among the options no score exists of two tokens that do not see each
    other, apart from what is masked within blocks, and ``attention_mask`` is not read.

    Raises:
        ValueError: In the trial of a model, which asks for something that this leaves out.
    """
    segments: Segments | None = options.pop(SEGMENTS, None)
    if segments is None:
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            **options,
        )
    _check_known(options)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        result: Tensor = sdpa_attention_forward(
            module, q, k, v, mask, dropout=dropout, scaling=scaling, is_causal=mask is None
        )[0]
        return result

    return _in_segments(attend, segments, (query[0], key[0], value[0]), sliding_window), None


def own_attention(
    module: nn.Module,
    query: Float[Tensor, "B Q N D"],
    key: Float[Tensor, "B K N D"],
    value: Float[Tensor, "B K N D"],
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Float[Tensor, "B N Q D"], None]:
    """Compute what `packed_attention` does with the attention in the model's own file.

    All scores of a segment exist at the same time, as they do in that attention.

    Raises:
        ValueError: In the trial of a model, which gives its attention tensors of its tokens.
    """
    segments: Segments | None = options.pop(SEGMENTS, None)
    compute = own_function(module)
    assert compute is not None
    if segments is None:
        is_causal = options.get("is_causal", True)
        bias = additive(module, query, key, attention_mask, is_causal=is_causal)
        return compute(module, query, key, value, bias, **options)[0], None
    # a number or a weight says the same of every segment
    _check_known(
        {
            name: option
            for name, option in options.items()
            if isinstance(option, Tensor) and not isinstance(option, nn.Parameter)
        }
    )

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            mask = _mask(segments, q.device, (q.shape[2], 0, 0), None)
        result: Tensor = compute(module, q, k, v, additive(module, q, k, mask), **options)[0]
        return result

    window = options.get("sliding_window")
    return _in_segments(attend, segments, (query[0], key[0], value[0]), window), None


def own_function(module: nn.Module) -> Callable[..., Any] | None:
    """Return the attention function in the file of a layer, by the name that it has in all.

    ``transformers`` calls it ``eager``: it is what the family's authors compute.
    """
    for kind in type(module).__mro__:
        function = vars(sys.modules[kind.__module__]).get("eager_attention_forward")
        if function is not None:
            return function  # type: ignore[no-any-return]
    return None


def additive(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, *, is_causal: bool = True
) -> Tensor | None:
    """Return what is added to scores to mask them as ``sdpa`` does with ``mask``.

    Args:
        module: Says whether attention is causal where there is no mask.
        query: `[B, Q, S, D]`.
        key: `[B, K, T, D]`.
        mask: True where a key is seen, or what is added already.
        is_causal: What the call says of it.
    """
    if mask is None:
        queries, keys = query.shape[2], key.shape[2]
        if queries == 1 or not is_causal or not getattr(module, "is_causal", True):
            return None
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()[None, None]
    if mask.dtype != torch.bool:
        return mask
    nothing = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device)
    return nothing.masked_fill(~mask, torch.finfo(query.dtype).min)


def _check_known(options: dict[str, Any]) -> None:
    """Refuse, in the trial of a model, what would have to be known of every segment."""
    if not in_trial():
        return
    unknown = {name for name, option in options.items() if option is not None} - _IRRELEVANT
    if unknown:
        raise ValueError(f"its attention is given {sorted(unknown)[0]!r}")


def _in_segments(
    attend: _Attend, segments: Segments, heads: _Heads, window: int | None
) -> Float[Tensor, "1 N Q D"]:
    segments.windows.append(window)
    compute = _by_run if segments.table is None else _by_table
    return compute(attend, segments, heads, window)[None]


class _Attend(Protocol):
    """Computes attention of a batch, causal where there is no mask."""

    def __call__(
        self,
        query: Float[Tensor, "B Q S D"],
        key: Float[Tensor, "B K T D"],
        value: Float[Tensor, "B K T D"],
        mask: Bool[Tensor, "B 1 S T"] | None,
        /,
    ) -> Float[Tensor, "B S Q D"]: ...


_Heads: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values of all tokens, `[heads, N, D]` each."""


def _by_run(
    attend: _Attend, segments: Segments, heads: _Heads, window: int | None
) -> Float[Tensor, "N Q D"]:
    """Go through the runs, each as large as it is."""
    query, key, value = heads
    pieces: list[Tensor] = []
    for run in segments.prefixes:
        q, k, v = (_stacked(part, run) for part in (query, key, value))
        mask = None
        if window is not None and run.longest > window:
            mask = _mask(segments, query.device, (run.longest, 0, 0), window)
        pieces += _unstacked(attend(q, k, v, mask), run)
    for branch in segments.branches:
        q, k, v = (_stacked(part, branch.branches) for part in (query, key, value))
        k, v = (_behind_prefix(stacked, part, branch) for stacked, part in ((k, key), (v, value)))
        blocks = [
            attend(
                q[:, :, start:stop],
                k[:, :, : branch.prefix + stop],
                v[:, :, : branch.prefix + stop],
                _mask(segments, query.device, (stop - start, start, branch.prefix), window),
            )
            for start, stop in _blocks(branch.branches.longest)
        ]
        pieces += _unstacked(torch.cat(blocks, dim=1), branch.branches)
    return torch.cat(pieces)


def _by_table(
    attend: _Attend, segments: Segments, heads: _Heads, window: int | None
) -> Float[Tensor, "N Q D"]:
    """Take segments of similar length together, filled up to the longest of them."""
    table = segments.table
    assert table is not None

    def cut(part: Tensor, places: Tensor) -> Tensor:
        return part[:, places].transpose(0, 1)

    query, key, value = heads
    results: list[Tensor] = []
    for places in table.prefixes:
        longest, mask = places.shape[1], None
        if window is not None and longest > window:
            mask = _mask(segments, query.device, (longest, 0, 0), window)
        results.append(attend(cut(query, places), cut(key, places), cut(value, places), mask))
    for number, part in enumerate(table.branches):
        behind = torch.cat([part.prefixes, part.branches], dim=1)
        queries, keys, values = cut(query, part.branches), cut(key, behind), cut(value, behind)
        prefix = part.prefixes.shape[1]
        blocks = [
            attend(
                queries[:, :, start:stop],
                keys[:, :, : prefix + stop],
                values[:, :, : prefix + stop],
                _table_mask(segments, number, (start, stop), window),
            )
            for start, stop in _blocks(part.branches.shape[1])
        ]
        results.append(torch.cat(blocks, dim=1))
    return torch.cat([result.flatten(0, 1) for result in results])[table.back]


def _table_mask(
    segments: Segments, number: int, block: tuple[int, int], window: int | None
) -> Bool[Tensor, "R 1 B P+E"]:
    """Return which keys the queries of a block see, of every branch of a part of the table."""
    name = (number, *block, window or 0)
    if name not in segments.masks:
        assert segments.table is not None
        part, (start, stop) = segments.table.branches[number], block
        prefix = part.prefix_lengths[:, None, None]
        own = torch.arange(start, stop, device=prefix.device)[:, None]
        columns = torch.arange(part.prefixes.shape[1], device=prefix.device)
        within = own - torch.arange(stop, device=prefix.device)
        seen, mine = columns < prefix, within >= 0
        if window is not None:
            seen = seen & (prefix + own - columns < window)
            mine &= within < window
        shape = (len(part.branches), stop - start, -1)
        mask = torch.cat([seen.expand(shape), mine.expand(shape)], dim=2)
        segments.masks[name] = mask[:, None]
    return segments.masks[name]


def _stacked(part: Float[Tensor, "K N D"], run: Run) -> Float[Tensor, "S K L D"]:
    """Cut the segments of a run out, filled up behind their ends, which nothing before sees."""
    longest = run.longest
    own = part[:, run.start : run.start + run.tokens]
    if min(run.lengths) == longest:
        return own.view(len(own), -1, longest, own.shape[-1]).transpose(0, 1)
    cut = torch.split(own, list(run.lengths), dim=1)
    return torch.stack([pad(one, (0, 0, 0, longest - one.shape[1])) for one in cut])


def _unstacked(result: Float[Tensor, "S L Q D"], run: Run) -> Iterator[Float[Tensor, "N Q D"]]:
    if min(run.lengths) == run.longest:
        yield result.flatten(0, 1)
    else:
        yield from (one[:length] for one, length in zip(result, run.lengths, strict=True))


def _behind_prefix(
    stacked: Float[Tensor, "S K L D"], part: Float[Tensor, "K N D"], branch: BranchRun
) -> Float[Tensor, "S K P+L D"]:
    prefix = part[:, branch.prefix_start : branch.prefix_start + branch.prefix]
    return torch.cat([prefix.expand(len(stacked), -1, -1, -1), stacked], dim=2)


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, _BLOCK):
        yield start, min(start + _BLOCK, length)


def _mask(
    segments: Segments, device: torch.device, shape: tuple[int, int, int], window: int | None
) -> Bool[Tensor, "1 1 L P+S+L"]:
    """Return which keys some queries see.

    Args:
        segments: Keeps the masks of a pass.
        device: Of the mask.
        shape: Queries, queries before them in their segment, and keys of the prefix.
        window: Keys that a query sees at most, itself included; None: all before it.
    """
    queries, before, prefix = shape
    longest = prefix + before + queries
    # most windows are wider than any row, and then all layers share one mask
    kept = window if window is not None and window < longest else 0
    name = (-1, queries, before, prefix, kept)
    if name not in segments.masks:
        distance = (
            torch.arange(prefix + before, longest, device=device)[:, None]
            - torch.arange(longest, device=device)[None, :]
        )
        seen = distance >= 0
        if kept:
            seen &= distance < kept
        segments.masks[name] = seen[None, None]
    return segments.masks[name]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    PACKED_ATTENTION: packed_attention,
    PACKED_OWN_ATTENTION: own_attention,
    OWN_ATTENTION: own_attention,
}
for _name, _function in FUNCTIONS.items():
    AttentionInterface.register(_name, _function)
AttentionMaskInterface.register(PACKED_ATTENTION, sdpa_mask)
AttentionMaskInterface.register(PACKED_OWN_ATTENTION, eager_mask)
AttentionMaskInterface.register(OWN_ATTENTION, eager_mask)
