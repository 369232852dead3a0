"""The frame of one training step: its sizes, ranks, seeds, phases and metrics."""

from __future__ import annotations

import contextlib
import io
import math
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import lightning as L
import torch
from jaxtyping import Int
from peft import PeftModel
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedModel

from lrlhf.models.flops import peak_flops, training_flops
from lrlhf.models.heads import plain_model
from lrlhf.models.token_budget import GIB, PEAK_MEMORY, peak_memory
from lrlhf.modules.base import SteppedOptimizer, TrainingModule
from lrlhf.modules.metrics.metric_sums import MetricSums
from lrlhf.rollout import RolloutListener
from lrlhf.rollout.minibatches import MicroBatch
from lrlhf.run import Collectives, seed_everything_for
from lrlhf.types import Experience


class Quantity(NamedTuple):
    """A line of a table: what is counted, how many, and where the number comes from.

    Attributes:
        what: The unit.
        number: None: not known.
        origin: The option, or how it follows from other numbers.
    """

    what: str
    number: int | None
    origin: str


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The sizes of one iteration, as `plan_batches` has checked them.

    Args:
        prompts_per_rank: Prompts that each process samples responses to.
        num_generations: Responses per prompt.
        world_size: Number of processes.
        minibatch_size: Responses of all processes per optimizer step.
        num_iterations: Epochs over the responses.
        kept_prompts: Prompts of each process whose responses are trained on.
        extra_samples: What the algorithm samples for each prompt besides the responses.
    """

    prompts_per_rank: int
    num_generations: int
    world_size: int
    minibatch_size: int
    num_iterations: int
    kept_prompts: int
    extra_samples: tuple[str, ...] = ()

    @property
    def prompts(self) -> int:
        return self.prompts_per_rank * self.world_size

    @property
    def responses_sampled(self) -> int:
        """Responses of all processes that are sampled at most, extra samples included."""
        return self.prompts * (self.num_generations + len(self.extra_samples))

    @property
    def responses_per_rank(self) -> int:
        """Responses that each process trains on."""
        return self.kept_prompts * self.num_generations

    @property
    def responses_trained(self) -> int:
        """Responses of all processes that are trained on."""
        return self.responses_per_rank * self.world_size

    @property
    def minibatch_rows(self) -> int:
        """Responses of each process per optimizer step."""
        return self.minibatch_size // self.world_size

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps of all epochs over the responses."""
        return self.num_iterations * (self.responses_trained // self.minibatch_size)

    def table(self) -> str:
        """Write one line per number, with its unit and where it comes from."""
        drops = self.kept_prompts < self.prompts_per_rank
        option = "dynamic_sampling.prompts" if drops else "data.batch_size"
        processes = f"{self.world_size} process{'' if self.world_size == 1 else 'es'}"
        extra = "".join(f" + 1 {name}" for name in self.extra_samples)
        each = f"(num_generations{extra})" if extra else "num_generations"
        trained = f"{option} × num_generations × {processes}"
        quantities = [
            Quantity("prompts", self.prompts, f"data.batch_size × {processes}"),
            Quantity("responses per prompt", self.num_generations, "num_generations"),
            Quantity("responses sampled, at most", self.responses_sampled, f"prompts × {each}"),
            Quantity("responses trained on", self.responses_trained, trained),
            Quantity(
                "responses per optimizer step",
                self.minibatch_size,
                f"update.minibatch_size, {self.minibatch_rows} on each process",
            ),
            Quantity(
                "optimizer steps",
                self.steps_per_iteration,
                "update.num_iterations × responses trained on / responses per optimizer step",
            ),
            Quantity(
                "off-policy optimizer steps",
                self.steps_per_iteration - 1,
                "all but the first: the weights have moved since the responses were sampled",
            ),
        ]
        return table_of("one iteration", quantities)


def plan_batches(  # noqa: PLR0913  the numbers of an iteration
    *,
    prompts_per_rank: int,
    num_generations: int,
    world_size: int,
    minibatch_size: int | None,
    num_iterations: int,
    num_minibatches: int | None = None,
    default_minibatches: int = 1,
    kept_prompts: int | None = None,
    extra_samples: Iterable[str] = (),
) -> BatchPlan:
    """Work out the sizes of one iteration.

    Args:
        prompts_per_rank: Prompts that each process samples responses to, ``data.batch_size``.
        num_generations: Responses per prompt.
        world_size: Number of processes.
        minibatch_size: Responses of all processes per optimizer step; None: as ``num_minibatches``
            has it.
        num_iterations: Epochs over the responses.
        num_minibatches: Optimizer steps per epoch; None: ``default_minibatches``, or as many below
            that as divide a process's responses.
        default_minibatches: What the module takes unless told.
        kept_prompts: Prompts of each process whose responses are trained on, where dynamic
            sampling drops the others; None: all.
        extra_samples: What the algorithm samples for each prompt besides the responses.

    Raises:
        ValueError: The sizes do not fit; names the option and the nearest sizes that would.
    """
    _refuse_below_one("data.batch_size", prompts_per_rank)
    _refuse_below_one("num_generations", num_generations)
    _refuse_below_one("update.num_iterations", num_iterations)
    _refuse_below_one("the number of processes", world_size)
    prompts = prompts_per_rank if kept_prompts is None else kept_prompts
    _refuse_below_one("dynamic_sampling.prompts", prompts)
    if prompts > prompts_per_rank:
        raise ValueError(
            f"dynamic_sampling.prompts is {prompts}, but there are only {prompts_per_rank} prompts "
            f"per process (data.batch_size); the nearest number is {prompts_per_rank}"
        )
    rows = prompts * num_generations
    if minibatch_size is None:
        steps = num_minibatches or largest_divisor(rows, default_minibatches)
        _check_num_minibatches(steps, rows)
        minibatch_size = rows // steps * world_size
    _check_minibatch_size(minibatch_size, rows, world_size)
    return BatchPlan(
        prompts_per_rank=prompts_per_rank,
        num_generations=num_generations,
        world_size=world_size,
        minibatch_size=minibatch_size,
        num_iterations=num_iterations,
        kept_prompts=prompts,
        extra_samples=tuple(extra_samples),
    )


def table_of(title: str, quantities: Sequence[Quantity]) -> str:
    """Render quantities as a table of plain text.

    Args:
        title: Heading of the first column.
        quantities: The lines. On a terminal that is too narrow for them, their origins go on below.
    """
    table = Table(box=box.MARKDOWN)
    table.add_column(title, no_wrap=True)
    table.add_column("number", justify="right", no_wrap=True)
    table.add_column("from", overflow="fold", min_width=16)
    for what, number, origin in quantities:
        shown = "unknown" if number is None else str(number)
        table.add_row(Text(what), Text(shown), Text(origin))
    return plain_text(table, narrow=sys.stdout.isatty())


def plain_text(table: Table, *, narrow: bool = False) -> str:
    """Render a table without colours, each row on one line, or as ``narrow`` as the terminal."""
    buffer = io.StringIO()
    # wider than any line: a table that wraps cannot be searched
    console = Console(file=buffer, width=4096, color_system=None, force_jupyter=False)
    if narrow:
        least = console.measure(table).minimum
        console.width = max(least, shutil.get_terminal_size().columns)
    console.print(table)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines() if line.strip())


