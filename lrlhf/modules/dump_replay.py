"""Takes the step of a dump again, and says where it goes wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lrlhf.guard.anomalies import Anomaly, IterationSums, judge, measure
from lrlhf.guard.dump import Dump, StepInputs, read_dump, read_state
from lrlhf.guard.random_state import restore_random_state
from lrlhf.models.sharding import load_state
from lrlhf.modules.pairs.pair_steps import STAGE as REWARD
from lrlhf.modules.policy.policy_guard import ITERATION, describe_rows
from lrlhf.modules.policy.policy_module import PolicyModule
from lrlhf.modules.reward_model import RewardModel
from lrlhf.run.checkpoints.optimizer_states import load_optimizer_state
from lrlhf.types import Experience, PreferenceBatch

_NO_BATCH = torch.zeros(1)
_UNSPLIT = {"bf16-true": "bf16-mixed", "16-true": "16-mixed"}


class RankReplay(NamedTuple):
    """What one process's part of a step came to, taken again.

    Attributes:
        rank: The process.
        found: What is wrong with it now.
        first_module: The first part of a model whose output is not finite, by name; empty: none.
        gradients: Parameters whose gradients are not finite, by name.
        rows: Of the batch, in JSON types.
    """

    rank: int
    found: tuple[Anomaly, ...]
    first_module: str
    gradients: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...]


class DumpReplay(NamedTuple):
    """What came of a dump.

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
    found: tuple[Anomaly, ...]
    notes: tuple[str, ...]

    @property
    def reproduced(self) -> bool:
        """Whether everything that was found then is found now."""
        return {one.kind for one in self.dump.anomalies} <= {one.kind for one in self.found}


def replay_dump(module: PolicyModule | RewardModel, folder: Path | str) -> DumpReplay:
    """Take the step of a dump again, in this process, with the code that took it.

    The parts of several processes are taken one after the other.

    Args:
        module: Built as for the run; its weights and optimizer states become those of the dump.
        folder: The dump.

    Raises:
        NotADumpError: There is no dump, or it is damaged.
        CheckpointMismatchError: It is of another model.
        ValueError: It is of another kind of module.
    """
    dump = read_dump(Path(folder))
    _check_fits(module, dump)
    ranks, sums = [], []
    weights: tuple[str, ...] = ()
    for rank, inputs in enumerate(dump.ranks):
        state = read_state(dump.folder)  # anew: optimizers go on working in what they are given
        load_state(module, state["state_dict"])
        if rank == 0:
            weights = _not_finite(module)
        run = _Run(module, dump, inputs, state)
        run.fit()
        ranks.append(run.result(rank))
        if run.sums is not None:
            sums.append(run.sums)
    found = [one for result in ranks for one in result.found]
    if sums:
        found += _judged(module, sums)
    return DumpReplay(dump, weights, tuple(ranks), tuple(found), tuple(_notes(dump)))


def _check_fits(module: PolicyModule | RewardModel, dump: Dump) -> None:
    stage = dump.ranks[0].stage
    known = [REWARD] if isinstance(module, RewardModel) else [ITERATION, *module.step_names]
    if stage not in known:
        raise ValueError(
            f"{dump.folder} is of a step {stage!r}, and {type(module).__name__} has "
            f"{', '.join(known)}: build the module as the run did"
        )


def _judged(module: L.LightningModule, sums: Sequence[Tensor]) -> list[Anomaly]:
    assert isinstance(module, PolicyModule)
    guard = module.step_guard
    total = IterationSums(*torch.stack([part.cpu() for part in sums]).sum(dim=0).tolist())
    return judge(total, guard.settings, guard.lengths)


def _not_finite(module: nn.Module) -> tuple[str, ...]:
    return tuple(
        name for name, weight in module.named_parameters() if not bool(weight.isfinite().all())
    )


def _notes(dump: Dump) -> Iterator[str]:
    if dump.world_size > 1:
        yield (
            f"the run had {dump.world_size} processes, whose parts were taken one after the other: "
            "losses and gradients are those of each part alone"
        )
    precision = dump.trainer["precision"]
    if precision in _UNSPLIT:
        yield f"the run computed in {precision}, this one in {_UNSPLIT[precision]}"
    if dump.trainer["device"] == "cuda" and not torch.cuda.is_available():
        yield "the run computed on a GPU, this one on the CPU: roundings and dropout differ"


