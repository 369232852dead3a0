"""Counts steps that were left out, keeps the first of them, and stops the run past the quota."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L

from lrlhf.guard.anomalies import Anomaly, Guard, RunningLength, TrainingDivergedError
from lrlhf.guard.dump import StepBundle, replay_command, write_dump
from lrlhf.run import Collectives
from lrlhf.run.run_folder import run_folder
from lrlhf.run.seeding import running_step

_logger = logging.getLogger(__name__)


class StepGuard:
    """Counts steps that were left out, writes dumps of them, and stops the run past the quota."""

    def __init__(self, settings: Guard) -> None:
        self.settings = settings
        self.skipped = 0
        """Steps that were left out so far, resumed runs included."""
        self.kinds: Counter[str] = Counter()
        """How often each kind of anomaly left one out."""
        self.lengths = RunningLength()
        self._recent: list[int] = []
        """Steps within the window at which one was left out."""
        self._dumped: list[int] = []
        """Steps of which a dump was begun; no other anomaly of theirs is dumped."""
        self._last_dump: Path | None = None
        self._collected: list[Anomaly] | None = None

    def report(
        self,
        own: Sequence[Anomaly],
        bundle: Callable[[], StepBundle] | None,
        module: L.LightningModule,
    ) -> None:
        """Count a step that all ranks leave out, keep what it was taken with, and say so.

        All ranks call it, each with its ``own`` anomalies. ``bundle`` makes what this rank's step
        was taken with, and is called only if it is dumped; None: it is only counted.

        Raises:
            TrainingDivergedError: There were more such steps than the quota.
        """
        ranks, step = Collectives(module.trainer), running_step(module.trainer)
        mine = [anomaly._replace(rank=ranks.rank) for anomaly in own]
        anomalies = [each for part in ranks.gather(mine) for each in part]
        if self._collected is not None:
            self._collected += anomalies
            return
        self.skipped += 1
        self.kinds.update({anomaly.kind for anomaly in anomalies})
        recent = self._count_recent(step)
        dumps = len(self._dumped) < self.settings.dump and step not in self._dumped
        dump = self._dump(bundle(), anomalies, module) if dumps and bundle else ""
        if ranks.rank == 0:
            what = _listed(anomalies, several=ranks.world_size > 1)
            quota = f"({recent} {self._span}, guard.max_skipped is {self.settings.max_skipped})"
            _logger.warning("step %d was left out, nothing moved: %s %s%s", step, what, quota, dump)
        if recent > self.settings.max_skipped:
            raise TrainingDivergedError(self._farewell(recent, step))

    @property
    def collects(self) -> bool:
        """Whether a step of a dump is replayed."""
        return self._collected is not None

    @contextlib.contextmanager
    def collecting(self) -> Iterator[list[Anomaly]]:
        """Inside, only collect what is found, in the list that is handed out, and count nothing."""
        collected: list[Anomaly] = []
        self._collected = collected
        try:
            yield collected
        finally:
            self._collected = None

    def _count_recent(self, step: int) -> int:
        """Add a step to those that were left out, and count those within the window."""
        window = self.settings.window
        if window is None:
            return self.skipped
        self._recent = [each for each in [*self._recent, step] if each > step - window]
        return len(self._recent)

    def _dump(
        self, bundle: StepBundle, anomalies: Sequence[Anomaly], module: L.LightningModule
    ) -> str:
        """Write a dump; returns what to say of it."""
        trainer, step, own = module.trainer, running_step(module.trainer), self.settings.dirpath
        parent = Path(own) if own is not None else run_folder(trainer) / "dumps"
        # which run of several a logger has counted up to, rank zero knows
        folder: Path = trainer.strategy.broadcast(parent.absolute()) / f"step_{step:06d}"
        self._dumped.append(step)
        if failure := write_dump(module, folder, bundle, anomalies):
            return f"; its batch could not be written to {folder} ({failure})"
        self._last_dump = folder
        return f"; {replay_command(folder)} repeats it"

    @property
    def _span(self) -> str:
        window = self.settings.window
        return "so far" if window is None else f"within {window} steps"

    def _farewell(self, recent: int, step: int) -> str:
        counts = ", ".join(f"{kind} {count}" for kind, count in sorted(self.kinds.items()))
        text = (
            f"{recent} optimizer steps were left out {self._span} (in the whole run {counts}), and "
            f"guard.max_skipped is {self.settings.max_skipped} (last at step {step}): lower the "
            "learning rate, clip gradients, or look at the last batches"
        )
        if self._last_dump is not None:
            text += f"; {replay_command(self._last_dump)} repeats one of them"
        return text

    # ---- state

    def metrics(self) -> dict[str, float]:
        """Return the counts as they are logged."""
        kinds = {f"guard/{kind}": float(count) for kind, count in sorted(self.kinds.items())}
        return {"train/skipped_steps": float(self.skipped), **kinds}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {
            "skipped": self.skipped,
            "recent": list(self._recent),
            "kinds": dict(self.kinds),
            "dumped": list(self._dumped),
            "lengths": self.lengths.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped, self._recent = state["skipped"], list(state["recent"])
        self.kinds, self._dumped = Counter(state["kinds"]), list(state["dumped"])
        self.lengths.load_state_dict(state["lengths"])


def _listed(anomalies: Sequence[Anomaly], *, several: bool) -> str:
    texts = (
        f"rank {anomaly.rank}: {anomaly.text}" if several else anomaly.text for anomaly in anomalies
    )
    return "; ".join(dict.fromkeys(texts))
