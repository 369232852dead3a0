"""Single passes of training on tensors without numbers, and the bytes that they allocate."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel

from lrlhf.models.packed.packing import Tree, known_trees
from lrlhf.torch_internals import FakeTensorMode, TorchDispatchMode, is_cast, tree_leaves
from lrlhf.types import SequenceBatch

ON_HOST = "host"
"""Column of what is kept in main memory, which no `Usage` counts."""


class Usage(NamedTuple):
    """Bytes of one process at one moment, by column of the memory table."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    cache: int = 0

    @property
    def total(self) -> int:
        """The sum of all columns."""
        return sum(self)

    def plus(self, *others: Usage) -> Usage:
        """Return the sum, column by column."""
        return Usage(*map(sum, zip(self, *others, strict=True)))


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes of the tensors that are created inside, for as long as they live.

    Args:
        known: Tensors that exist already and do not count: weights and inputs.
        cache: Keys and values that exist already and count.
        vocabulary: Length of a row of logits; None: there are none.
        selected: How many positions of a mask are True, which shapes alone do not tell.
    """

    def __init__(
        self,
        *,
        known: Iterable[Tensor],
        cache: Iterable[Tensor] = (),
        vocabulary: int | None = None,
        selected: int = 0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {id(tensor.untyped_storage()) for tensor in known}
        self._vocabulary, self._selected = vocabulary, selected
        self._live: dict[int, tuple[weakref.ref[Any], str, int]] = {}
        self._now: Counter[str] = Counter()
        self._at_peak: Mapping[str, int] = {}
        for tensor in cache:
            self._count(tensor, "cache")

    def peak(self) -> Usage:
        """Return what was alive when it was most."""
        return Usage(**{name: size for name, size in self._at_peak.items() if name != ON_HOST})

    def move(self, tensor: Tensor, column: str) -> None:
        """Count a tensor in another column from now on."""
        key = id(tensor.untyped_storage())
        if key in self._live:
            reference, before, size = self._live[key]
            self._now[before] -= size
            self._now[column] += size
            self._live[key] = (reference, column, size)
            self._note_peak()

    def _note_peak(self) -> None:
        if _on_device(self._now) > _on_device(self._at_peak):
            self._at_peak = dict(self._now)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = self._selection(func, args)
        if result is None:
            result = func(*args, **(kwargs or {}))
        # autocast keeps its copies of weights until the backward pass
        copied = is_cast(func) and self._is_weight(args[0])
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf, "parameters" if copied else None)
        return result

    def _is_weight(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and id(tensor.untyped_storage()) in self._known

    def _selection(self, func: Any, args: tuple[Any, ...]) -> Tensor | None:
        """Answer what depends on how many entries of a mask are True."""
        if func is torch.ops.aten.masked_select.default:
            return args[0].new_empty(self._selected)  # type: ignore[no-any-return]
        if func is not torch.ops.aten.index.Tensor:
            return None
        tensor, indices = args
        masks = [i for i, index in enumerate(indices) if index is not None]
        if len(masks) != 1 or indices[masks[0]].dtype != torch.bool:
            return None
        axis = masks[0]
        rest = tensor.shape[axis + indices[axis].dim() :]
        return tensor.new_empty((*tensor.shape[:axis], self._selected, *rest))  # type: ignore[no-any-return]

    def _count(self, tensor: Tensor, column: str | None) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._live or key in self._known:
            return
        if column is None:
            wide = tensor.dim() > 1 and tensor.shape[-1] == self._vocabulary
            column = "logits" if wide and tensor.is_floating_point() else "activations"
        reference = weakref.ref(storage, lambda _, key=key: self._forget(key))  # type: ignore[misc]
        size = storage.nbytes()
        self._live[key] = (reference, column, size)
        self._now[column] += size
        self._note_peak()

    def _forget(self, key: int) -> None:
        _, column, size = self._live.pop(key)
        self._now[column] -= size


def _on_device(sizes: Mapping[str, int]) -> int:
    return sum(size for column, size in sizes.items() if column != ON_HOST)


_PRECISIONS = {
    "bf16-mixed": torch.bfloat16,
    "bf16": torch.bfloat16,
    "16-mixed": torch.float16,
    "16": torch.float16,
}

_CHECKPOINTED = "_gradient_checkpointing_func"
"""What blocks of transformers are called with where their activations are recomputed."""


class Shape(NamedTuple):
    """Sizes of a batch of texts.

    Attributes:
        rows: Number of texts.
        tokens: Of each text.
        new_tokens: Those of each that are a response; 0: all.
        group: Rows that begin with the same tokens, up to the responses.
        vocabulary: Length of a row of logits; None: there are none.
    """

    rows: int
    tokens: int
    new_tokens: int = 0
    group: int = 1
    vocabulary: int | None = None

    def trees(self) -> list[Tree]:
        """Say how rows are packed, where the model packs them."""
        sizes = [self.group] * (self.rows // self.group) + [self.rows % self.group]
        prefix = self.tokens - self.new_tokens
        return [
            Tree(tuple(range(start, start + size)), prefix, (self.new_tokens,) * size)
            if size > 1
            else Tree((start,), self.tokens, ())
            for start, size in zip(accumulate(sizes, initial=0), sizes, strict=False)
            if size
        ]

    def batch(self) -> SequenceBatch:
        """Make a batch of this shape, a row of it shorter, so that attention needs a mask."""
        size = (self.rows, self.tokens)
        mask = torch.ones(size, dtype=torch.bool)
        mask[:1, 0] = self.rows == 1
        response = torch.ones(size, dtype=torch.bool)
        response[:, : self.tokens - self.new_tokens if self.new_tokens else 0] = False
        return SequenceBatch(
            input_ids=torch.zeros(size, dtype=torch.long),
            attention_mask=mask,
            response_mask=response,
        )


class DryRun:
    """Runs single passes of the code that trains, and counts what they allocate.

    The passes run on fake tensors, which have shapes and no numbers: no weights are needed, and no
    memory, whatever the size of the model.

    Args:
        precision: ``trainer.precision``.
        casts_weights: A mixed precision casts weights before a pass, rather than at each product.
    """

    def __init__(self, precision: object, *, casts_weights: bool) -> None:
        self.casts_weights = casts_weights
        self._dtype = _PRECISIONS.get(str(precision))

    def forward(
        self, model: nn.Module, compute: Callable[[SequenceBatch], Any], shape: Shape
    ) -> Usage:
        """Count a pass without gradients; ``compute`` uses the model, on the meta device."""
        model.eval()
        with self._weights(model), torch.no_grad():
            batch = shape.batch()
            with _live_bytes(model, batch, shape) as live, self._autocast():
                compute(batch)
        return live.peak()

    def update(
        self,
        model: nn.Module,
        compute: Callable[[SequenceBatch], Tensor],
        shape: Shape,
        *,
        accumulates: bool,
        offloads: bool = False,
    ) -> Usage:
        """Count a forward and a backward pass.

        Args:
            model: On the meta device; some of its weights require gradients.
            compute: From a batch to a number to differentiate.
            shape: Of the batch.
            accumulates: Gradients of all weights exist already, and do not count; else they do,
                from when each is complete.
            offloads: What gradient checkpointing recomputes from is kept in main memory.
        """
        model.train()
        with self._weights(model):
            batch = shape.batch()
            trained = [weight for weight in model.parameters() if weight.requires_grad]
            for weight in trained if accumulates else ():
                weight.grad = torch.zeros_like(weight)
            known = [weight.grad for weight in trained if weight.grad is not None]
            with _live_bytes(model, batch, shape, known=known) as live:

                def arrived(weight: Tensor) -> None:
                    assert weight.grad is not None
                    live.move(weight.grad, "gradients")

                for weight in trained:
                    weight.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
                on_host = _inputs_on_host(model, live) if offloads else contextlib.nullcontext()
                with self._autocast(), on_host:
                    loss = compute(batch)
                loss.backward()  # type: ignore[no-untyped-call]
        return live.peak()

    @torch.no_grad()
    def generation(
        self, plain: PreTrainedModel, prompts: Shape, *, copies: int, new_tokens: int
    ) -> tuple[Usage, Usage]:
        """Count the two ends of what `lrlhf.rollout.TransformersEngine` does.

        While ``prompts`` are computed together, and while the last of ``new_tokens`` tokens of
        ``copies`` responses to each is sampled.
        """
        rows, tokens = prompts.rows * copies, prompts.tokens
        first = prompts._replace(tokens=max(1, tokens - 1))
        plain.train(False)
        with self._weights(plain):
            cache, batch = DynamicCache(config=plain.config), first.batch()
            with _live_bytes(plain, batch, first) as live, self._autocast(cached=True):
                _next_logits(plain, batch.input_ids, batch.input_ids, cache)
            begin = _with_cache(live.peak(), _bytes_of(cache))
            with self._autocast():
                cache.batch_repeat_interleave(copies)
                longest = torch.zeros((rows, tokens + new_tokens), dtype=torch.long)
                _next_logits(plain, longest[:, tokens - 1 : -2], longest[:, :-2], cache)
            cache_bytes, keys = _bytes_of(cache), _tensors_of(cache)
            with _live_bytes(plain, batch, first, cache=keys) as live:
                keys.clear()  # each is freed when a longer one takes its place
                with self._autocast(cached=True):
                    logits = _next_logits(plain, longest[:, -1:], longest[:, :-1], cache)
                    _probabilities(logits)
            return begin, _with_cache(live.peak(), cache_bytes)

    @contextlib.contextmanager
    def _weights(self, model: nn.Module) -> Iterator[None]:
        """Give a model of the meta device fake weights on the CPU; tied ones stay tied."""
        skeleton: list[tuple[nn.Module, str, Tensor]] = [
            (module, name, tensor)
            for module in model.modules()
            for tensors in (module.named_parameters, module.named_buffers)
            for name, tensor in tensors(recurse=False, remove_duplicate=False)
        ]
        weights: dict[int, Tensor] = {}
        with _errors_logged_once(), FakeTensorMode(allow_non_fake_inputs=True):
            for module, name, tensor in skeleton:
                if id(tensor) not in weights:
                    weights[id(tensor)] = self._fake(tensor)
                setattr(module, name, weights[id(tensor)])
            try:
                yield
            finally:
                for module, name, tensor in skeleton:
                    setattr(module, name, tensor)

    def _fake(self, tensor: Tensor) -> Tensor:
        casts = self.casts_weights and tensor.is_floating_point()
        dtype = self._dtype if casts and self._dtype is not None else tensor.dtype
        fake = torch.empty(tensor.shape, dtype=dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake

    @contextlib.contextmanager
    def _autocast(self, *, cached: bool = False) -> Iterator[None]:
        """Autocast as Lightning does, or as the engine does, which casts each weight once."""
        if self._dtype is None:
            yield
            return
        with torch.autocast("cpu", dtype=self._dtype, cache_enabled=cached):
            yield
        torch.clear_autocast_cache()


@contextlib.contextmanager
def _errors_logged_once() -> Iterator[None]:
    """Keep torch from logging the traceback of an error that it raises as well."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _live_bytes(
    model: nn.Module,
    batch: SequenceBatch,
    shape: Shape,
    *,
    known: Iterable[Tensor] = (),
    cache: Iterable[Tensor] = (),
) -> Iterator[LiveBytes]:
    inputs = (batch.input_ids, batch.attention_mask, batch.response_mask)
    live = LiveBytes(
        known=[*model.parameters(), *model.buffers(), *inputs, *known],
        cache=cache,
        vocabulary=shape.vocabulary,
        selected=shape.rows * max(1, shape.new_tokens),
    )
    with known_trees(shape.trees()), live:
        yield live


