"""Attention over packed rows: every segment sees itself, and a branch sees its prefix.

It is registered with ``transformers`` under names of its own. Without the segments of a packed
row, as in generation, it is the library's ``sdpa``, or for models that ask for more than that
computes (Gemma 2's bounded scores) the attention that is written in the model's own file, or the
library's ``flex_attention`` or a flash kernel where that was asked for.

Packed rows go through FlexAttention where their segments have a depth-first order, else segment by
segment. Flash kernels know rows, no trees: each branch would need a copy of its prefix. Rows that
share nothing go through torch's varlen kernel, see `varlen_obstacle`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from importlib import import_module
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    eager_mask,
    flex_attention_mask,
    sdpa_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lrlhf.models.modes import in_trial
from lrlhf.models.packed.packing import BLOCK, RowBounds, Segments, depth_first_order, row_bounds
from lrlhf.models.transformers_internals import set_attention

logger = logging.getLogger(__name__)

COMPUTED = ("softcap", "s_aux")
"""Keywords of attention that FlexAttention computes and ``sdpa`` does not."""

_HEAD_SIZES = range(16, 257)
"""On CUDA. Smaller ones are no tile of a tensor core, larger ones do not fit into its memory."""

_VARIANTS = 64
"""How often the kernel is compiled at most: with and without gradients, in another precision, with
another window, for the policy, its reference and a critic. ``torch`` goes on without compiling
behind 8, which materializes all scores."""

Heads: TypeAlias = tuple[Tensor, Tensor, Tensor]

_reported: set[str] = set()


def flex_attention(
    module: nn.Module,
    heads: Heads,
    mask: BlockMask,
    *,
    dropout: float,
    scaling: float | None,
    **options: Any,
) -> Float[Tensor, "1 N Q E"] | None:
    """Compute the attention of a packed row.

    Args:
        module: The layer.
        heads: Queries, keys and values of all tokens, `[1, heads, N, D]` each.
        mask: Which of them see each other, see `lrlhf.models.packed.packing.DepthFirstOrder`.
        dropout: Share of the scores that are left out.
        scaling: Scores are multiplied by it; None: by 1/√D.
        options: Of `COMPUTED`.

    Returns:
        None where FlexAttention does not compute this; the log says what it was, once.
    """
    heads = _autocast(heads)
    reason = _obstacle(*heads, dropout, options)
    if reason is not None:
        _report("FlexAttention does not compute %s; sdpa does, with masks.", reason)
        return None
    return _compute(module, heads, mask, scaling=scaling, **options)


def varlen_attention(
    heads: Heads, bounds: RowBounds, *, window: int | None, scaling: float | None
) -> Float[Tensor, "1 N Q E"]:
    """Compute causal attention of rows that share nothing, by torch's varlen kernel.

    ``window`` counts the keys that a query sees at most, itself included; None: all before it.

    Reference:
        Dao 2023, FlashAttention-2, https://arxiv.org/abs/2307.08691
    """
    # torch has windows and grouped heads from 2.12 on; with an older one `tried` reports the error
    kernel = import_module("torch.nn.attention.varlen").varlen_attn
    tokens = (part[0].transpose(0, 1) for part in heads)
    ends, longest = bounds
    sides = (-1 if window is None else window - 1, 0)  # keys before and behind the query
    shape = {"scale": scaling, "window_size": sides, "enable_gqa": True}
    result: Tensor = kernel(*tokens, ends, ends, longest, longest, **shape)
    return result[None]


def varlen_obstacle(
    heads: Heads, *, window: int | None, dropout: float, options: dict[str, Any]
) -> str | None:
    """Say why rows that share nothing do not go through `varlen_attention`; None: they do.

    The rule is that they do wherever it computes them: its kernel is compiled already, reads no
    table of blocks, and leaves out whatever is outside a row or a window. Whether it is faster than
    FlexAttention at every length and window is not measured on a GPU; a limit would belong here.
    """
    dtypes, size = {part.dtype for part in heads}, heads[0].shape[-1]
    if dropout or options:
        return "dropout" if dropout else f"the option {min(options)!r}"
    if len(dtypes) > 1 or not dtypes <= {torch.float16, torch.bfloat16}:
        return f"products of {' with '.join(sorted(map(str, dtypes)))}"
    if heads[0].device.type == "cpu":
        return "attention on CPUs"
    if size % 8 or size > max(_HEAD_SIZES) or heads[2].shape[-1] != size:
        return f"heads of {size} and {heads[2].shape[-1]} numbers"
    shapes = tuple((part.shape[1], size) for part in heads)
    short = None if window is None else BLOCK  # one trial stands for all windows
    return tried(shapes, heads[0].dtype, heads[0].device, varlen=True, window=short)


def _autocast(heads: Heads) -> Heads:
    """Cast as sdpa does: norms of queries and keys leave them in float32."""
    device = heads[0].device.type
    if not torch.is_autocast_enabled(device) or heads[0].dtype == torch.float64:
        return heads
    query, key, value = (part.to(torch.get_autocast_dtype(device)) for part in heads)
    return query, key, value


def _report(message: str, reason: str) -> None:
    """Log, once, what a kernel does not compute."""
    if (text := message % reason) not in _reported:
        _reported.add(text)
        logger.info("%s", text)


def _obstacle(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, options: dict[str, Any]
) -> str | None:
    """Say what FlexAttention cannot compute, if anything."""
    if dropout:
        return "dropout"
    if query.dtype == torch.float64 or not query.dtype == key.dtype == value.dtype:
        return f"products of {query.dtype} with {key.dtype} and {value.dtype}"
    if query.device.type == "cpu":
        if any(part.requires_grad for part in (query, key, value)):
            return "gradients on CPUs"
        if options.get("s_aux") is not None:
            return "attention sinks on CPUs"
        return None
    sizes = {query.shape[-1], value.shape[-1]}
    if not sizes <= set(_HEAD_SIZES):
        return f"heads of {max(sizes)} numbers"
    shapes = tuple((part.shape[1], part.shape[-1]) for part in (query, key, value))
    return tried(shapes, query.dtype, query.device)


@functools.cache
def tried(
    shapes: tuple[tuple[int, int], ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    varlen: bool = False,
    window: int | None = None,
) -> str | None:
    """Try a kernel on a short text, forward and backward, before anything depends on it.

    A machine may lack a compiler, or memory that the kernel needs for its tiles.

    Args:
        shapes: Number and size of the heads of queries, keys and values.
        dtype: Of all of them.
        device: Where they are.
        varlen: Try `varlen_attention` instead of FlexAttention.
        window: See `varlen_attention`.

    Returns:
        What went wrong; None: it gives what ``sdpa`` does.
    """
    numbers = torch.Generator().manual_seed(0)
    parts = [
        torch.randn((1, heads, 2 * BLOCK, size), generator=numbers).to(device, dtype)
        for heads, size in shapes
    ]
    text = torch.arange(2 * BLOCK)
    chains = [_Text(text[:0], text)]
    layer = SimpleNamespace(num_key_value_groups=shapes[0][0] // shapes[1][0], training=True)
    bounds = row_bounds(chains, device) if varlen else None
    mask = depth_first_order(chains, device).mask(None)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads = (query, key, value)
        if bounds is None:
            return _compute(layer, heads, mask, scaling=None)
        return varlen_attention(heads, bounds, window=window, scaling=None)

    try:
        outcome = _outcome(parts, attend)
    except Exception as error:  # noqa: BLE001  of a compiler, a driver, a kernel: sdpa needs none
        lines = str(error).strip().splitlines() or [""]
        return f"anything here ({type(error).__name__}: {lines[0]})"
    seen = None if window is None else _full_mask(None, len(text), len(text), window).to(device)
    expected = _outcome(
        parts,
        lambda q, k, v: sdpa_attention_forward(layer, q, k, v, seen, is_causal=True)[0],  # type: ignore[arg-type]
    )
    allowed = 1e-3 if dtype == torch.float32 else 5e-2
    if any((a - b).abs().max() > allowed * b.abs().max() for a, b in zip(outcome, expected)):  # noqa: B905
        return "attention here as sdpa does"
    return None


class _Text(NamedTuple):
    """One chain of tokens."""

    before: Tensor
    own: Tensor


@torch.inference_mode(False)
@torch.enable_grad()
def _outcome(parts: list[Tensor], attend: Callable[..., Tensor]) -> list[Tensor]:
    """Return the result of attention and its gradients, in float32."""
    leaves = [part.clone().requires_grad_() for part in parts]
    # inside a checkpointed layer, what is saved here would belong to that layer's backward pass
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        result = attend(*leaves)
        gradients = torch.autograd.grad(result.float().square().sum(), leaves)
    return [result.detach().float(), *(gradient.float() for gradient in gradients)]


def _compute(
    module: Any, heads: Heads, mask: BlockMask, *, scaling: float | None, **options: Any
) -> Tensor:
    if heads[0].device.type == "cuda":  # rows of one block would get the kernels for generation
        options["kernel_options"] = {"BACKEND": "TRITON"}
    with torch.compiler.config.patch(recompile_limit=_VARIANTS):  # type: ignore[attr-defined]
        result: Tensor = flex_attention_forward(module, *heads, mask, scaling=scaling, **options)[0]
    return result


class FlashAttention:
    """What ``transformers`` computes under the name of a flash kernel.

    Args:
        kernel: The name: ``flash_attention_2``, ...
    """

    def __init__(self, kernel: str) -> None:
        self._kernel = kernel

    def __call__(
        self,
        module: nn.Module,
        query: Float[Tensor, "B Q N D"],
        key: Float[Tensor, "B K T D"],
        value: Float[Tensor, "B K T D"],
        attention_mask: Int[Tensor, "B T"] | None,
        **options: Any,
    ) -> tuple[Float[Tensor, "B N Q D"], None]:
        """Compute attention; on CPUs, where a model is checked before it moves, with ``sdpa``."""
        if query.device.type == "cpu":
            window = options.get("sliding_window")
            mask = _full_mask(attention_mask, query.shape[2], key.shape[2], window)
            return sdpa_attention_forward(module, query, key, value, mask, **options)
        config = SimpleNamespace(**vars(module.config))
        set_attention(config, self._kernel)  # by this name the kernel is looked up
        layer = SimpleNamespace(
            config=config,
            is_causal=getattr(module, "is_causal", True),
            layer_idx=getattr(module, "layer_idx", None),
            modules=module.modules,
        )
        function = ALL_ATTENTION_FUNCTIONS[self._kernel]
        result: Tensor = function(layer, query, key, value, attention_mask, **options)[0]
        return result, None


def _full_mask(
    attended: Int[Tensor, "B T"] | None, queries: int, keys: int, window: int | None
) -> Bool[Tensor, "*B Q T"]:
    """Return which keys each query sees; ``attended`` is all that flash kernels are told."""
    behind = keys - queries
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(behind)
    if window is not None:
        seen = seen.triu(behind - window + 1)
    return seen[None, None] if attended is None else seen & attended.bool()[:, None, None]


PACKED_ATTENTION = "lrlhf_packed"
"""The name in a model's config of attention that computes packed rows with FlexAttention or, where
that cannot, segment by segment with ``sdpa``."""

PACKED_SDPA = "lrlhf_packed_sdpa"
"""The name of attention that always computes packed rows with ``sdpa``."""

PACKED_FLEX = "lrlhf_packed_flex"
"""As `PACKED_ATTENTION`, with the library's ``flex_attention`` for rows that are not packed."""

