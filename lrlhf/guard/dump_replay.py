"""Replays the step of a dump, and reports where it goes wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lrlhf.guard.anomalies import Anomaly, IterationSums, judge
from lrlhf.guard.dump import Dump, StepBundle, read_dump, read_state
from lrlhf.guard.step_guard import StepGuard
from lrlhf.models.sharding import load_state

_UNSPLIT = {"bf16-true": "bf16-mixed", "16-true": "16-mixed"}


class ReplayedStep(NamedTuple):
    """What a module reports of a step that it has replayed.

    Attributes:
        records: The rows in JSON types.
        sums: `[10]`, the `IterationSums` of an iteration, to be added up over the ranks and
            judged; None: an optimizer step, which the guard judges itself.
    """

    records: list[dict[str, Any]]
    sums: Tensor | None = None


@runtime_checkable
class Replayable(Protocol):
    """A module whose steps can be replayed."""

    step_guard: StepGuard

    @property
    def step_names(self) -> tuple[str, ...]:
        """Stages of the bundles that it knows."""

    def replay_step(self, bundle: StepBundle) -> ReplayedStep:
        """Replay the step of a bundle, with the code that took it.

        It is called inside of a training step of manual optimization, with the weights and the
        module's own state as the step found them.
        """


@dataclass
class RankReplay:
    """The replay of one process's part of a step.

    Attributes:
        rank: The process.
        found: What is wrong with it now.
        first_module: The first part of a model whose output is not finite, by name; empty: none.
        gradients: Parameters whose gradients are not finite, by name.
        rows: Of the batch, in JSON types.
        sums: See `ReplayedStep`.
    """

    rank: int
    anomalies: tuple[Anomaly, ...] = ()
    first_module: str = ""
    gradients: tuple[str, ...] = ()
    rows: Sequence[Mapping[str, Any]] = ()
    sums: Tensor | None = None


class DumpReplay(NamedTuple):
    """Result of replaying a dump.

    Attributes:
        dump: As it was written.
        weights: Weights of the dump that are not finite, by name.
        ranks: Of each process, one after the other.
        found: What is wrong now, all processes together.
        notes: How this run differs from the one that wrote it.
    """

    dump: Dump
    weights: tuple[str, ...]
    ranks: tuple[RankReplay, ...]
    anomalies: tuple[Anomaly, ...]
    notes: tuple[str, ...]

    @property
    def reproduced(self) -> bool:
        """Whether everything that was found then is found now."""
        return {anomaly.kind for anomaly in self.dump.anomalies} <= {
            each.kind for each in self.anomalies
        }


def replay_dump(module: L.LightningModule, folder: Path | str) -> DumpReplay:
    """Repeat the step of a dump in this process, with the code of training.

    The parts of several processes are taken one after the other.

    Args:
        module: Built as for the run, see `Replayable`; its weights become those of the dump.
        folder: The dump.

    Raises:
        NotADumpError: There is no dump, or it is damaged.
        CheckpointMismatchError: It is of another model.
        ValueError: It is of another kind of module.
    """
    dump = read_dump(Path(folder))
    names = module.step_names if isinstance(module, Replayable) else ()
    stage = dump.bundles[0].stage
    if stage not in names:
        has = f"has {', '.join(names)}" if names else "writes no dumps"
        raise ValueError(
            f"{dump.folder} is of a step {stage!r}, and {type(module).__name__} {has}: build the "
            "module as the run did"
        )
    takes = [_StepReplay(module, dump, rank) for rank in range(len(dump.bundles))]
    ranks = tuple(take.fit() for take in takes)
    sums = [rank.sums for rank in ranks if rank.sums is not None]
    anomalies = [anomaly for rank in ranks for anomaly in rank.anomalies]
    if sums:
        guard: StepGuard = module.step_guard  # type: ignore[assignment]
        total = IterationSums(*torch.stack(sums).sum(dim=0).tolist())
        anomalies += judge(total, guard.settings, guard.lengths)
    return DumpReplay(dump, takes[0].weights, ranks, tuple(anomalies), tuple(_notes(dump)))


def _notes(dump: Dump) -> Iterator[str]:
    if len(dump.bundles) > 1:
        yield (
            f"the run had {len(dump.bundles)} processes, whose parts were taken one after the "
            "other: losses and gradients are those of each part alone"
        )
    if dump.precision in _UNSPLIT:
        yield f"the run computed in {dump.precision}, this one in {_UNSPLIT[dump.precision]}"
    if dump.device == "cuda" and not torch.cuda.is_available():
        yield "the run computed on a GPU, this one on the CPU: roundings and dropout differ"


class _StepReplay(L.Callback):
    """One rank's part of a step, taken as the only step of a fit."""

    def __init__(self, module: L.LightningModule, dump: Dump, rank: int) -> None:
        self._module, self._dump = module, dump
        self._replay = RankReplay(rank)
        self._state: dict[str, Any] = {}
        self.weights: tuple[str, ...] = ()
        """Those of the dump that are not finite, by name."""

    def fit(self) -> RankReplay:
        """Take it, and say what came of it."""
        dump, module = self._dump, self._module
        assert isinstance(module, Replayable)
        self._state = read_state(dump.folder)
        load_state(module, self._state["state_dict"])
        named = module.named_parameters()
        self.weights = tuple(name for name, weight in named if not _is_finite(weight))
        trainer = L.Trainer(
            accelerator="cpu" if dump.device == "cpu" else "auto",
            devices=1,
            precision=_UNSPLIT.get(dump.precision, dump.precision),  # type: ignore[arg-type]
            max_epochs=1,
            max_steps=dump.step,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            callbacks=[self],
        )
        with module.step_guard.collecting() as anomalies, self._looking(), self._in_its_place():
            trainer.fit(module, range(1))  # the batch is the dump's
        rank = self._replay.rank
        self._replay.anomalies = tuple(anomaly._replace(rank=rank) for anomaly in anomalies)
        return self._replay

    @contextlib.contextmanager
    def _in_its_place(self) -> Iterator[None]:
        """Have the module's training step be the one of the dump."""
        module, automatic = self._module, self._module.automatic_optimization
        module.automatic_optimization = False
        module.training_step = self._take  # type: ignore[method-assign]
        try:
            yield
        finally:
            del module.training_step
            module.automatic_optimization = automatic

    def _take(self, *_: object) -> None:
        assert isinstance(self._module, Replayable)
        replay = self._replay
        replay.rows, sums = self._module.replay_step(self._dump.bundles[replay.rank])
        replay.sums = None if sums is None else sums.cpu()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.on_load_checkpoint(dict(self._state))
        progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        progress.total.ready = progress.total.completed = self._dump.step - 1

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        names = {id(weight): name for name, weight in pl_module.named_parameters()}
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        bad = (names[id(each)] for each in weights if not _is_finite(each.grad))
        self._replay.gradients += tuple(bad)

    @contextlib.contextmanager
    def _looking(self) -> Iterator[None]:
        """Look at the output of every part of the module inside."""
        named = [(name, part) for name, part in self._module.named_modules() if name]
        handles = [part.register_forward_hook(partial(self._look, name)) for name, part in named]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _look(self, name: str, part: nn.Module, inputs: Any, output: Any) -> None:
        del part, inputs
        # parts inside others answer first
        if not self._replay.first_module and not _is_finite(output):
            self._replay.first_module = name


def _is_finite(output: Any) -> bool:
    if isinstance(output, Tensor):
        return not output.is_floating_point() or bool(output.detach().isfinite().all())
    if isinstance(output, Mapping):
        return all(map(_is_finite, output.values()))
    return all(map(_is_finite, output)) if isinstance(output, list | tuple) else True