@contextlib.contextmanager
def _inputs_on_host(model: nn.Module, live: LiveBytes) -> Iterator[None]:
    """Count what checkpointed blocks begin with only while they run, forward or backward."""

    def checkpointed(function: Callable[..., Any], *args: Any) -> Any:
        packed: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            packed.append(tensor)
            return tensor

        def unpack(tensor: Tensor) -> Tensor:
            live.move(tensor, "activations")
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            result = checkpoint(function, *args, use_reentrant=False)
        for tensor in packed:
            live.move(tensor, ON_HOST)
        return result

    blocks: list[Any] = [part for part in model.modules() if hasattr(part, _CHECKPOINTED)]
    before = [getattr(block, _CHECKPOINTED) for block in blocks]
    for block in blocks:
        setattr(block, _CHECKPOINTED, checkpointed)
    try:
        yield
    finally:
        for block, function in zip(blocks, before, strict=True):
            setattr(block, _CHECKPOINTED, function)


def _with_cache(usage: Usage, cached: int) -> Usage:
    """Tell the keys and values, which are made anew with every token, from what does not last."""
    return usage._replace(cache=cached, activations=usage.activations + usage.cache - cached)


def _next_logits(model: PreTrainedModel, ids: Tensor, seen: Tensor, cache: DynamicCache) -> Tensor:
    mask = torch.ones_like(seen)
    mask[:1, 0] = int(len(seen) == 1)  # prompts differ in length
    output = model(
        input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1
    )
    return output.logits  # type: ignore[no-any-return]


def _probabilities(logits: Tensor) -> Tensor:
    """Compute what the engine samples from: log-softmax in float32, cumulated in float64."""
    scores = logits[:, -1].to(dtype=torch.float32, copy=True)
    logprobs = scores.float().div(1.0).log_softmax(-1)
    return logprobs.double().exp().cumsum(dim=-1)


def _tensors_of(cache: DynamicCache) -> list[Tensor]:
    return [
        value
        for layer in cache.layers
        for value in vars(layer).values()
        if isinstance(value, Tensor)
    ]


def _bytes_of(cache: DynamicCache) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in _tensors_of(cache))
