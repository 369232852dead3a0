"""What one process keeps of weights, gradients and optimizer states, by strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from lrlhf.apps.plan.dry_run import Usage
from lrlhf.models.scorers import blocks_of
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.run.gradient_updates import reduces_each

_FOUR_BIT = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes per weight in nf4 with double quantisation: a scale of 8 bits per 64 weights, and one of
32 bits per 256 of those (Dettmers et al. 2023, section 3, https://arxiv.org/abs/2305.14314)."""

_LIVE_PARAMETERS = 1_000_000_000
"""``stage3_max_live_parameters`` of DeepSpeed: how many weights ZeRO-3 keeps whole at a time."""

_BUCKET = 500_000_000
"""``reduce_bucket_size`` of DeepSpeed: gradients that are reduced together."""


class WeightCount(NamedTuple):
    """Some weights: how many, and their bytes as they are kept."""

    number: int = 0
    size: int = 0

    def plus(self, *others: WeightCount) -> WeightCount:
        return WeightCount(*map(sum, zip(self, *others, strict=True)))


class Weights(NamedTuple):
    """The weights of one model.

    Attributes:
        trained: Those that learn.
        frozen: The others, buffers included.
        block: The largest of the repeated blocks.
        around: What is not in a block: embeddings, norms, heads.
    """

    trained: WeightCount
    frozen: WeightCount
    block: WeightCount
    around: WeightCount

    @property
    def total(self) -> WeightCount:
        return self.trained.plus(self.frozen)


def weights_of(
    model: nn.Module, plain: PreTrainedModel | None = None, *, quantization: str | None = None
) -> Weights:
    """Count a model's weights; ``quantization`` is of the frozen linear layers in ``plain``."""
    quantised: set[int] = set()
    if quantization and plain is not None:
        head = plain.get_output_embeddings()  # type: ignore[no-untyped-call]
        layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
        quantised = {id(part.weight) for part in layers if part is not head}

    def part(tensor: torch.Tensor) -> WeightCount:
        packed = id(tensor) in quantised and not tensor.requires_grad
        per_weight = {"4bit": _FOUR_BIT, "8bit": 1.0}[quantization or "8bit"]
        each = per_weight if packed else tensor.itemsize
        return WeightCount(tensor.numel(), round(tensor.numel() * each))

    tensors = [*model.parameters(), *model.buffers()]
    trained = [part(tensor) for tensor in tensors if tensor.requires_grad]
    frozen = WeightCount().plus(*(part(tensor) for tensor in tensors if not tensor.requires_grad))
    repeated = nn.ModuleList() if plain is None else blocks_of(plain)
    blocks = [WeightCount().plus(*map(part, block.parameters())) for block in repeated]
    total, inside = frozen.plus(*trained), WeightCount().plus(*blocks)
    around = WeightCount(total.number - inside.number, total.size - inside.size)
    block = max(blocks, key=lambda item: item.size, default=WeightCount())
    return Weights(WeightCount().plus(*trained), frozen, block, around)


class OptimizerNeeds(NamedTuple):
    """What an optimizer keeps, and what it needs for a step, in multiples of its weights' bytes."""

    states: float = 0.0
    step: float = 0.0


def optimizer_needs(options: Mapping[str, Any], *, on_gpu: bool) -> OptimizerNeeds:
    """Find out what an optimizer keeps, by letting it take a step on one small weight.

    On GPUs PyTorch's optimizers work on all weights at once, and hold a copy of all meanwhile,
    unless they are fused; on CPUs they work on one after another.
    """
    weight = nn.Parameter(torch.zeros(64, 64))
    built = OptimizerConfig(**options).build([("weight", weight)], total_steps=1).optimizer
    weight.grad = torch.zeros_like(weight)
    built.step()
    state_bytes = sum(
        value.nbytes
        for value in built.state[weight].values()
        if isinstance(value, torch.Tensor) and value.dim() > 0
    )
    copies = on_gpu and not built.param_groups[0].get("fused")
    return OptimizerNeeds(state_bytes / weight.nbytes, step=float(copies))


