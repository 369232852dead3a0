"""What one rank keeps of weights, gradients and optimizer states, by strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from lrlhf.models.scorers import blocks_of
from lrlhf.modules.optimizers import OptimizerConfig

_FOUR_BIT = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes per weight in nf4 with double quantisation: a scale of 8 bits per 64 weights, and one of
32 bits per 256 of those (Dettmers et al. 2023, section 3, https://arxiv.org/abs/2305.14314)."""

_LIVE_PARAMETERS = 1_000_000_000
"""``stage3_max_live_parameters`` of DeepSpeed: how many weights ZeRO-3 keeps whole at a time."""

_BUCKET = 500_000_000
"""``reduce_bucket_size`` of DeepSpeed: gradients that are reduced together."""


class Part(NamedTuple):
    """Some weights: how many, and their bytes as they are kept."""

    number: int = 0
    size: int = 0

    def __add__(self, other: tuple[int, ...]) -> Part:  # type: ignore[override]
        return Part(self.number + other[0], self.size + other[1])

    def itemsize(self) -> int:
        """Bytes of one."""
        return self.size // self.number if self.number else 0


class Weights(NamedTuple):
    """The weights of one model.

    Attributes:
        trained: Those that learn.
        frozen: The others, buffers included.
        block: The largest of the repeated blocks.
        around: What is not in a block: embeddings, norms, heads.
        largest: The largest weight that learns.
    """

    trained: Part
    frozen: Part
    block: Part
    around: Part
    largest: Part

    @property
    def whole(self) -> Part:
        """All of them."""
        return self.trained + self.frozen


def weights_of(
    model: nn.Module, plain: PreTrainedModel, *, quantization: str | None = None
) -> Weights:
    """Count a model's weights.

    Args:
        model: A skeleton, see `lrlhf.models.loading.meta`.
        plain: The `transformers` model in it.
        quantization: ``4bit``, ``8bit`` or None, of its frozen linear layers but the output head.
    """
    quantised = _quantised(model, plain) if quantization else set()
    per_weight = _FOUR_BIT if quantization == "4bit" else 1.0

    def part(tensor: torch.Tensor) -> Part:
        number = tensor.numel()
        exact = number * (per_weight if id(tensor) in quantised else tensor.itemsize)
        return Part(number, round(exact))

    trained = frozen = largest = Part()
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.requires_grad:
            trained += part(tensor)
            largest = max(largest, part(tensor), key=lambda one: one.size)
        else:
            frozen += part(tensor)
    blocks = [_sum(map(part, block.parameters())) for block in blocks_of(plain)]
    inside = _sum(blocks)
    whole = trained + frozen
    around = Part(whole.number - inside.number, whole.size - inside.size)
    block = max(blocks, key=lambda one: one.size, default=Part())
    return Weights(trained, frozen, block, around, largest)


def _sum(parts: Any) -> Part:
    total = Part()
    for one in parts:
        total += one
    return total


def _quantised(model: nn.Module, plain: PreTrainedModel) -> set[int]:
    layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
    head = plain.get_output_embeddings()  # type: ignore[no-untyped-call]
    return {
        id(part.weight) for part in layers if part is not head and not part.weight.requires_grad
    }


class OptimizerNeeds(NamedTuple):
    """Of one optimizer, in multiples of the bytes of the weights that it moves.

    Attributes:
        states: What it remembers.
        step: What it needs for the duration of a step, over all its weights.
        step_largest: The same over the largest of its weights, where it takes one after another.
    """

    states: float
    step: float
    step_largest: float


