"""``last.ckpt``: where it leads, and what is taken in its place when it is damaged."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from lrlhf.run.atomic import atomic_link
from lrlhf.run.checkpoints.checkpoint_search import newest_intact
from lrlhf.run.checkpoints.checksums import NotACheckpointError
from lrlhf.run.folder_lock import hold_folder, is_held_by_another

_logger = logging.getLogger(__name__)


class LastCheckpoint(ModelCheckpoint):
    """Keeps ``last.ckpt`` as a link to the checkpoint that was just written.

    Lightning writes the same state a second time. Only where no other checkpoint has the newest
    state is ``last.ckpt`` a checkpoint of its own.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._found: Path | None = None
        self._damaged: list[Path] = []
        self._continued_at: int | None = None

    @property
    def _is_local(self) -> bool:
        return "://" not in str(self.dirpath)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        chosen = self.dirpath is not None
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and chosen:
            # before anything is written; in a logger's folder that would be too early for some
            hold_folder(trainer, Path(str(self.dirpath)))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if not self._is_local:
            return
        hold_folder(trainer, Path(str(self.dirpath)))
        if trainer.is_global_zero:
            self._tidy()
        trainer.strategy.barrier("last_checkpoint")
        self._continued_at = trainer.global_step if self._continues_last(trainer) else None

    def _tidy(self) -> None:
        """Put aside what is damaged, and have ``last.ckpt`` lead to what was found in its place."""
        folder = Path(str(self.dirpath))
        for path in self._damaged:
            if folder in path.parents and path.exists():
                _put_aside(path)
        self._damaged = []
        if self._found is None or not self.save_last or not self.last_model_path:
            return
        if self._found.resolve() != Path(self.last_model_path).resolve():
            atomic_link(Path(self.last_model_path), self._found)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if (
            self._is_local
            and not self.last_model_path
            and state_dict.get("dirpath") == self.dirpath
        ):
            # a run's first checkpoint may have been written before its last.ckpt had a name
            self.last_model_path = str(self._default_last)

    @property
    def _default_last(self) -> Path:
        return Path(str(self.dirpath)) / f"{self.CHECKPOINT_NAME_LAST}{self.FILE_EXTENSION}"

    def _continues_last(self, trainer: L.Trainer) -> bool:
        """Tell whether ``last.ckpt`` is what the run goes on from."""
        if trainer.ckpt_path is None or not self.last_model_path:
            return False
        same = os.path.realpath(trainer.ckpt_path) == os.path.realpath(self.last_model_path)
        return bool(trainer.strategy.broadcast(same))

    def _should_remove_checkpoint(self, trainer: L.Trainer, previous: str, current: str) -> bool:
        if self._found is not None and Path(previous) == self._found:
            return previous != current  # nobody chose it: it goes when it would have gone
        return super()._should_remove_checkpoint(trainer, previous, current)

    # ------------------------------------------------------------------ looking for it

    def _find_last_checkpoints(self, trainer: L.Trainer) -> set[str]:
        folder = str(self._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]
        if "://" in folder:
            # Lightning leaves the protocol out, and then looks for them on this machine
            found = super()._find_last_checkpoints(trainer)
            return {str(self._fs.unstrip_protocol(path)) for path in found}
        # Lightning's remark advises to configure another callback
        warnings.filterwarnings("ignore", message=r".*there is no last checkpoint available")
        self._found = self._search(trainer, Path(folder))
        return set() if self._found is None else {str(self._found)}

    def _search(self, trainer: L.Trainer, folder: Path) -> Path | None:
        """Choose the checkpoint to go on from; rank zero lists them, and all ranks read them."""
        strategy = trainer.strategy if trainer.world_size > 1 else None
        if strategy is not None:
            # the trainer does so a little later, when there is nothing left to do
            strategy.setup_environment()
        if trainer.state.fn == TrainerFn.FITTING:
            hold_folder(trainer, folder)
        tidy = trainer.is_global_zero and not is_held_by_another(folder)
        found = newest_intact(folder, self.CHECKPOINT_NAME_LAST, strategy, tidy=tidy)
        if found.path is None and found.passed:
            told = "; ".join(f"{path.name}: {flaw}" for path, flaw in found.passed.items())
            raise NotACheckpointError(
                f"{folder} has checkpoints, and none of them can be used: {told}. Restore one, or "
                "leave out --ckpt_path to start from the beginning"
            )
        if found.path is None:
            _logger.info("%s has no checkpoint yet: the run starts from the beginning", folder)
            return None
        for path, flaw in found.passed.items():
            rank_zero_warn(f"{path} is passed over, and {found.path.name} is used: {flaw}")
        self._damaged = list(found.damaged)
        return found.path

    # ------------------------------------------------------------------ writing it

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        if self.save_last and self._is_local and not self.last_model_path:
            # before the checkpoint is made, which is to know the name
            self.last_model_path = self._name_last(trainer)
        super()._save_checkpoint(trainer, filepath)
        if self.save_last and self._is_local and filepath != self.last_model_path:
            if trainer.is_global_zero:
                atomic_link(Path(self.last_model_path), Path(filepath))
            trainer.strategy.barrier("last_checkpoint")

    def _save_last_checkpoint(self, trainer: L.Trainer, monitor_candidates: dict[str, Any]) -> None:
        if not self._is_local:
            super()._save_last_checkpoint(trainer, monitor_candidates)
        elif self.save_last and not self._is_linked(trainer):
            self._save_checkpoint(trainer, self.last_model_path or self._name_last(trainer))

    def _is_linked(self, trainer: L.Trainer) -> bool:
        """Tell whether ``last.ckpt`` leads to a checkpoint of this step."""
        newest = self._last_checkpoint_saved
        this_step = self._last_global_step_saved == trainer.global_step
        return this_step and newest not in ("", self.last_model_path)

    def _name_last(self, trainer: L.Trainer) -> str:
        """Choose a name that no earlier run has."""
        name, version = str(self._default_last), 0
        while self.file_exists(name, trainer):
            version += 1
            name = str(self._default_last.with_stem(f"{self.CHECKPOINT_NAME_LAST}-v{version}"))
        return name


def _put_aside(path: Path) -> None:
    """Rename what is damaged, so that nothing takes it for a checkpoint, and keep it."""
    name, count = f"{path.name}.damaged", 1
    while path.with_name(name).exists():
        count += 1
        name = f"{path.name}.damaged{count}"
    path.rename(path.with_name(name))
    _logger.warning("%s is kept as %s", path, name)
