"""Short runs of a policy module on a model of 27,000 parameters."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lrlhf.datamodules import PromptDataModule
from lrlhf.modules import PPO, RLOO, OptimizerConfig
from lrlhf.rollout import Capabilities, RolloutListener, TransformersEngine
from lrlhf.run import Collectives
from lrlhf.types import Experience, Rollout


def letters(completions: Sequence[str]) -> list[float]:
    """Share of the characters that are ASCII letters: differs between almost any two responses."""
    return [
        sum(c.isascii() and c.isalpha() for c in text) / max(len(text), 1) for text in completions
    ]


def sgd(lr: float) -> OptimizerConfig:
    """Plain gradient descent: a step is the gradient times the rate."""
    return OptimizerConfig(lr=lr, weight_decay=0.0, optimizer_class="torch.optim.SGD")


def one_process() -> Collectives:
    return Collectives(SimpleNamespace(world_size=1, global_rank=0))  # type: ignore[arg-type]


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
    accelerator: str = "cpu",
    **options: Any,
) -> L.Trainer:
    trainer = L.Trainer(
        accelerator=accelerator,
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


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    return any(not torch.equal(before[name], value) for name, value in after.items())


def assert_same(first: dict[str, Tensor], second: dict[str, Tensor], **tolerance: float) -> None:
    """Compare exactly, unless a tolerance is given."""
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(
            second[name], value, msg=name, **({"rtol": 0, "atol": 0} | tolerance)
        )


class Run(NamedTuple):
    """A module, and what its training left and told."""

    module: Any
    before: dict[str, Tensor]
    trainer: L.Trainer
    watcher: Watcher

    @property
    def after(self) -> dict[str, Tensor]:
        return weights(self.module)

    @property
    def logged(self) -> dict[str, float]:
        return {name: float(value) for name, value in self.trainer.logged_metrics.items()}

    @property
    def experience(self) -> Experience:
        return self.watcher.experiences[0]

    @property
    def records(self) -> list[dict[str, Any]]:
        return self.watcher.records[0]


class SkewedEngine(TransformersEngine):
    """Reports other log-probabilities than the policy's, or weights of another iteration."""

    def __init__(
        self,
        *,
        spread: float = 0.5,
        shift: float = 0.0,
        version: int | None = None,
        exact: bool = False,
    ) -> None:
        super().__init__()
        self.exact, self.spread, self.shift, self.claimed = exact, spread, shift, version

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(exact=self.exact)

    def generate(self, *args: Any, seeds: Sequence[int], **options: Any) -> Rollout:
        rollout = super().generate(*args, seeds=seeds, **options)
        generator = torch.Generator().manual_seed(seeds[0])
        noise = self.spread * torch.randn(rollout.input_ids.shape, generator=generator)
        skew = (noise + self.shift) * rollout.response_mask
        version = None
        if self.claimed is not None:
            version = torch.full_like(rollout.group_ids, self.claimed)
        sampling = rollout.sampling_logprobs + skew
        return replace(rollout, sampling_logprobs=sampling, weight_version=version)