def optimizer_needs(options: Mapping[str, Any], *, on_gpu: bool) -> OptimizerNeeds:
    """Find out what an optimizer keeps, by letting it take a step on one small weight.

    On GPUs PyTorch's optimizers work on all weights at once, on CPUs on one after another; AdamW
    then holds one copy of all, or two of one. A fused AdamW holds none.

    Args:
        options: Of `OptimizerConfig`.
        on_gpu: Where it will run.
    """
    weight = nn.Parameter(torch.zeros(64, 64))
    config = OptimizerConfig(**options)
    optimizer = config.build([("weight", weight)], total_steps=1).optimizer
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    kept = sum(
        value.numel() * value.itemsize
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    )
    states = kept / (weight.numel() * weight.itemsize)
    if optimizer.param_groups[0].get("fused"):
        return OptimizerNeeds(states, 0.0, 0.0)
    return OptimizerNeeds(states, 1.0, 0.0) if on_gpu else OptimizerNeeds(states, 0.0, 2.0)


@dataclass(frozen=True, kw_only=True)
class Sharing(ABC):
    """How the ranks of a run share models; sizes are bytes of one rank's device.

    Args:
        ranks: Processes of the run.
        low_precision: The precision is mixed: products are computed in 16 bits.
        on_gpu: The device is one.
    """

    ranks: int
    low_precision: bool
    on_gpu: bool

    splits = False
    """Whether weights are gathered for each pass."""
    casts = True
    """Whether a mixed precision casts weights before a pass, rather than at each product."""

    @abstractmethod
    def parameters(self, weights: Weights) -> int:
        """Weights that stay, their copies in full precision included."""

    @abstractmethod
    def gradients(self, weights: Weights, *, accumulates: bool) -> int:
        """Gradients during an update, beside what `resident_gradients` says."""

    def resident_gradients(self, weights: Weights) -> int:
        """Gradients, or room for them, that stay between updates."""
        del weights
        return 0

    def gathered(self, weights: Weights, *, generates: bool = False) -> int:
        """Weights that are whole for the duration of a pass, or of a rollout."""
        del weights, generates
        return 0

    def states(self, weights: Weights, needs: OptimizerNeeds) -> int:
        """What the optimizer remembers."""
        return round(self._moved(weights) * needs.states)

    def step(self, weights: Weights, needs: OptimizerNeeds) -> int:
        """What a step of the optimizer needs for its duration."""
        moved = self._moved(weights)
        if weights.trained.size == 0:
            return 0
        largest = moved * weights.largest.size / weights.trained.size
        return round(moved * needs.step + largest * needs.step_largest)

    def _moved(self, weights: Weights) -> int:
        """Bytes of the weights that the optimizer of this rank moves."""
        return weights.trained.size


@dataclass(frozen=True, kw_only=True)
class Whole(Sharing):
    """One process, or DistributedDataParallel: every rank has everything.

    Args:
        buckets: DistributedDataParallel keeps flat copies of all gradients to send them.
    """

    buckets: bool = False

    casts = False

    def parameters(self, weights: Weights) -> int:
        return weights.whole.size

    def gradients(self, weights: Weights, *, accumulates: bool) -> int:
        del accumulates
        return weights.trained.size

    def resident_gradients(self, weights: Weights) -> int:
        return weights.trained.size if self.buckets else 0


@dataclass(frozen=True, kw_only=True)
class FullySharded(Sharing):
    """`lrlhf.strategies.FSDP2`.

    Args:
        group: Ranks that share one copy.
        reshard: Free a block's weights after its forward pass.
        offload: Keep weights, gradients and optimizer states in main memory.
    """

    group: int
    reshard: bool = True
    offload: bool = False

    splits = True

    def parameters(self, weights: Weights) -> int:
        return 0 if self.offload else weights.whole.size // self.group

    def gathered(self, weights: Weights, *, generates: bool = False) -> int:
        if generates or not self.reshard:
            return self._gathered(weights.whole)
        # a block and the next one, which is gathered meanwhile
        return self._gathered(weights.around) + 2 * self._gathered(weights.block)

    def gradients(self, weights: Weights, *, accumulates: bool) -> int:
        share = 0 if self.offload else weights.trained.size // self.group
        if accumulates:  # unreduced until the last micro-batch, in full precision
            return share + weights.trained.size
        learning = weights.trained.size / max(1, weights.whole.size)
        reduced = weights.block.size + self._gathered(weights.block)
        return share + round(learning * (self._gathered(weights.around) + reduced))

    def _moved(self, weights: Weights) -> int:
        return 0 if self.offload else weights.trained.size // self.group

    def _gathered(self, part: Part) -> int:
        return min(part.size, 2 * part.number) if self.low_precision else part.size


