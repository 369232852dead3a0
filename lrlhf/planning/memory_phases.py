"""What is in a rank's memory in each phase of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from lrlhf.models import LoRA, PretrainedSpec
from lrlhf.planning.memory_ranks import OptimizerNeeds, Part, Sharing, Weights
from lrlhf.planning.memory_trace import Needed, Precision

SpecT = TypeVar("SpecT", bound=PretrainedSpec)


class Dial(NamedTuple):
    """An option that what a phase needs for its duration grows with.

    Attributes:
        option: Its name.
        value: What it is now.
        unit: What it has to be a multiple of.
        hint: To be said with it.
        chunked: Logits are computed in chunks, so that they do not depend on it.
        more: Bytes that turning it adds: gradients that are then added up.
    """

    option: str
    value: int
    unit: int
    hint: str = ""
    chunked: bool = False
    more: int = 0


class Phase(NamedTuple):
    """Bytes at the moment of a phase when most is used.

    Attributes:
        name: What happens.
        dial: What makes it need less; None: nothing but another model or strategy.
    """

    name: str
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    cache: int
    dial: Dial | None = None

    @property
    def resident(self) -> int:
        """What does not depend on the size of a batch."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """The sum."""
        return self.resident + self.activations + self.logits + self.cache

    def turned_down(self, size: int) -> str | None:
        """Say at what value of the dial the phase would need ``size`` bytes; None: at none."""
        if self.dial is None:
            return None
        growing = self.activations + self.cache + (0 if self.dial.chunked else self.logits)
        share = (size - (self.total - growing) - self.dial.more) / max(1, growing)
        # at another size the most is needed at another moment, when a little more is there besides
        value = int(0.95 * self.dial.value * share) // self.dial.unit * self.dial.unit
        if value < self.dial.unit:
            return None
        return f"{self.dial.option}: {value}{self.dial.hint} (now {self.dial.value})"


class Held(NamedTuple):
    """A model that stays in memory.

    Attributes:
        weights: Its weights.
        optimizer: What moves them; None: it is frozen.
        shared: Whether the strategy knows of it; else every rank has it whole.
    """

    weights: Weights
    optimizer: OptimizerNeeds | None = None
    shared: bool = True


@dataclass(frozen=True, kw_only=True)
class Memory:
    """One rank's device.

    Args:
        sharing: The strategy.
        precision: Of products.
        held: What stays in memory all the time.
        fixed: Further bytes that stay, such as those of an engine: parameters.
        fixed_cache: The same: keys and values.
    """

    sharing: Sharing
    precision: Precision
    held: tuple[Held, ...]
    fixed: int = 0
    fixed_cache: int = 0

    def phase(
        self,
        name: str,
        needed: Needed = Needed(),  # noqa: B008  immutable
        *,
        gathered: int = 0,
        gradients: int = 0,
        step: int = 0,
        dial: Dial | None = None,
    ) -> Phase:
        """Add what a phase needs to what is there anyway.

        Args:
            name: Of the phase.
            needed: By its pass.
            gathered: Weights that are whole for its duration.
            gradients: That exist when it needs most, beside those of ``needed``.
            step: What an optimizer needs for the duration of its step.
            dial: The option that ``needed`` grows with.
        """
        share, shared = self.sharing, [one for one in self.held if one.shared]
        own = [one for one in self.held if not one.shared]
        return Phase(
            name,
            parameters=sum(share.parameters(one.weights) for one in shared)
            + sum(one.weights.whole.size for one in own)
            + self.fixed
            + gathered
            + needed.weights,
            gradients=sum(share.resident_gradients(one.weights) for one in shared)
            + gradients
            + needed.gradients,
            optimizer=step
            + sum(
                share.states(one.weights, one.optimizer)
                for one in shared
                if one.optimizer is not None
            ),
            activations=needed.activations,
            logits=needed.logits,
            cache=self.fixed_cache + needed.cache,
            dial=dial,
        )

    def updates(
        self,
        what: str,
        model: Held,
        needed: Needed,
        *,
        accumulates: bool,
        dial: Dial,
    ) -> list[Phase]:
        """Return the phases of an optimizer step of one model: passes, then the step itself."""
        assert model.optimizer is not None
        share, weights = self.sharing, model.weights
        gradients = share.gradients(weights, accumulates=accumulates)
        counted = needed.gradients > 0  # they came up in the pass itself, as far as it got
        return [
            self.phase(
                f"update {what}",
                needed,
                gathered=share.gathered(weights),
                gradients=0 if counted else gradients,
                dial=dial._replace(more=max(0, gradients - needed.gradients) if counted else 0),
            ),
            self.phase(
                f"optimizer step of {what}",
                gradients=gradients,
                step=share.step(weights, model.optimizer),
            ),
        ]

    def pass_dtype(self) -> torch.dtype | None:
        """Precision that weights are in when a pass begins; None: that which they are kept in."""
        return self.precision.dtype if self.sharing.casts else None

    def with_fixed(self, *, parameters: int, cache: int) -> Memory:
        """Add bytes that stay."""
        return replace(self, fixed=self.fixed + parameters, fixed_cache=self.fixed_cache + cache)


@dataclass
class Notes:
    """What is to be read below the figures.

    Args:
        lines: What was assumed, and what is not counted.
        smaller: Options that make what stays in memory smaller.
    """

    lines: list[str] = field(default_factory=list)
    smaller: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        """Add a line, once."""
        if line not in self.lines:
            self.lines.append(line)

    def add_smaller(self, option: str, entry: Any, memory: Memory) -> None:
        """Add what makes training a model need less, as far as it is not done already.

        Args:
            option: Name of the model's options.
            entry: What the config has there.
            memory: Its device.
        """
        options = {} if entry is None or isinstance(entry, str) else options_of(entry)
        advice = []
        if memory.sharing.splits:
            advice.append("more GPUs")
        else:
            advice.append("trainer.strategy: fsdp2 over several GPUs")
        if not options.get("gradient_checkpointing"):
            advice.append(f"{option}.gradient_checkpointing: true")
        if options.get("lora") is None:
            advice.append(f"{option}.lora: {{}}")
        elif options.get("dtype", "float32") == "float32":
            advice.append(f"{option}.dtype: bfloat16")
        self.smaller += [line for line in advice if line not in self.smaller]


def options_of(entry: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Options of a class or a dataclass, however the config spells it."""
    if entry is None:
        return {}
    if "class_path" in entry:
        return entry.get("init_args") or {}
    return entry


def spec_of(entry: str | Mapping[str, Any], cls: type[SpecT], **defaults: Any) -> SpecT:
    """Build the description of a model that a config gives.

    Args:
        entry: A source, or options.
        cls: What describes such a model.
        defaults: Options that a plain source is used with.
    """
    if isinstance(entry, str):
        return cls(source=entry, **defaults)
    options = dict(options_of(entry))
    if options.get("lora") is not None:
        options["lora"] = LoRA(**options_of(options["lora"]))
    return cls(**options)


def frozen(weights: Weights) -> Weights:
    """The same weights, none of which learns."""
    return weights._replace(trained=Part(), frozen=weights.whole, largest=Part())


def head_weights(head: nn.Module) -> Weights:
    """Count the weights of a head that has no model around it."""
    number = sum(weight.numel() for weight in head.parameters())
    size = sum(weight.numel() * weight.itemsize for weight in head.parameters())
    part = Part(number, size)
    return Weights(trained=part, frozen=Part(), block=Part(), around=part, largest=part)