def _check_num_minibatches(steps: int, rows: int) -> None:
    if rows % steps == 0:
        return
    fitting = [parts for parts in range(1, rows + 1) if rows % parts == 0]
    nearest = min(fitting, key=lambda parts: abs(parts - steps))
    raise ValueError(
        f"update.num_minibatches is {steps}, but each process has {rows} responses, which do not "
        f"split into {steps} equal parts; the nearest number that fits is {nearest}"
    )


def _refuse_below_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be 1 or more")


def _check_minibatch_size(size: int, rows_per_rank: int, world_size: int) -> None:
    """Check that the responses split into equal steps, and each step into equal ranks."""
    _refuse_below_one("update.minibatch_size", size)
    fitting = [
        rows * world_size for rows in range(1, rows_per_rank + 1) if rows_per_rank % rows == 0
    ]
    if size in fitting:
        return
    below = [candidate for candidate in fitting if candidate < size][-1:]
    above = [candidate for candidate in fitting if candidate > size][:1]
    nearest = [str(candidate) for candidate in (*below, *above)]
    sizes = f"sizes that fit are {' and '.join(nearest)}"
    raise ValueError(
        f"update.minibatch_size is {size}, but an iteration has {rows_per_rank * world_size} "
        f"responses, {rows_per_rank} on each of {world_size} process(es); the nearest "
        f"{sizes if len(nearest) > 1 else f'size that fits is {nearest[0]}'}"
    )


class UpdateCosts:
    """Tokens and floating-point operations of optimizer steps.

    Neither padding nor what is recomputed counts, and a shared prefix counts once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tokens, self._flops = 0, 0.0

    def count(
        self,
        models: Sequence[PreTrainedModel | PeftModel],
        lengths: Int[Tensor, " B"],
        micro_batches: Sequence[MicroBatch],
    ) -> None:
        """Add an optimizer step, or a part of it.

        Args:
            models: What the rows go through.
            lengths: Tokens of each row.
            micro_batches: Which rows go together.
        """
        computed = [min(one.computed, one.tokens) for one in micro_batches]
        self._tokens += sum(computed)
        if peak_flops(self._device) is None:
            return
        squares = lengths.double().square()
        pairs = sum(
            float(squares[one.rows].sum()) * count / max(1, one.tokens)
            for one, count in zip(micro_batches, computed, strict=True)
        )
        for model in {id(plain_model(model)): model for model in models}.values():
            self._flops += training_flops(model, sum(computed), pairs)

    def report(self, metrics: MetricSums, seconds: float, world_size: int) -> None:
        """Add the speed of this rank, and its utilisation where the peak of its GPU is known."""
        if self._tokens and seconds:
            speed = self._tokens / seconds
            metrics.add("perf/update_tokens_per_s", speed, 1 / world_size)
        peak = peak_flops(self._device)
        if peak is not None and seconds and math.isfinite(self._flops):
            metrics.add("perf/mfu", self._flops / seconds / peak, 1.0)


_BEFORE_UPDATE = 1
"""Place of the pass without gradients among the seeds of an iteration; optimizer steps follow. Not
0, which NumPy's seeds do not tell from nothing."""