PACKED_OWN_ATTENTION = "lrlhf_packed_own"
"""The name of attention that computes packed rows as the model's own file does."""

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

_SETTINGS = {SEGMENTS, "dropout", "scaling", "sliding_window"}
"""Keywords that they do."""


class FlexibleAttention:
    """Computes packed rows with FlexAttention where they have a depth-first order and it can.

    Args:
        other: Computes rows that are not packed.
        varlen: Whether rows that share nothing go through `varlen_attention`.
    """

    def __init__(self, other: Callable[..., Any], *, varlen: bool = True) -> None:
        self._other, self._varlen = other, varlen

    def __call__(
        self,
        module: nn.Module,
        query: Float[Tensor, "B Q N D"],
        key: Float[Tensor, "B K N D"],
        value: Float[Tensor, "B K N D"],
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Float[Tensor, "B N Q D"], None]:
        """Compute attention as ``transformers`` asks its attention functions to."""
        segments: Segments | None = options.get(SEGMENTS)
        if segments is None:
            return self._other(module, query, key, value, attention_mask, **options)[0], None
        present = {name for name, option in options.items() if option is not None}
        requested = present & set(COMPUTED)
        if segments.depth_first is not None and present <= _IRRELEVANT | _SETTINGS | set(COMPUTED):
            window, scaling = options.get("sliding_window"), options.get("scaling")
            further = {name: options[name] for name in requested}
            heads, dropout = _autocast((query, key, value)), options.get("dropout", 0.0)
            if (bounds := segments.bounds) is not None and self._varlen:
                reason = varlen_obstacle(heads, window=window, dropout=dropout, options=further)
                if reason is None:
                    segments.windows.append(window)
                    return varlen_attention(heads, bounds, window=window, scaling=scaling), None
                _report("FlashAttention does not compute %s; FlexAttention may.", reason)
            output = flex_attention(
                module,
                heads,
                segments.depth_first.mask(window),
                dropout=dropout,
                scaling=scaling,
                **further,
            )
            if output is not None:
                segments.windows.append(window)
                return output, None
        by_segment = own_attention if requested else packed_attention
        return by_segment(module, query, key, value, attention_mask, **options)


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
    """Return what is added to scores to mask them as ``sdpa`` does with ``mask``, if anything.

    Without a mask, attention is causal where both the module and the call say so.
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


def _in_segments(
    attend: _Attend, segments: Segments, heads: _Heads, window: int | None
) -> Float[Tensor, "1 N Q D"]:
    """Go through the parts: no score exists of tokens in different ones."""
    segments.windows.append(window)
    results: list[Tensor] = []
    for number, part in enumerate(segments.parts):
        prefix, longest = part.before.shape[1], part.own.shape[1]
        behind = torch.cat([part.before, part.own], dim=1) if prefix else part.own
        query, key, value = (
            one[:, places].transpose(0, 1)
            for one, places in zip(heads, (part.own, behind, behind), strict=True)
        )
        if not prefix and (window is None or longest <= window):
            results.append(attend(query, key, value, None).flatten(0, 1))
            continue
        blocks = [
            attend(
                query[:, :, start:stop],
                key[:, :, : prefix + stop],
                value[:, :, : prefix + stop],
                _mask(segments, number, (start, stop), window),
            )
            for start, stop in _blocks(longest)
        ]
        results.append(torch.cat(blocks, dim=1).flatten(0, 1))
    return torch.cat(results)[segments.back][None]


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    for start in range(0, length, _BLOCK):
        yield start, min(start + _BLOCK, length)


def _mask(
    segments: Segments, number: int, block: tuple[int, int], window: int | None
) -> Bool[Tensor, "R 1 B P+E"]:
    """Return which keys the queries of a block see, of every segment of a part.

    A query sees ``window`` keys at most, itself included; None: all before it.
    """
    part, (start, stop) = segments.parts[number], block
    # most windows are wider than any row, and then all layers share one mask
    visible = window if window is not None and window < part.before.shape[1] + stop else 0
    name = (number, *block, visible)
    if name not in segments.masks:
        prefix = part.before_lengths[:, None, None]
        own = torch.arange(start, stop, device=prefix.device)[:, None]
        columns = torch.arange(part.before.shape[1], device=prefix.device)
        distance = own - torch.arange(stop, device=prefix.device)
        seen, mine = columns < prefix, distance >= 0
        if visible:
            seen = seen & (prefix + own - columns < visible)
            mine &= distance < visible
        shape = (len(part.own), stop - start, -1)
        mask = torch.cat([seen.expand(shape), mine.expand(shape)], dim=2)
        segments.masks[name] = mask[:, None]
    return segments.masks[name]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    PACKED_ATTENTION: FlexibleAttention(sdpa_attention_forward),
    PACKED_SDPA: packed_attention,
    PACKED_FLEX: FlexibleAttention(flex_attention_forward, varlen=False),
    PACKED_OWN_ATTENTION: own_attention,
}
"""All that compute packed rows, by the name in a model's config."""

