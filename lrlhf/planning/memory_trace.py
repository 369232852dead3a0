"""What a pass through a model needs besides its weights, found out by running it on shapes.

The passes are those of training, on fake tensors: every tensor that PyTorch would allocate is
counted from its making to its end, so recomputed activations, copies of weights that autocast
makes, attention masks and chunks of logits are all in the figures, whatever the architecture.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, NamedTuple, Self

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedModel

from lrlhf.models import plain_model
from lrlhf.models.packed.packing import Tree, known_trees
from lrlhf.types import SequenceBatch


class Needed(NamedTuple):
    """Bytes at the moment when a pass needs most, beside the weights themselves."""

    activations: int = 0
    logits: int = 0
    weights: int = 0
    """Copies of weights in another precision, as autocast makes them."""
    gradients: int = 0
    cache: int = 0
    """Keys and values."""

    @property
    def total(self) -> int:
        """The sum."""
        return sum(self)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes of the tensors that are made inside, as long as they live.

    Args:
        known: Tensors that are there already, and do not count: weights and inputs.
        vocabulary: Length of a row of logits; None: there are none.
        asked: How many positions a mask of positions selects. On shapes alone it cannot be counted.
    """

    def __init__(
        self, *, known: Iterable[Tensor], vocabulary: int | None = None, asked: int = 0
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._vocabulary = vocabulary
        self._asked = asked
        self._live: dict[int, tuple[weakref.ref[Any], str, int]] = {}
        self._now: Counter[str] = Counter()
        self._total = 0
        self._peak = 0
        self._at_peak: Mapping[str, int] = {}

    def peak(self) -> Needed:
        """Return what was alive when it was most."""
        return Needed(**self._at_peak)

    def now(self) -> Needed:
        """Return what is alive."""
        return Needed(**self._now)

    def move(self, tensor: Tensor, kind: str) -> None:
        """Count a tensor under another heading from now on."""
        key = tensor.untyped_storage()._cdata
        if key in self._live:
            reference, before, size = self._live[key]
            self._now[before] -= size
            self._now[kind] += size
            self._live[key] = (reference, kind, size)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = self._selected(func, args)
        if result is None:
            result = func(*args, **(kwargs or {}))
        kind = None
        if func is torch.ops.aten._to_copy.default and self._is_known(args[0]):
            kind = "weights" if args[0].is_floating_point() else None
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.count(leaf, kind)
        return result

    def _is_known(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._known

    def _selected(self, func: Any, args: tuple[Any, ...]) -> Tensor | None:
        """Answer the operations whose result depends on how many entries of a mask are True."""
        if func is torch.ops.aten.masked_select.default:
            return args[0].new_empty(self._asked)  # type: ignore[no-any-return]
        if func is not torch.ops.aten.index.Tensor:
            return None
        tensor, indices = args
        masks = [i for i, index in enumerate(indices) if index is not None]
        if len(masks) != 1 or indices[masks[0]].dtype != torch.bool:
            return None
        axis, mask = masks[0], indices[masks[0]]
        rest = tensor.shape[axis + mask.dim() :]
        return tensor.new_empty((*tensor.shape[:axis], self._asked, *rest))  # type: ignore[no-any-return]

    def size(self, tensor: Tensor) -> int:
        """Return the bytes that a tensor holds, 0 if it is known."""
        return 0 if self._is_known(tensor) else int(tensor.untyped_storage().nbytes())

    def count(self, tensor: Tensor, kind: str | None) -> None:
        """Count a tensor from now on; None finds out by its shape what it is."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or key in self._known:
            return
        kind = kind or self._kind(tensor)
        reference = weakref.ref(storage, lambda _, key=key: self._forget(key))  # type: ignore[misc]
        size = storage.nbytes()
        self._live[key] = (reference, kind, size)
        self._now[kind] += size
        self._total += size
        if self._total > self._peak:
            self._peak = self._total
            self._at_peak = dict(self._now)

    def _kind(self, tensor: Tensor) -> str:
        logits = (
            tensor.is_floating_point() and tensor.dim() > 1 and tensor.shape[-1] == self._vocabulary
        )
        return "logits" if logits else "activations"

    def _forget(self, key: int) -> None:
        _, kind, size = self._live.pop(key)
        self._now[kind] -= size
        self._total -= size


class Precision(NamedTuple):
    """What products are computed in; None: as the weights are kept."""

    dtype: torch.dtype | None

    @classmethod
    def of(cls, name: object) -> Self:
        """Read ``trainer.precision``."""
        text = str(name)
        if text in {"bf16-mixed", "bf16"}:
            return cls(torch.bfloat16)
        return cls(torch.float16 if text in {"16-mixed", "16"} else None)

    def autocast(self, *, keeps_casts: bool = False) -> contextlib.AbstractContextManager[Any]:
        """Compute in this precision, as Lightning does, or as rollouts do: weights cast once."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast("cpu", dtype=self.dtype, cache_enabled=keeps_casts)


class Shape(NamedTuple):
    """Sizes of a batch of texts."""

    rows: int
    tokens: int
    """Of each row."""
    asked: int = 0
    """Tokens of each row that are responses."""
    group: int = 1
    """Rows that begin with the same tokens, up to the responses."""

    def trees(self) -> list[Tree]:
        """Say how rows are packed, where the model packs them."""
        sizes = [self.group] * (self.rows // self.group) + [self.rows % self.group]
        starts = accumulate(sizes, initial=0)
        prefix = self.tokens - self.asked
        return [
            Tree(tuple(range(start, start + size)), prefix, (self.asked,) * size)
            if size > 1
            else Tree((start,), self.tokens, ())
            for start, size in zip(starts, sizes, strict=False)
            if size
        ]

    def batch(self) -> SequenceBatch:
        """Make a batch of this shape."""
        size = (self.rows, self.tokens)
        return SequenceBatch(
            input_ids=torch.zeros(size, dtype=torch.long),
            attention_mask=torch.ones(size, dtype=torch.bool),
            response_mask=torch.ones(size, dtype=torch.bool),
        )


def forward_needs(
    model: nn.Module, compute: Callable[[SequenceBatch], Any], shape: Shape, precision: Precision
) -> Needed:
    """Run a pass without gradients.

    Args:
        model: Runnable, as are those of the other functions here; see `lrlhf.models.loading.meta`.
        compute: The pass.
        shape: Of its batch.
        precision: Of its products.
    """
    model.eval()
    batch = shape.batch()
    with (
        known_trees(shape.trees()),
        _counting(model, batch, shape) as live,
        torch.no_grad(),
        precision.autocast(),
    ):
        compute(batch)
    return live.peak()


def update_needs(
    model: nn.Module,
    compute: Callable[[SequenceBatch], Tensor],
    shape: Shape,
    precision: Precision,
    *,
    accumulates: bool,
) -> Needed:
    """Run a pass with gradients, forward and backward.

    Args:
        model: Some of its weights require gradients.
        compute: From a batch to a number to differentiate.
        shape: Of the batch.
        precision: Of the products.
        accumulates: Gradients of all weights are there already, and those of the pass are added
            to them. Then they do not count; else they do, from when each is complete.
    """
    model.train()
    batch = shape.batch()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    if accumulates:
        for weight in trained:
            weight.grad = torch.zeros_like(weight)
    gradients = [weight.grad for weight in trained if weight.grad is not None]
    with known_trees(shape.trees()), _counting(model, batch, shape, more=gradients) as live:

        def arrived(weight: Tensor) -> None:
            if weight.grad is not None:
                live.move(weight.grad, "gradients")

        handles = [
            weight.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
            for weight in trained
        ]
        with precision.autocast():
            loss = compute(batch)
        loss.backward()  # type: ignore[no-untyped-call]
    for handle, weight in zip(handles, trained, strict=True):
        handle.remove()
        weight.grad = None
    return live.peak()


class GenerationNeeds(NamedTuple):
    """Of drawing responses through ``transformers``."""

    prompts: Needed
    """While the prompts are computed."""
    last_token: Needed
    """While the last token of all responses is drawn, keys and values included."""


def generation_needs(
    model: PreTrainedModel | PeftModel,
    prompts: Shape,
    *,
    copies: int,
    new_tokens: int,
    precision: Precision,
) -> GenerationNeeds:
    """Run the two ends of what `lrlhf.rollout.TransformersEngine` does.

    Args:
        model: Causal language model.
        prompts: Those that are answered at the same time.
        copies: Responses to each.
        new_tokens: Of each response.
        precision: Of the products.
    """
    model.eval()
    plain = plain_model(model)
    cache = DynamicCache(config=plain.config)
    rows = prompts.rows * copies
    first = prompts._replace(tokens=max(1, prompts.tokens - 1)).batch()
    with (
        _counting(model, first, prompts) as live,
        torch.no_grad(),
        precision.autocast(keeps_casts=True),
    ):
        _step(plain, first.input_ids, first.input_ids, cache)
        kept = sum(live.size(tensor) for tensor in _tensors_of(cache))
        of_prompts = _with_cache(live.peak(), kept)
    with torch.no_grad(), precision.autocast():
        cache.batch_repeat_interleave(copies)
        longest = torch.zeros((rows, prompts.tokens + new_tokens), dtype=torch.long)
        _step(plain, longest[:, prompts.tokens - 1 : -2], longest[:, :-2], cache)
    keys = _tensors_of(cache)
    with _counting(model, prompts.batch(), prompts) as live, torch.no_grad():
        for tensor in keys:
            live.count(tensor, "cache")
        kept = live.now().cache
        del keys, tensor  # each is given up when a longer one takes its place
        with precision.autocast(keeps_casts=True):
            _draw(_step(plain, longest[:, -1:], longest[:, :-1], cache))
    torch.clear_autocast_cache()
    return GenerationNeeds(of_prompts, _with_cache(live.peak(), kept))


def _with_cache(needed: Needed, kept: int) -> Needed:
    """Tell the keys and values, which are made anew with every token, from what does not last."""
    others = needed.activations + needed.cache - kept
    return needed._replace(cache=kept, activations=others)


def _step(model: PreTrainedModel, ids: Tensor, seen: Tensor, cache: DynamicCache) -> Tensor:
    output = model(
        input_ids=ids,
        attention_mask=torch.ones_like(seen),
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: Tensor = output.logits
    return logits


def _draw(logits: Tensor) -> Tensor:
    """Pick tokens as the engine does: log-softmax in float32, cumulated in float64."""
    scores = logits[:, -1].to(dtype=torch.float32, copy=True)
    logprobs = scores.float().div(1.0).log_softmax(-1)
    return logprobs.double().exp().cumsum(dim=-1)


def _tensors_of(cache: DynamicCache) -> list[Tensor]:
    tensors = []
    for layer in cache.layers:
        tensors += [value for value in vars(layer).values() if isinstance(value, Tensor)]
    return tensors


@contextlib.contextmanager
def _counting(
    model: nn.Module, batch: SequenceBatch, shape: Shape, *, more: Iterable[Tensor] = ()
) -> Iterator[LiveBytes]:
    inputs = [batch.input_ids, batch.attention_mask, batch.response_mask]
    known = [*model.parameters(), *model.buffers(), *inputs, *more]
    live = LiveBytes(
        known=known, vocabulary=_vocabulary(model), asked=shape.rows * max(1, shape.asked)
    )
    with live:
        yield live


def _vocabulary(model: nn.Module) -> int | None:
    if isinstance(model, PreTrainedModel | PeftModel):
        return int(plain_model(model).config.get_text_config().vocab_size)
    return None