class Shares(NamedTuple):
    """Bytes of one model on one process.

    Attributes:
        resident: What stays.
        gathered: Weights that are whole for the duration of a forward or backward pass.
        gathered_to_generate: The same while responses are generated.
        gradients: During an update, beside the resident ones.
        step: What the optimizer needs for the duration of its step.
    """

    resident: Usage
    gathered: int = 0
    gathered_to_generate: int = 0
    gradients: int = 0
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How the processes of a run share models.

    Args:
        kind: ``replicated`` (one process, or DistributedDataParallel), `lrlhf.strategies.FSDP2`,
            or DeepSpeed's ZeRO.
        ranks: Processes that share one copy.
        low_precision: The precision is mixed: products are computed in 16 bits.
        buckets: DistributedDataParallel keeps flat copies of all gradients to send them.
        stage: Of ZeRO: 1 splits optimizer states, 2 gradients too, 3 weights too.
        reshards: A block's weights are freed after its forward pass.
        offloads_weights: They are kept in main memory.
        offloads_optimizer: Its states, and weights in full precision, are kept there.
        reduces: Gradients are added up over the ranks with each micro-batch; see
            `lrlhf.run.gradient_updates.reduces_each`.
        device_size: Bytes of memory of each device; None: not known.

    Reference:
        Rajbhandari et al. 2020, section 5, https://arxiv.org/abs/1910.02054
    """

    kind: Literal["replicated", "fsdp2", "zero"] = "replicated"
    ranks: int = 1
    low_precision: bool = False
    buckets: bool = False
    stage: int = 0
    reshards: bool = True
    offloads_weights: bool = False
    offloads_optimizer: bool = False
    reduces: Literal["auto"] | bool = "auto"
    device_size: int | None = None

    def reduces_each(self, weights: Weights) -> bool:
        """Tell whether `lrlhf.strategies.FSDP2` keeps only its part between micro-batches."""
        known = self.kind == "fsdp2"
        return known and reduces_each(self.reduces, weights.trained.size, self.device_size)

    def shares(self, weights: Weights, optimizer: OptimizerNeeds, *, accumulates: bool) -> Shares:
        """Work out what one process has of a model; arguments as of `PhaseList.hold`."""
        match self.kind:
            case "replicated":
                shares = Shares(Usage(weights.total.size), gradients=weights.trained.size)
                if self.buckets:
                    resident = shares.resident._replace(gradients=weights.trained.size)
                    shares = shares._replace(resident=resident)
                moved = weights.trained.size
            case "fsdp2":
                shares = self._fsdp2(weights, accumulates=accumulates)
                moved = 0 if self.offloads_weights else weights.trained.size // self.ranks
            case "zero":
                master = 4 * weights.trained.number // self.ranks
                moved = 0 if self.offloads_optimizer else master
                shares = self._zero(weights, moved)
        resident = shares.resident._replace(optimizer=round(moved * optimizer.states))
        return shares._replace(resident=resident, step=round(moved * optimizer.step))

    def _fsdp2(self, weights: Weights, *, accumulates: bool) -> Shares:
        total, trained = weights.total, weights.trained
        around, block = self._used(weights.around), self._used(weights.block)
        gradients = 0 if self.offloads_weights else trained.size // self.ranks
        waits = accumulates and not self.reduces_each(weights)
        if waits:  # unreduced until the last micro-batch, in full precision
            gradients += trained.size
        else:
            learning = trained.size / max(1, total.size)
            gradients += round(learning * (around + block + weights.block.size))
        return Shares(
            Usage(0 if self.offloads_weights else total.size // self.ranks),
            # a block, and the next one, which is gathered meanwhile
            gathered=around + 2 * block if self.reshards else self._used(total),
            gathered_to_generate=self._used(total),
            gradients=gradients,
        )

    def _zero(self, weights: Weights, master: int) -> Shares:
        used, trained = self._used(weights.total), self._used(weights.trained)
        resident = used // self.ranks if self.stage == 3 else used
        if self.stage == 3 and self.offloads_weights:
            resident = 0
        live = min(1.0, _LIVE_PARAMETERS / max(1, weights.total.number))
        bucket = min(1.0, _BUCKET / max(1, weights.trained.number))
        return Shares(
            Usage(resident + master),
            gathered=round(used * live) if self.stage == 3 else 0,
            gathered_to_generate=used if self.stage == 3 else 0,
            gradients=trained
            if self.stage == 1
            else trained // self.ranks + round(trained * bucket),
        )

    def _used(self, part: WeightCount) -> int:
        """Bytes of weights in the precision that products are computed in."""
        return min(part.size, 2 * part.number) if self.low_precision else part.size


def strategy_of(
    trainer: Mapping[str, Any], ranks: int, device_size: int | None = None
) -> Strategy | None:
    """Read ``trainer.strategy`` for so many processes; None: it is unknown what it keeps where.

    ``device_size`` is the memory of each device in bytes, if it is known.
    """
    entry = trainer.get("strategy", "auto")
    options = entry.get("init_args") or {} if isinstance(entry, Mapping) else {}
    name = str(entry["class_path"] if isinstance(entry, Mapping) else entry).rpartition(".")[2]
    name, low = name.lower(), "mixed" in str(trainer.get("precision"))
    if name in {"fsdp2", "fsdp2strategy"}:
        return Strategy(
            kind="fsdp2",
            ranks=options.get("shard_group") or ranks,
            low_precision=low,
            reshards=options.get("reshard_after_forward", True),
            offloads_weights=options.get("cpu_offload", False),
            reduces=options.get("reduce_each_micro_batch", "auto"),
            device_size=device_size,
        )
    if name.startswith("deepspeed"):
        return Strategy(
            kind="zero",
            ranks=ranks,
            low_precision=low,
            stage=int(name[-1]) if name[-1].isdigit() else options.get("stage", 2),
            offloads_weights=options.get("offload_parameters", False),
            offloads_optimizer=options.get("offload_optimizer", False) or "offload" in name,
        )
    if name in {"auto", "singledevice", "singledevicestrategy"} or name.startswith("ddp"):
        wraps = ranks > 1 or name.startswith("ddp")
        return Strategy(buckets=wraps and not options.get("gradient_as_bucket_view", False))
    return None