_MASKS: dict[str, Callable[..., Any]] = {
    PACKED_FLEX: flex_attention_mask,
    PACKED_OWN_ATTENTION: eager_mask,
}

for _name, _function in FUNCTIONS.items():
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, _MASKS.get(_name, sdpa_mask))


KEPT_SDPA = "lrlhf_sdpa"
"""Of ``sdpa`` that was asked for, and is to compute packed rows as well."""

AttentionInterface.register(KEPT_SDPA, sdpa_attention_forward)
AttentionMaskInterface.register(KEPT_SDPA, sdpa_mask)

PACKED_NAMES = {
    "sdpa": PACKED_ATTENTION,
    KEPT_SDPA: PACKED_SDPA,
    "flex_attention": PACKED_FLEX,
}
"""Of attention for rows that are not packed: what takes its place where packed rows come too."""


def name_flash(kernel: str) -> str:
    """Register a flash kernel that CPUs can stand in for; see also `PACKED_NAMES`."""
    name, packed = f"lrlhf_{kernel}", f"lrlhf_packed_{kernel}"
    if name not in PACKED_NAMES:
        unpacked = FlashAttention(kernel)
        PACKED_NAMES[name] = packed
        FUNCTIONS[packed] = FlexibleAttention(unpacked)
        for each, function in ((name, unpacked), (packed, FUNCTIONS[packed])):
            AttentionInterface.register(each, function)
            AttentionMaskInterface.register(each, ALL_MASK_ATTENTION_FUNCTIONS[kernel])
    return name


