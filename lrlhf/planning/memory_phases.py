"""The phases of a run, each at the moment when it needs most of a process's memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lrlhf.planning.config_entries import options_of
from lrlhf.planning.dry_run import DryRun
from lrlhf.planning.live_bytes import Usage
from lrlhf.planning.strategy_shares import (
    OptimizerNeeds,
    Shares,
    Strategy,
    Weights,
    optimizer_needs,
)

_ASSUMED_TOKENS = 512


class Dial(NamedTuple):
    """An option that the size of a phase grows with.

    Attributes:
        option: Its name.
        value: What it is now.
        unit: What it has to be a multiple of.
        hint: To be said with it.
        chunked: Logits are computed in chunks, so that they do not depend on it.
        more: Bytes that turning it down adds: gradients that are then accumulated.
    """

    option: str
    value: int
    unit: int
    hint: str = ""
    chunked: bool = False
    more: int = 0


class Phase(NamedTuple):
    """A line of the memory table.

    Attributes:
        name: What happens.
        usage: Bytes at the moment when most is used.
        dial: What makes it need less; None: nothing but another model or strategy.
    """

    name: str
    usage: Usage
    dial: Dial | None = None

    def turned_down(self, size: int) -> str | None:
        """Say at what value of the dial the phase would need ``size`` bytes; None: at none."""
        if self.dial is None:
            return None
        usage, dial = self.usage, self.dial
        growing = usage.activations + usage.cache + (0 if dial.chunked else usage.logits)
        share = (size - (usage.total - growing) - dial.more) / max(1, growing)
        # at another size the peak is at another moment, when a little more may be alive
        value = int(0.95 * dial.value * share) // dial.unit * dial.unit
        if value < dial.unit:
            return None
        return f"{dial.option}: {value}{dial.hint} (now {dial.value})"


@dataclass(kw_only=True)
class PhaseList:
    """Collects the phases of a run on one process.

    Args:
        dry_run: Measures passes.
        strategy: Of the trainer.
        on_gpu: Where the run will be.
        device_size: Bytes of a GPU; None: not known.
        resident: What stays in memory all the time.
        phases: The lines of the table.
        notes: What was assumed, and what is not counted.
        smaller: Options that make what stays in memory smaller.
    """

    dry_run: DryRun
    strategy: Strategy
    on_gpu: bool
    device_size: int | None
    resident: Usage = field(default=Usage())
    phases: list[Phase] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    smaller: list[str] = field(default_factory=list)

    def hold(self, weights: Weights, optimizer: Any = None, *, accumulates: bool = False) -> Shares:
        """Keep a model in memory from now on.

        Args:
            weights: Of the model.
            optimizer: Options of what moves those that learn; None: none does.
            accumulates: An optimizer step adds up the gradients of several micro-batches.
        """
        needs = (
            OptimizerNeeds()
            if optimizer is None
            else optimizer_needs(optimizer, on_gpu=self.on_gpu)
        )
        shares = self.strategy.shares(weights, needs, accumulates=accumulates)
        self.resident = self.resident.plus(shares.resident)
        return shares

    def add(self, name: str, *usages: Usage, dial: Dial | None = None) -> None:
        """Add a phase.

        Args:
            name: Of the phase.
            usages: What it needs beside what stays.
            dial: The option that this grows with.
        """
        self.phases.append(Phase(name, self.resident.plus(*usages), dial))

    def add_update(self, model: str, shares: Shares, usage: Usage, dial: Dial) -> None:
        """Add the phases of an optimizer step.

        Args:
            model: Its name.
            shares: Of the model.
            usage: Of a forward and backward pass, measured.
            dial: The option that ``usage`` grows with.
        """
        gradients = Usage(gradients=shares.gradients)
        gathered = Usage(parameters=shares.gathered)
        if usage.gradients:  # counted as they came up in the pass
            more = max(0, shares.gradients - usage.gradients)
            self.add(f"update {model}", usage, gathered, dial=dial._replace(more=more))
        else:
            self.add(f"update {model}", usage, gathered, gradients, dial=dial)
        self.add(f"optimizer step of {model}", gradients, Usage(optimizer=shares.step))

    def note(self, line: str) -> None:
        """Add a note, once."""
        if line not in self.notes:
            self.notes.append(line)

    def tokens_of(self, data: Any, option: str, what: str) -> int:
        """Return an option of the data module that limits lengths, or assume it, and say so."""
        given = options_of(data).get(option)
        if given is None:
            self.note(
                f"assumed: {what} of up to {_ASSUMED_TOKENS} tokens; data.{option} would say how "
                "long they are"
            )
        return _ASSUMED_TOKENS if given is None else int(given)

    def suggest(self, option: str, entry: Any) -> None:
        """Add what makes training a model need less, as far as it is not done already.

        Args:
            option: Name of the model's options.
            entry: What the config has there.
        """
        options, shards = options_of(entry), self.strategy.shards_weights
        advice = ["more GPUs" if shards else "trainer.strategy: fsdp2 over several GPUs"]
        if not options.get("gradient_checkpointing"):
            advice.append(f"{option}.gradient_checkpointing: true")
        if options.get("lora") is None:
            advice.append(f"{option}.lora: {{}}")
        elif options.get("dtype", "float32") == "float32":
            advice.append(f"{option}.dtype: bfloat16")
        self.smaller += [line for line in advice if line not in self.smaller]
