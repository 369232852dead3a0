"""The trained model as a folder that others can load."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path
from typing import Any

import lightning as L

from lrlhf.arguments import KeepsArguments
from lrlhf.callbacks.ema import EMA
from lrlhf.callbacks.output_files import atomic_folder, hold_output_folder, output_folder
from lrlhf.modules.contracts import Exportable

_STEP = re.compile(r"step_\d+")


class HFExport(KeepsArguments, L.Callback):
    """Writes weights, config and tokenizer as ``transformers`` reads them.

    The folder appears whole under its name or not at all. Exports of the run go to
    ``step_000100``, ``step_000200``, …, the last one to ``final``. Rank zero writes.

    Args:
        dirpath: Folder of the exports; None: ``export`` in the run folder.
        every_n_steps: Also export each time so many steps are done; None: only at the end.
        use_ema: Export the averaged weights of the `EMA` callback.
        keep: How many ``step_*`` exports to keep, newest first; None: all.

    Raises:
        ValueError: If an option is out of range, the module has no ``export_pretrained``, or
            ``use_ema`` is on without an `EMA` callback.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        every_n_steps: int | None = None,
        use_ema: bool = False,
        keep: int | None = None,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"HFExport every_n_steps is {every_n_steps}; it must be at least 1")
        if keep is not None and keep < 1:
            raise ValueError(f"HFExport keep is {keep}; it must be at least 1, or null for all")
        self.dirpath = dirpath
        self.every_n_steps = every_n_steps
        self.use_ema = use_ema
        self.keep = keep
        self.last_export: Path | None = None
        """The newest folder this process wrote; on rank zero only."""
        self._exported_step = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if not isinstance(pl_module, Exportable):
            raise ValueError(
                f"HFExport needs export_pretrained() and {type(pl_module).__name__} has none; "
                "remove HFExport from trainer.callbacks"
            )
        self._ema(trainer)
        hold_output_folder(trainer, self.dirpath, stage)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if self.every_n_steps is None or step == self._exported_step or step % self.every_n_steps:
            return
        self._exported_step = step
        self._export(trainer, pl_module, f"step_{step:06d}")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._export(trainer, pl_module, "final")

    def _export(self, trainer: L.Trainer, module: L.LightningModule, name: str) -> None:
        assert isinstance(module, Exportable)
        ema = self._ema(trainer)
        with ema.averaged(module) if ema is not None else contextlib.nullcontext():
            if trainer.is_global_zero:
                folder = output_folder(trainer, self.dirpath)
                folder = folder / "export" if self.dirpath is None else folder
                with atomic_folder(folder / name) as fresh:
                    module.export_pretrained(fresh)
                self.last_export = folder / name
                if self.keep is not None:
                    exports = [path for path in folder.iterdir() if _STEP.fullmatch(path.name)]
                    exports.sort(key=lambda path: int(path.name.removeprefix("step_")))
                    for path in exports[: -self.keep]:
                        shutil.rmtree(path)
            else:
                module.export_pretrained(None)
        trainer.strategy.barrier("hf_export")

    def _ema(self, trainer: L.Trainer) -> EMA | None:
        if not self.use_ema:
            return None
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, EMA):
                return callback
        raise ValueError("HFExport has use_ema: true, but trainer.callbacks has no EMA; add one")