COMPARED_ATTENTION = "lrlhf_compared"
"""The name of attention that computes with ``sdpa`` and compares it with the model's own, layer by
layer."""

_TOLERANCE = 1e-4
_LARGE = 30.0
"""Queries of trained models make scores of this size, those of new ones far smaller."""

_differing: ContextVar[list[str]] = ContextVar("differing_attention")


@contextlib.contextmanager
def comparing() -> Iterator[list[str]]:
    """Note which layers ask for more than ``sdpa`` computes, by class, during the block."""
    differences: list[str] = []
    token = _differing.set(differences)
    try:
        yield differences
    finally:
        _differing.reset(token)


def compared_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention in a trial, see `COMPARED_ATTENTION`.

    The two are compared in float32 on random queries and keys, small and large, whatever the
    precision and the weights of the model are.
    """
    own = own_function(module)
    options["dropout"] = 0.0
    if own is not None:
        mask = attention_mask
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.float()
        numbers = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(part.shape, generator=numbers).to(part.device)
            for part in (query, key, value)
        )
        q[:1] *= _LARGE
        bias = additive(module, q, k, mask, is_causal=options.get("is_causal", True))
        expected = own(module, q, k, v, bias, **options)[0]
        actual = sdpa_attention_forward(module, q, k, v, bias, **options)[0]
        if not torch.allclose(actual, expected, rtol=0, atol=_TOLERANCE * float(v.abs().max())):
            _differing.get().append(type(module).__name__)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


AttentionInterface.register(COMPARED_ATTENTION, compared_attention)
AttentionMaskInterface.register(COMPARED_ATTENTION, sdpa_mask)