class _Run:
    """One rank's part of a step, as a run of one training step."""

    def __init__(
        self,
        module: PolicyModule | RewardModel,
        dump: Dump,
        inputs: StepInputs,
        state: Mapping[str, Any],
    ) -> None:
        self._module = module
        self._dump = dump
        self._inputs = inputs
        self._found: list[Anomaly] = []
        self._probe = _Probe(module, dump.step, state)
        self._rows: list[dict[str, Any]] = []
        self.sums: Tensor | None = None
        """Of an iteration, to be added up over the ranks."""

    def result(self, rank: int) -> RankReplay:
        found = tuple(one._replace(rank=rank) for one in self._found)
        probe = self._probe
        return RankReplay(rank, found, probe.first, tuple(probe.gradients), tuple(self._rows))

    def fit(self) -> None:
        module = self._module
        rewards = isinstance(module, RewardModel)
        given = self._dump.trainer
        trainer = L.Trainer(
            accelerator="cpu" if given["device"] == "cpu" else "auto",
            devices=1,
            precision=_UNSPLIT.get(given["precision"], given["precision"]),
            gradient_clip_val=given["gradient_clip_val"],
            gradient_clip_algorithm=given["gradient_clip_algorithm"],
            accumulate_grad_batches=given["accumulate_grad_batches"],
            max_epochs=1,
            max_steps=self._dump.step + 1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            callbacks=[self._probe],
        )
        take = self._take_pairs(module) if isinstance(module, RewardModel) else self._take(module)
        batches = list(self._inputs.batches.values()) if rewards else [_NO_BATCH]
        self._found = module.step_guard.rehearse()
        module.training_step = take  # type: ignore[method-assign]
        try:
            with self._probe.watching():
                trainer.fit(module, train_dataloaders=_Batches(batches))
        finally:
            del module.training_step
            module.step_guard.end_rehearsal()

    def _take(self, module: PolicyModule) -> Callable[..., None]:
        def take(batch: object, batch_idx: int) -> None:
            del batch, batch_idx
            restore_random_state(self._inputs.random[0], module.device)
            if self._inputs.stage == ITERATION:
                self._look_again(module)
                return
            module.repeat_step(self._inputs)
            part = self._inputs.batches["part"]
            assert isinstance(part, Experience)
            self._rows = describe_rows(part, module.tokenizer, module.log_ratios)

        return take

    def _look_again(self, module: PolicyModule) -> None:
        experience = module.repeat_iteration(self._inputs)
        self.sums = measure(
            experience,
            replayed=bool(self._inputs.extra["replayed"]),
            drawn=bool(self._inputs.extra["drawn"]),
        )
        self._rows = describe_rows(experience, module.tokenizer, None)

    def _take_pairs(self, module: RewardModel) -> Callable[..., Tensor]:
        own = module.training_step

        def take(batch: PreferenceBatch, batch_idx: int) -> Tensor:
            restore_random_state(self._inputs.random[batch_idx], module.device)
            loss = own(batch, batch_idx)
            self._rows = module.taken_pairs.records()
            return loss

        return take


class _Batches:
    """A loader of what is there already."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


class _Probe(L.Callback):
    """Restores what the run had, and looks where numbers stop being finite."""

    def __init__(self, module: L.LightningModule, step: int, state: Mapping[str, Any]) -> None:
        self._module = module
        self._step = step
        self._state = state
        self.first = ""
        self.gradients: list[str] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.on_load_checkpoint(dict(self._state))
        stored = self._state["optimizer_states"]
        for optimizer, state in zip(trainer.optimizers, stored, strict=True):
            load_optimizer_state(pl_module, optimizer, state)
        if not pl_module.automatic_optimization:
            progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
            progress.total.ready = progress.total.completed = self._step

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        del trainer
        names = {id(weight): name for name, weight in pl_module.named_parameters()}
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and not bool(weight.grad.isfinite().all()):
                    self.gradients.append(names[id(weight)])

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Look at the output of every part of the module inside."""
        named = [(name, part) for name, part in self._module.named_modules() if name]
        handles = [part.register_forward_hook(self._look_at(name)) for name, part in named]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _look_at(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(part: nn.Module, given: Any, output: Any) -> None:
            del part, given
            # parts inside others answer first
            if not self.first and not _is_finite(output):
                self.first = name

        return look


def _is_finite(output: Any) -> bool:
    if isinstance(output, Tensor):
        return not output.is_floating_point() or bool(output.detach().isfinite().all())
    if isinstance(output, Mapping):
        return all(map(_is_finite, output.values()))
    return all(map(_is_finite, output)) if isinstance(output, list | tuple) else True
