"""Short runs of a policy module on a model of 27,000 parameters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lrlhf.datamodules import PromptDataModule
from lrlhf.modules import PPO, RLOO
from lrlhf.rollout import RolloutListener
from lrlhf.types import Experience


def letters(completions: Sequence[str]) -> list[float]:
    """Share of the characters that are ASCII letters: differs between almost any two responses."""
    return [
        sum(c.isascii() and c.isalpha() for c in text) / max(len(text), 1) for text in completions
    ]


class Watcher(RolloutListener, L.Callback):
    """Keeps what the module tells its listeners."""

    def __init__(self) -> None:
        self.experiences: list[Experience] = []
        self.records: list[list[dict[str, Any]]] = []
        self.phases: list[str] = []

    def on_phase(self, phase: str) -> None:
        self.phases.append(phase)

    def on_rollout(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        experience: Experience,
        records: Sequence[dict[str, Any]],
    ) -> None:
        self.experiences.append(experience)
        self.records.append(list(records))


def fit(
    module: RLOO | PPO,
    prompts: Path,
    folder: Path,
    *,
    steps: int = 2,
    callbacks: Sequence[L.Callback] = (),
    ckpt_path: str | None = None,
    data: L.LightningDataModule | None = None,
    **options: Any,
) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=list(callbacks),
        **options,
    )
    data = data or PromptDataModule(train=str(prompts), batch_size=4, val=str(prompts))
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return trainer


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}