class Iteration:
    """One training step of a policy, or one batch of an evaluation.

    Args:
        module: Takes the step; its trainer has the callbacks that listen.
        seeds: Of a step that is replayed, see `TrainingModule.seed_step`; None: of this one.
    """

    def __init__(self, module: TrainingModule, *, seeds: tuple[int, ...] | None = None) -> None:
        self.module = module
        self.trainer: L.Trainer = module.trainer
        self.device: torch.device = module.device
        self.step: int = module.global_step
        """Iterations before this one, of which its seeds are made."""
        self.ranks = Collectives(module.trainer)
        self.metrics = MetricSums()
        self.kl_coef = self.entropy_coef = 0.0
        """Strength of the KL penalty, and of the entropy bonus."""
        self.exact = True
        """Whether the engine's log-probabilities are the policy's own."""
        self.value_unit = 1.0
        """Standard deviation of the scores so far, as values are measured in it."""
        self.records: list[dict[str, Any]] = []
        """A readable line for each response."""
        self.seeds: tuple[int, ...] = ()
        """What the random number generators were seeded with last."""
        self._replayed_seeds = seeds
        self.optimizer_steps = 0 if seeds is None else max(0, seeds[-1] - _BEFORE_UPDATE - 1)
        """How many were begun so far, of whichever optimizer."""
        self._seconds: dict[str, float] = {}
        self._began = time.perf_counter()
        self.costs = UpdateCosts(self.device)
        """Of its optimizer steps."""

    @property
    def number(self) -> int:
        """What a training step is called, see `lrlhf.run.seeding.running_step`."""
        return self.step + 1

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name and time what happens inside."""
        for listener in self._listeners():
            listener.on_phase(name)
        start = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
        for listener in self._listeners():
            listener.on_phase("")

    def seed_before_update(self) -> None:
        """Seed the pass without gradients."""
        self._seed(_BEFORE_UPDATE)

    def seed_optimizer_step(self) -> tuple[int, ...]:
        """Count and seed an optimizer step; returns what it was seeded with."""
        self.optimizer_steps += 1
        return self._seed(_BEFORE_UPDATE + self.optimizer_steps)

    def _seed(self, index: int) -> tuple[int, ...]:
        if self._replayed_seeds is None:
            self.seeds = self.module.seed_step(index)
        else:
            self.seeds = self._replayed_seeds
            seed_everything_for(*self.seeds)
        return self.seeds

    def freezes(self, optimizer: SteppedOptimizer) -> bool:
        """Tell whether the model of an optimizer is still frozen."""
        return self.step < optimizer.freeze_steps

    def request_weights(self) -> None:
        """Have the listeners bring the engine its weights."""
        with self.phase("sync"):
            for listener in self._listeners():
                listener.on_weights_needed(self.trainer, self.module)

    def show_rollout(self, experience: Experience) -> None:
        """Show the listeners what is about to be trained on."""
        first = experience.response_mask.long().argmax(dim=1)
        advantages = experience.advantages.gather(1, first[:, None])[:, 0].tolist()
        for record, advantage in zip(self.records, advantages, strict=True):
            record["advantage"] = advantage
        for listener in self._listeners():
            listener.on_rollout(self.trainer, self.module, experience, self.records)

    def measure_costs(self, tokens: float, generated: float = 0.0) -> None:
        """Report seconds by phase, memory, and the speed of this rank.

        Args:
            tokens: Of the rows, prompts included.
            generated: Of the responses.
        """
        self.metrics.maximum(PEAK_MEMORY, peak_memory(self.device) / GIB)
        for phase, seconds in self._seconds.items():
            self.metrics.maximum(f"perf/{phase}_s", seconds)
        update = self._seconds.get("update", 0.0)
        for name, count, seconds in (
            ("tokens_per_s", tokens, sum(self._seconds.values())),
            ("generate_tokens_per_s", generated, self._seconds.get("generate", 0.0)),
        ):
            if count and seconds:
                self.metrics.add(f"perf/{name}", count / seconds, 1 / self.ranks.world_size)
        self.costs.report(self.metrics, update, self.ranks.world_size)
        if "generate" in self._seconds:
            busy = update + self._seconds.get("logprob", 0.0)
            idle = 1 - busy / (time.perf_counter() - self._began)
            self.metrics.add("perf/idle_share", idle, 1.0)

    def _listeners(self) -> list[RolloutListener]:
        callbacks: list[L.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        return [callback for callback in callbacks if isinstance(callback, RolloutListener)]


def largest_divisor(rows: int, at_most: int) -> int:
    """Return the largest number of equal parts, up to a limit, that ``rows`` can be cut into."""
    return max(parts for parts in range(1, at_most + 1) if rows % parts == 0)
