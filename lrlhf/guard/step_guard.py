"""Watches the steps of one module: what was found, how often, and what is kept of it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor

from lrlhf.guard.anomalies import Anomaly, RunningLength, judge_mismatch
from lrlhf.guard.dump import (
    StepInputs,
    dump_path,
    gathered,
    replay_command,
    write_dump,
)
from lrlhf.guard.guard_settings import Guard, TrainingDivergedError
from lrlhf.run import Collectives
from lrlhf.run.run_folder import run_folder

_logger = logging.getLogger(__name__)


class StepGuard:
    """Counts steps that were left out, writes dumps of them, and stops the run past the quota.

    Args:
        module: Whose steps they are.
        settings: The limits.
        quota_key: Option that the quota was set by, for messages.
    """

    def __init__(self, module: L.LightningModule, settings: Guard, quota_key: str) -> None:
        self._module = module
        self.settings = settings
        self._quota_key = quota_key
        self.skipped = 0
        """Steps that were left out so far, resumed runs included."""
        self._recent: list[int] = []
        self.kinds: Counter[str] = Counter()
        """How often each kind of anomaly left one out."""
        self.lengths = RunningLength()
        self._dumps = 0
        self._dumped_at = -1
        self._kept: Path | None = None
        self._rehearsed: list[Anomaly] | None = None

    @property
    def keeps_inputs(self) -> bool:
        """Whether an anomaly of this iteration would be dumped."""
        return (
            self._rehearsed is None
            and self._dumps < self.settings.dump
            and self._dumped_at != self._module.global_step
        )

    # ---- what happens to an anomaly

    def report(self, own: Sequence[Anomaly], inputs: StepInputs | None) -> None:
        """Count a step that all ranks leave out, keep what it was taken with, and say so.

        All ranks call it.

        Args:
            own: What this rank found; others may have found more.
            inputs: Of the step, where `keeps_inputs` asked for them.

        Raises:
            TrainingDivergedError: There were more such steps than the quota.
        """
        collectives = Collectives(self._module.trainer)
        mine = [anomaly._replace(rank=collectives.rank) for anomaly in own]
        found = [one for part in gathered(mine, collectives) for one in part]
        if self._rehearsed is not None:
            self._rehearsed += found
            return
        self.skipped += 1
        recent = self._count_recent()
        self.kinds.update({anomaly.kind for anomaly in found})
        kept = self._dump(inputs, found) if inputs is not None else ""
        if collectives.rank == 0:
            _logger.warning("%s", self._sentence(found, kept, recent))
        if recent > self.settings.max_skipped:
            raise TrainingDivergedError(self._farewell(recent))

    def _count_recent(self) -> int:
        """Add the present step to those that were left out, and count those within the window."""
        now, window = self._module.global_step, self.settings.window
        if window is None:
            return self.skipped
        self._recent = [step for step in [*self._recent, now] if step > now - window]
        return len(self._recent)

    def _dump(self, inputs: StepInputs, found: Sequence[Anomaly]) -> str:
        step = self._module.global_step
        folder = dump_path(self._folder(), step)
        # counted before: a checkpoint of a dump must not ask for it again when it is repeated
        self._dumps += 1
        self._dumped_at = step
        failure = write_dump(self._module, folder, inputs, found)
        if failure:
            return f"its batch could not be written to {folder} ({failure})"
        self._kept = folder
        return f"{replay_command(folder)} repeats it"

    def _folder(self) -> Path:
        trainer = self._module.trainer
        own = self.settings.dirpath
        # which run of several a logger has counted up to, rank zero knows
        folder = Path(own) if own is not None else run_folder(trainer) / "dumps"
        chosen: Path = trainer.strategy.broadcast(folder.absolute())
        return chosen

    def _sentence(self, found: Sequence[Anomaly], kept: str, recent: int) -> str:
        several = self._module.trainer.world_size > 1
        what = "; ".join(
            dict.fromkeys(f"{f'rank {one.rank}: ' if several else ''}{one.text}" for one in found)
        )
        return (
            f"step {self._module.global_step} was left out, nothing moved: {what} "
            f"({recent} {self._span}, {self._quota_key} is {self.settings.max_skipped})"
            f"{f'; {kept}' if kept else ''}"
        )

    @property
    def _span(self) -> str:
        window = self.settings.window
        return "so far" if window is None else f"within {window} steps"

    def _farewell(self, recent: int) -> str:
        counts = ", ".join(f"{kind} {count}" for kind, count in sorted(self.kinds.items()))
        text = (
            f"{recent} optimizer steps were left out {self._span} (in the whole run {counts}), and "
            f"{self._quota_key} is {self.settings.max_skipped} (last at step "
            f"{self._module.global_step}): lower the learning rate, clip gradients, or look at the "
            "last batches"
        )
        if self._kept is not None:
            text += f"; {replay_command(self._kept)} repeats one of them"
        return text

    # ---- state

    def metrics(self) -> dict[str, float]:
        """Return the counts as they are logged."""
        kinds = {f"guard/{kind}": float(count) for kind, count in sorted(self.kinds.items())}
        return {"train/skipped_steps": float(self.skipped), **kinds}

    def rehearse(self) -> list[Anomaly]:
        """From now on only collect what is found, in the list that is returned."""
        self._rehearsed = []
        return self._rehearsed

    def end_rehearsal(self) -> None:
        """Count again."""
        self._rehearsed = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return {
            "skipped": self.skipped,
            "recent": list(self._recent),
            "kinds": dict(self.kinds),
            "dumps": self._dumps,
            "lengths": self.lengths.state_dict(),
        }

    def load_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Go on from a module's state, also from one without a guard, which counted only steps."""
        if "guard" in state:
            self.load_state_dict(state["guard"])
        else:
            self.skipped = state["skipped_steps"]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        self.skipped = state["skipped"]
        # older checkpoints do not say when their steps were left out
        self._recent = list(state.get("recent", ()))
        self.kinds = Counter(state["kinds"])
        self._dumps = state["dumps"]
        self.lengths.load_state_dict(state["lengths"])


