"""The trained model as a folder that others can load."""

from __future__ import annotations

import contextlib
import re
import shutil
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lrlhf.arguments import KeepsArguments
from lrlhf.callbacks.ema import EMA
from lrlhf.callbacks.hub import HubError, HubRepo
from lrlhf.callbacks.model_card import Origin, write_model_card
from lrlhf.callbacks.output_files import atomic_folder, hold_output_folder, output_folder
from lrlhf.modules.contracts import Exportable
from lrlhf.run.run_folder import is_trial, run_folder

_STEP = re.compile(r"step_\d+")


class HFExport(KeepsArguments, L.Callback):
    """Writes weights, config and tokenizer as ``transformers`` reads them.

    The folder appears whole under its name or not at all. Exports of the run go to
    ``step_000100``, ``step_000200``, …, the last one to ``final``. Rank zero writes. Each has a
    model card (``README.md``), made of what the run folder holds by then.

    A push that fails ends no run and loses no export: a warning names the command that tries
    again. What would fail for certain (offline, nobody logged in, no right to write) is said before
    training.

    Args:
        dirpath: Folder of the exports; None: ``export`` in the run folder.
        every_n_steps: Also export each time so many steps are done; None: only at the end.
        use_ema: Export the averaged weights of the `EMA` callback.
        keep: How many ``step_*`` exports to keep, newest first; None: all.
        license: Identifier for the model card, such as ``apache-2.0``.
        push_to_hub: ``owner/name`` on the Hugging Face hub to push the last export to.
        push_steps: Push the ``step_*`` exports too; training waits for each.
        private: Whether a model that is new on the hub is private; None: as the owner's settings
            say.
        revision: Branch to push to; None: ``main``.

    Raises:
        ValueError: If an option is out of range, the module has no ``export_pretrained``,
            ``use_ema`` is on without an `EMA` callback, or the hub cannot be written to.
    """

    def __init__(  # noqa: PLR0913  the constructor is the config schema
        self,
        dirpath: str | Path | None = None,
        every_n_steps: int | None = None,
        use_ema: bool = False,
        keep: int | None = None,
        license: str | None = None,
        push_to_hub: str | None = None,
        push_steps: bool = False,
        private: bool | None = None,
        revision: str | None = None,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"HFExport every_n_steps is {every_n_steps}; it must be at least 1")
        if keep is not None and keep < 1:
            raise ValueError(f"HFExport keep is {keep}; it must be at least 1, or null for all")
        if push_to_hub is None and (push_steps or private is not None or revision is not None):
            raise ValueError("HFExport has options of a push; say where to with push_to_hub")
        if push_steps and every_n_steps is None:
            raise ValueError("HFExport push_steps is on, but there are no steps: set every_n_steps")
        self.repo = (
            None
            if push_to_hub is None
            else HubRepo(repo_id=push_to_hub, private=private, revision=revision)
        )
        self.push_steps = push_steps
        self.license = license
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
        self._create_repo(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        step = trainer.global_step
        if self.every_n_steps is None or step == self._exported_step or step % self.every_n_steps:
            return
        self._exported_step = step
        self._export(trainer, pl_module, f"step_{step:06d}")
        if self.push_steps:
            self._push(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._export(trainer, pl_module, "final")
        self._push(trainer)

    def _export(self, trainer: L.Trainer, module: L.LightningModule, name: str) -> None:
        assert isinstance(module, Exportable)
        ema = self._ema(trainer)
        with ema.averaged(module) if ema is not None else contextlib.nullcontext():
            if trainer.is_global_zero:
                folder = output_folder(trainer, self.dirpath)
                folder = folder / "export" if self.dirpath is None else folder
                with atomic_folder(folder / name) as fresh:
                    module.export_pretrained(fresh)
                    self._write_card(fresh, trainer, module)
                self.last_export = folder / name
                if self.keep is not None:
                    exports = [path for path in folder.iterdir() if _STEP.fullmatch(path.name)]
                    exports.sort(key=lambda path: int(path.name.removeprefix("step_")))
                    for path in exports[: -self.keep]:
                        shutil.rmtree(path)
            else:
                module.export_pretrained(None)
        trainer.strategy.barrier("hf_export")

    def _write_card(self, folder: Path, trainer: L.Trainer, module: L.LightningModule) -> None:
        try:
            write_model_card(folder, self._origin(trainer, module))
        except Exception as error:  # noqa: BLE001  the trained model must not be lost for its card
            rank_zero_warn(f"the export of step {trainer.global_step} has no model card: {error!r}")

    def _origin(self, trainer: L.Trainer, module: L.LightningModule) -> Origin:
        return Origin(
            module=module,
            data=trainer.datamodule,  # type: ignore[attr-defined]  # set outside its class
            step=trainer.global_step,
            run=run_folder(trainer),
            license=self.license,
            repo=None if self.repo is None else self.repo.repo_id,
        )

    def _create_repo(self, trainer: L.Trainer) -> None:
        """Have the hub refuse before training what it would refuse at the end, on all ranks."""
        if self.repo is None or is_trial(trainer):
            return
        refusal = ""
        if trainer.is_global_zero:
            try:
                self.repo.create()
            except HubError as error:
                refusal = str(error)
        refusal = trainer.strategy.broadcast(refusal)
        if refusal:
            raise HubError(refusal)

    def _push(self, trainer: L.Trainer) -> None:
        if self.repo is None or self.last_export is None or is_trial(trainer):
            return
        try:
            address = self.repo.push(self.last_export, step=trainer.global_step)
        except HubError as error:
            # the run has done its work
            rank_zero_warn(str(error))
        else:
            rank_zero_info(f"pushed {self.last_export} to {address}")

    def _ema(self, trainer: L.Trainer) -> EMA | None:
        if not self.use_ema:
            return None
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, EMA):
                return callback
        raise ValueError("HFExport has use_ema: true, but trainer.callbacks has no EMA; add one")
