"""The phases of a run, each at the moment when it needs most of a process's memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from lrlhf.models import PretrainedSpec
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


class Phase(NamedTuple):
    """A line of the memory table.

    Attributes:
        name: What happens.
        usage: Bytes at the moment when most is used.
        option: What it grows with, and its value; None: the model and the strategy alone.
    """

    name: str
    usage: Usage
    option: str | None = None


@dataclass(kw_only=True)
class PhaseList:
    """Collects the phases of a run on one process.

    Args:
        dry_run: Counts what passes allocate.
        strategy: Of the trainer.
        on_gpu: Where the run will be.
        device_size: Bytes of a GPU; None: not known.
        resident: What stays in memory all the time.
        phases: The lines of the table.
        notes: What was assumed, and what is not counted.
        recomputes: Activations of what is trained first are computed again.
    """

    dry_run: DryRun
    strategy: Strategy
    on_gpu: bool
    device_size: int | None
    resident: Usage = field(default=Usage())
    phases: list[Phase] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    recomputes: bool = False

    def hold(self, weights: Weights, optimizer: Any = None, *, accumulates: bool = False) -> Shares:
        """Keep a model in memory from now on, and its ``optimizer``, where its options are given.

        It ``accumulates`` where a step adds up the gradients of several micro-batches.
        """
        needs = OptimizerNeeds()
        if optimizer is not None:
            needs = optimizer_needs(optimizer, on_gpu=self.on_gpu)
        shares = self.strategy.shares(weights, needs, accumulates=accumulates)
        if accumulates and self.strategy.kind == "fsdp2":
            self._note_reduction(weights)
        self.resident = self.resident.plus(shares.resident)
        return shares

    def _note_reduction(self, weights: Weights) -> None:
        at_once = self.strategy.reduces_each(weights)
        when = "with each micro-batch" if at_once else "once a step"
        size = weights.trained.size / 2**30
        unknown = self.strategy.reduces == "auto" and self.device_size is None
        assumed = ", on devices of unknown size (--gpu-memory)" if unknown and self.on_gpu else ""
        self.note(f"fsdp2 reduces gradients of {size:.3g} GiB, if whole, {when}{assumed}")

    def add(self, name: str, *usages: Usage, option: str | None = None) -> None:
        """Add a phase that needs ``usages`` beside what stays, see `Phase`."""
        self.phases.append(Phase(name, self.resident.plus(*usages), option))

    def add_update(self, model: str, shares: Shares, usage: Usage, option: str) -> None:
        """Add the phases of an optimizer step, of whose passes ``usage`` is known."""
        gradients = Usage(gradients=shares.gradients)
        # those that come up in the pass are counted by it
        beside = gradients if not usage.gradients else Usage()
        self.add(f"update {model}", usage, Usage(shares.gathered), beside, option=option)
        self.add(f"optimizer step of {model}", gradients, Usage(optimizer=shares.step))

    def note(self, line: str) -> None:
        """Add a note, once."""
        if line not in self.notes:
            self.notes.append(line)

    def note_recomputing(self, spec: PretrainedSpec, plain: PreTrainedModel) -> None:
        """See whether a model that is trained recomputes its activations, and say who chose it."""
        self.recomputes = plain.is_gradient_checkpointing
        if self.recomputes and spec.gradient_checkpointing == "auto":
            self.note("gradient_checkpointing is auto: on, for a model of this size on a GPU")

    def tokens_of(self, data: Any, option: str, what: str) -> int:
        """Return an option of the data module that limits lengths, or assume it, and say so."""
        given = options_of(data).get(option)
        if given is None:
            self.note(
                f"assumed: {what} of up to {_ASSUMED_TOKENS} tokens; data.{option} would say how "
                "long they are"
            )
        return _ASSUMED_TOKENS if given is None else int(given)
