"""Single passes of training with random weights, to measure what they allocate."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache, PreTrainedModel

from lrlhf.models.packed.packing import Tree, known_trees
from lrlhf.planning.live_bytes import LiveBytes, Usage
from lrlhf.types import SequenceBatch

ResultT = TypeVar("ResultT")

_PRECISIONS = {
    "bf16-mixed": torch.bfloat16,
    "bf16": torch.bfloat16,
    "16-mixed": torch.float16,
    "16": torch.float16,
}


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

    def batch(self, device: torch.device) -> SequenceBatch:
        """Make a batch of this shape, a row of it shorter, so that attention needs a mask."""
        size = (self.rows, self.tokens)
        mask = torch.ones(size, dtype=torch.bool, device=device)
        mask[:1, 0] = self.rows == 1
        response = torch.ones(size, dtype=torch.bool, device=device)
        response[:, : self.tokens - self.new_tokens if self.new_tokens else 0] = False
        return SequenceBatch(
            input_ids=torch.zeros(size, dtype=torch.long, device=device),
            attention_mask=mask,
            response_mask=response,
        )


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Runs single passes and measures what they allocate beside the weights.

    The weights are random numbers, so nothing is downloaded or loaded. Without a GPU, or where a
    model does not fit on it, the same code runs on fake tensors, which have shapes and no numbers.

    Args:
        device: The GPU; None: there is none.
        precision: ``trainer.precision``.
        casts_weights: A mixed precision casts weights before a pass, rather than at each product.
    """

    device: torch.device | None
    precision: object
    casts_weights: bool

    def forward(
        self, model: nn.Module, compute: Callable[[SequenceBatch], Any], shape: Shape
    ) -> Usage:
        """Measure a pass without gradients.

        Args:
            model: On the meta device; all that ``compute`` uses.
            compute: The pass.
            shape: Of its batch.
        """

        def run(device: torch.device) -> Usage:
            model.eval()
            batch = shape.batch(device)
            with _live_bytes(model, batch, shape) as live, torch.no_grad(), self._autocast(device):
                compute(batch)
            return live.peak()

        return self._measured(model, run)

    def update(
        self,
        model: nn.Module,
        compute: Callable[[SequenceBatch], Tensor],
        shape: Shape,
        *,
        accumulates: bool,
    ) -> Usage:
        """Measure a forward and a backward pass.

        Args:
            model: On the meta device; some of its weights require gradients.
            compute: From a batch to a number to differentiate.
            shape: Of the batch.
            accumulates: Gradients of all weights exist already, and those of the pass are added
                to them. Then they do not count; else they do, from when each is complete.
        """

        def run(device: torch.device) -> Usage:
            model.train()
            batch = shape.batch(device)
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
                with self._autocast(device):
                    loss = compute(batch)
                loss.backward()  # type: ignore[no-untyped-call]
            return live.peak()

        return self._measured(model, run)

    def generation(
        self, plain: PreTrainedModel, prompts: Shape, *, copies: int, new_tokens: int
    ) -> tuple[Usage, Usage]:
        """Measure the two ends of what `lrlhf.rollout.TransformersEngine` does.

        Args:
            plain: Causal language model on the meta device.
            prompts: Those that are answered at the same time.
            copies: Responses to each.
            new_tokens: Of each response.

        Returns:
            While the prompts are computed, and while the last token of all responses is sampled.
        """
        rows, tokens = prompts.rows * copies, prompts.tokens
        first = prompts._replace(tokens=max(1, tokens - 1))

        def prefill(cache: DynamicCache, device: torch.device) -> Usage:
            batch = first.batch(device)
            with _live_bytes(plain, batch, first) as live, self._autocast(device, cached=True):
                _next_logits(plain, batch.input_ids, batch.input_ids, cache)
                kept = _bytes_of(_tensors_of(cache))
            return _with_cache(live.peak(), kept)

        def last_token(cache: DynamicCache, device: torch.device) -> Usage:
            with self._autocast(device):
                cache.batch_repeat_interleave(copies)
                longest = torch.zeros((rows, tokens + new_tokens), dtype=torch.long, device=device)
                _next_logits(plain, longest[:, tokens - 1 : -2], longest[:, :-2], cache)
            keys = _tensors_of(cache)
            kept, batch = _bytes_of(keys), first.batch(device)
            with _live_bytes(plain, batch, first, cache=keys) as live:
                keys.clear()  # each is freed when a longer one takes its place
                with self._autocast(device, cached=True):
                    logits = _next_logits(plain, longest[:, -1:], longest[:, :-1], cache)
                    _probabilities(logits)
            return _with_cache(live.peak(), kept)

        @torch.no_grad()
        def run(device: torch.device) -> tuple[Usage, Usage]:
            plain.train(False)
            cache = DynamicCache(config=plain.config)
            return prefill(cache, device), last_token(cache, device)

        return self._measured(plain, run)

    def _measured(self, model: nn.Module, run: Callable[[torch.device], ResultT]) -> ResultT:
        if self.device is not None:
            try:
                with _with_weights(model, self.device, self._pass_dtype):
                    return run(self.device)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
        shapes, device = FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu")
        with shapes, _with_weights(model, device, self._pass_dtype):
            return run(device)

    @property
    def _pass_dtype(self) -> torch.dtype | None:
        """Precision of the weights when a pass begins; None: the one that they are kept in."""
        return _PRECISIONS.get(str(self.precision)) if self.casts_weights else None

    @contextlib.contextmanager
    def _autocast(self, device: torch.device, *, cached: bool = False) -> Iterator[None]:
        """Autocast as Lightning does, or as the engine does, which casts each weight once."""
        dtype = _PRECISIONS.get(str(self.precision))
        if dtype is None:
            yield
            return
        with torch.autocast(device.type, dtype=dtype, cache_enabled=cached):
            yield
        torch.clear_autocast_cache()


@contextlib.contextmanager
def _with_weights(
    model: nn.Module, device: torch.device, dtype: torch.dtype | None
) -> Iterator[None]:
    """Give a model of the meta device random weights; tied ones stay tied."""
    skeleton: list[tuple[Any, str, Tensor]] = []
    weights: dict[int, Tensor] = {}

    def weight_for(tensor: Tensor) -> Tensor:
        if id(tensor) not in weights:
            floating = tensor.is_floating_point()
            kept = dtype if dtype is not None and floating else tensor.dtype
            new = torch.zeros(tensor.shape, dtype=kept, device=device)
            if floating:
                new.normal_(std=0.02)
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            weights[id(tensor)] = new
        return weights[id(tensor)]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            skeleton += [(tensors, name, one) for name, one in tensors.items() if one is not None]
    for tensors, name, tensor in skeleton:
        tensors[name] = weight_for(tensor)
    try:
        yield
    finally:
        for tensors, name, tensor in skeleton:
            tensors[name] = tensor


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
        device=batch.input_ids.device,
        cache=cache,
        vocabulary=shape.vocabulary,
        selected=shape.rows * max(1, shape.new_tokens),
    )
    with known_trees(shape.trees()), live:
        yield live


def _with_cache(usage: Usage, kept: int) -> Usage:
    """Tell the keys and values, which are made anew with every token, from what does not last."""
    return usage._replace(cache=kept, activations=usage.activations + usage.cache - kept)


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
        value for one in cache.layers for value in vars(one).values() if isinstance(value, Tensor)
    ]


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
