"""Checkpoints that take no more room than they may, and go whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn

from lrlhf.callbacks.checkpoints.checkpoint_sizes import (
    GB,
    check_room,
    checkpoint_sizes,
    forecast_size,
    hidden_name,
    remove_leftovers,
    set_aside,
    surplus,
)
from lrlhf.callbacks.checkpoints.last_checkpoint import LastCheckpoint


class RetainingCheckpoint(LastCheckpoint):
    """Adds to Lightning's limit by rank one by age and one by size, and a forecast of the size.

    Decisions are rank zero's, and all ranks follow them.

    Args:
        max_total_size_gb: See `RLCheckpoint`.
        monitor: See `RLCheckpoint`.
        save_top_k: See `RLCheckpoint`.
        options: Of Lightning's `ModelCheckpoint`.
    """

    def __init__(
        self,
        *,
        max_total_size_gb: float | None,
        monitor: str | None,
        save_top_k: int | None,
        **options: Any,
    ) -> None:
        if max_total_size_gb is not None and max_total_size_gb <= 0:
            raise ValueError(
                f"RLCheckpoint max_total_size_gb is {max_total_size_gb:g}; it must be above 0, or "
                "left out for no limit"
            )
        if save_top_k is None:
            save_top_k = 2 if monitor is None else 1
        # without a metric Lightning knows of one or all only
        few = save_top_k if monitor is not None else min(save_top_k, 1)
        super().__init__(monitor=monitor, save_top_k=few, **options)
        self.save_top_k = save_top_k
        self.max_total_size_gb = max_total_size_gb
        self._saved: list[str] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._is_local:
            self._check_room(trainer, Path(str(self.dirpath)))
            self._forget_missing(trainer)
            # a kill may have come between a new checkpoint and the removal of an old one
            self._remove_all(trainer, self._out_of_limit())

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "saved": list(self._saved)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if state_dict.get("dirpath") == self.dirpath:
            self._saved = list(state_dict.get("saved", []))  # Lightning's own has none

    def _check_room(self, trainer: L.Trainer, folder: Path) -> None:
        """Say how large a checkpoint will be, and stop a run that could not save one."""
        forecast = forecast_size(trainer, weights_only=self.save_weights_only)
        warning = refusal = ""
        if trainer.is_global_zero:
            remove_leftovers(folder)
            try:
                warning = check_room(folder, forecast, limit_gb=self.max_total_size_gb)
            except ValueError as error:
                refusal = str(error)
        # one rank alone would leave the others waiting
        refusal = trainer.strategy.broadcast(refusal)
        if refusal:
            raise ValueError(refusal)
        if warning:
            rank_zero_warn(warning)

    def _forget_missing(self, trainer: L.Trainer) -> None:
        """Rank no checkpoint that was removed after the one that the run continues from."""
        known = {*self._saved, *self.best_k_models}
        gone = {path for path in known if trainer.is_global_zero and not Path(path).exists()}
        for path in trainer.strategy.broadcast(gone):
            self._forget(path)

    def _forget(self, path: str) -> None:
        self._saved = [saved for saved in self._saved if saved != path]
        if self.best_k_models.pop(path, None) is None or not self.best_k_models:
            return
        ranked = self._from_worst()
        self.kth_best_model_path, self.best_model_path = ranked[0], ranked[-1]
        self.kth_value = self.best_k_models[ranked[0]]
        self.best_model_score = self.best_k_models[ranked[-1]]

    def _from_worst(self) -> list[str]:
        """Ranked checkpoints, the worst first."""
        scores = self.best_k_models
        return sorted(scores, key=lambda path: float(scores[path]), reverse=self.mode == "min")

    def _save_topk_checkpoint(self, trainer: L.Trainer, monitor_candidates: dict[str, Any]) -> None:
        super()._save_topk_checkpoint(trainer, monitor_candidates)
        self._remove_all(trainer, self._out_of_limit())
        if self.max_total_size_gb is not None and self._is_local:
            # before last.ckpt is saved, whose state then knows of it
            self._make_room(trainer, self.max_total_size_gb * GB)

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        if filepath != self.last_model_path:
            # oldest first, and before the checkpoint is made: it knows of itself
            self._saved = [*(path for path in self._saved if path != filepath), filepath]
        super()._save_checkpoint(trainer, filepath)

    def _make_room(self, trainer: L.Trainer, limit: float) -> None:
        """Remove checkpoints until those in the folder fit."""
        chosen: list[str] = []
        if trainer.is_global_zero:
            sizes = checkpoint_sizes(Path(str(self.dirpath)))
            chosen = [str(path) for path in surplus(sizes, self._expendable(trainer), limit=limit)]
        for path in trainer.strategy.broadcast(chosen):
            self._forget(path)
            self._remove_checkpoint(trainer, path)

    def _out_of_limit(self) -> list[str]:
        """What ``save_top_k`` leaves no room for, as far as this callback saved it."""
        if self.save_top_k < 1:
            return []
        if self.monitor is not None:
            return [path for path in self._saved if path not in self.best_k_models]
        return self._saved[: -self.save_top_k]

    def _remove_all(self, trainer: L.Trainer, paths: Sequence[str]) -> None:
        for path in paths:
            if self._should_remove_checkpoint(trainer, path, ""):
                self._remove_checkpoint(trainer, path)

    def _expendable(self, trainer: L.Trainer) -> list[Path]:
        """What may be removed, the first one first."""
        unranked = [path for path in self._saved if path not in self.best_k_models]
        kept = {*self._saved[-1:], self.best_model_path}
        return [
            Path(path)
            for path in [*unranked, *self._from_worst()]
            # the last condition spares what the run continued from
            if path not in kept and self._should_remove_checkpoint(trainer, path, "")
        ]

    def _remove_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        path = Path(filepath)
        if filepath in self._saved:
            self._saved.remove(filepath)
        if not self._is_local:
            super()._remove_checkpoint(trainer, filepath)
            return
        if trainer.is_global_zero and path.exists():
            set_aside(path)
        super()._remove_checkpoint(trainer, str(hidden_name(path)))