class StepVerdict(NamedTuple):
    """What became of one optimizer step before its gradients are looked at."""

    skips: bool
    """Whether all ranks leave it out."""
    found: list[Anomaly]
    """What this rank knows of the reason; others may know more."""


class _SeenLoss(NamedTuple):
    """A micro-batch's loss, and what it takes to say where it went wrong."""

    infinite: Tensor
    """A bool where the loss is, true if that is no number or infinite."""
    place_of: Callable[[], str]
    rows: Tensor
    outputs: dict[str, Tensor]


class StepWatch:
    """What one rank sees of one optimizer step; its sums add up over the ranks.

    Args:
        guard: The limits.
        rows: Rows of the step.
        device: Of the sums.
        replayed: Whether the rows were stored by another run: ratio and mismatch are not measured.
    """

    def __init__(self, guard: Guard, *, rows: int, device: torch.device, replayed: bool) -> None:
        self._guard = guard
        self._replayed = replayed
        # losses that are not finite, ratios out of bounds, mismatch in nats, tokens of that
        self._sums = torch.zeros(4, device=device)
        self._losses: list[_SeenLoss] = []
        self._moves: list[tuple[Tensor, Tensor]] = []
        self._size = rows
        self.rows = torch.arange(rows)
        """Which rows of the step the present micro-batch has."""
        self.outputs: dict[str, Tensor] = {}
        """`[B, T]` each, what the models made of the present micro-batch, by what to call it."""

    @property
    def log_ratios(self) -> Tensor:
        """`[B]`, how far each row's probabilities have moved, in nats; NaN: not known."""
        moved = torch.full((self._size,), torch.nan)
        for rows, distances in self._moves:
            moved[rows] = distances.cpu()
        return moved

    def turn_to(self, rows: Tensor) -> None:
        """Begin with a micro-batch."""
        self.rows, self.outputs = rows, {}

    def see_loss(self, loss: Tensor, place_of: Callable[[], str]) -> None:
        """Take down the loss of the present micro-batch, without waiting for its device.

        Args:
            loss: A scalar.
            place_of: Says where its first entry is that is not finite; asked by `judge`, with
                ``rows`` and ``outputs`` as they are now. It is kept until then, so it should hold
                nothing large.
        """
        infinite = ~loss.detach().isfinite()
        self._losses.append(_SeenLoss(infinite, place_of, self.rows, self.outputs))
        self._sums[0] += infinite

    def see_ratios(self, log_ratios: Tensor) -> None:
        """Look at how far the present micro-batch's probabilities have moved.

        Args:
            log_ratios: `[N]`, of each row, in nats.
        """
        if self._replayed:
            return
        distances = log_ratios.detach().abs().float()
        self._moves.append((self.rows.cpu(), distances))
        self._sums[1] += (distances > self._guard.max_log_ratio).sum()

    def see_mismatch(self, total: Tensor, tokens: Tensor) -> None:
        """Look at the distance between trainer and engine, in nats, over so many tokens."""
        if not self._replayed:
            self._sums[2] += total.detach()
            self._sums[3] += tokens

    def judge(self, collectives: Collectives) -> StepVerdict:
        """Compare with the limits; all ranks call it, and all leave the step out, or none."""
        own = self._sums.tolist()
        losses, ratios, mismatch, tokens = collectives.sum(self._sums).tolist()
        found: list[Anomaly] = []
        if own[0] > 0:
            place = self._place()
            found.append(Anomaly("loss", f"the loss is not finite{f' ({place})' if place else ''}"))
        if own[1] > 0:
            found.append(self._largest_ratio())
        too_far = judge_mismatch(mismatch, tokens, self._guard)
        found += too_far if collectives.rank == 0 else []
        self._losses = []
        return StepVerdict(losses > 0 or ratios > 0 or bool(too_far), found)

    def _place(self) -> str:
        """Say where the first entry is that is not finite; empty: no micro-batch has one."""
        for seen in self._losses:
            if bool(seen.infinite):
                self.rows, self.outputs = seen.rows, seen.outputs
                if place := seen.place_of():
                    return place
        return ""

    def _largest_ratio(self) -> Anomaly:
        moved = self.log_ratios
        row = int(moved.nan_to_num(-1.0).argmax())
        distance, limit = float(moved[row]), self._guard.max_ratio
        text = (
            f"the probabilities of row {row} have moved by {distance:.4g} nats "
            f"(guard.max_ratio is {limit:g}, {self._guard.max_log_ratio:.4g} nats)"
        )
        return Anomaly("ratio", text, distance, self._guard.max_log_ratio)
