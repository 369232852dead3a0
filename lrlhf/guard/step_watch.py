"""What one rank sees of one optimizer step, and whether all ranks leave it out."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lrlhf.guard.anomalies import Anomaly, judge_mismatch
from lrlhf.guard.guard_settings import Guard
from lrlhf.run import Collectives


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
    """What one rank sees of one optimizer step; its sums, on ``device``, add up over the ranks."""

    def __init__(self, guard: Guard, *, rows: int, device: torch.device) -> None:
        self._guard = guard
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
    def limits_mismatch(self) -> bool:
        """Whether the distance between trainer and engine matters."""
        return self._guard.max_mismatch is not None

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

        ``place_of`` says where its first entry is that is not finite; `judge` asks it, with
        ``rows`` and ``outputs`` as they are now. It is kept until then, and should be small.
        """
        infinite = ~loss.detach().isfinite()
        self._losses.append(_SeenLoss(infinite, place_of, self.rows, self.outputs))
        self._sums[0] += infinite

    def see_ratios(self, log_ratios: Tensor) -> None:
        """Look at how far the present micro-batch has moved: `[N]`, of each row, in nats."""
        distances = log_ratios.detach().abs().float()
        self._moves.append((self.rows.cpu(), distances))
        self._sums[1] += (distances > self._guard.max_log_ratio).sum()

    def see_mismatch(self, total: Tensor, tokens: Tensor) -> None:
        """Look at the distance between trainer and engine, in nats, over so many tokens."""
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