@dataclass(frozen=True, kw_only=True)
class Zero(Sharing):
    """DeepSpeed's ZeRO, `lrlhf.strategies.DeepSpeed`.

    Args:
        stage: 1 splits optimizer states, 2 gradients too, 3 weights too.
        offload_optimizer: Keep optimizer states, and weights in full precision, in main memory.
        offload_parameters: Keep the rank's part of the weights there too (stage 3).

    Reference:
        Rajbhandari et al. 2020, section 5, https://arxiv.org/abs/1910.02054
    """

    stage: int
    offload_optimizer: bool = False
    offload_parameters: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "splits", self.stage == 3)

    def parameters(self, weights: Weights) -> int:
        used = self._used(weights.whole)
        if self.stage == 3:
            used = 0 if self.offload_parameters else used // self.ranks
        return used + (0 if self.offload_optimizer else self._master(weights))

    def gathered(self, weights: Weights, *, generates: bool = False) -> int:
        if self.stage < 3:
            return 0
        whole = weights.whole
        if generates:
            return self._used(whole)
        live = min(1.0, _LIVE_PARAMETERS / max(1, whole.number))
        return round(self._used(whole) * live)

    def gradients(self, weights: Weights, *, accumulates: bool) -> int:
        del accumulates
        used = self._used(weights.trained)
        if self.stage == 1:
            return used
        bucket = min(1.0, _BUCKET / max(1, weights.trained.number))
        return used // self.ranks + round(used * bucket)

    def _moved(self, weights: Weights) -> int:
        return 0 if self.offload_optimizer else self._master(weights)

    def _master(self, weights: Weights) -> int:
        return 4 * weights.trained.number // self.ranks

    def _used(self, part: Part) -> int:
        return min(part.size, 2 * part.number) if self.low_precision else part.size


def sharing_of(trainer: Mapping[str, Any], ranks: int, *, on_gpu: bool) -> Sharing | None:
    """Read ``trainer.strategy``; None: it is unknown what that keeps where.

    Args:
        trainer: Options of the trainer.
        ranks: Processes of the run.
        on_gpu: Where they run.
    """
    name, options = _strategy(trainer.get("strategy", "auto"))
    low = "mixed" in str(trainer.get("precision"))
    common: dict[str, Any] = {"ranks": ranks, "low_precision": low, "on_gpu": on_gpu}
    if name in {"fsdp2", "fsdp2strategy"}:
        return FullySharded(
            **common,
            group=options.get("shard_group") or ranks,
            reshard=options.get("reshard_after_forward", True),
            offload=options.get("cpu_offload", False),
        )
    if name.startswith("deepspeed"):
        stage = int(name[-1]) if name[-1].isdigit() else options.get("stage", 2)
        offload_parameters = options.get("offload_parameters", False)
        return Zero(
            **common,
            stage=stage,
            offload_optimizer=options.get("offload_optimizer", False) or "offload" in name,
            offload_parameters=offload_parameters,
        )
    if name in {"auto", "singledevice", "singledevicestrategy"} or name.startswith("ddp"):
        view = options.get("gradient_as_bucket_view", False)
        wraps = ranks > 1 or name.startswith("ddp")
        return Whole(**common, buckets=wraps and not view)
    return None


def _strategy(entry: Any) -> tuple[str, Mapping[str, Any]]:
    """Name of a strategy in small letters, and its options."""
    if isinstance(entry, Mapping):
        return str(entry["class_path"]).rpartition(".")[2].lower(), entry.get("init_args") or {}
    return str(entry).lower(), {}
