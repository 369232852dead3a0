"""Short runs of a reward model on pairs of a few letters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lrlhf.modules import OptimizerConfig, RewardModel
from lrlhf.types import PreferenceBatch

NAN = float("nan")
INF = float("inf")
SGD = OptimizerConfig(lr=0.5, optimizer_class="torch.optim.SGD", warmup_steps=0)
ROWS = [
    ("abc", "d", [1.0, NAN]),
    ("ef", "ghij", [-1.0, 0.0]),
    ("k", "lm", [0.0, -1.0]),
    ("nopq", "rs", [1.0, 1.0]),
    ("t", "uvw", [NAN, -1.0]),
    ("xy", "z", [-1.0, NAN]),
    ("ab", "cdef", [1.0, 0.0]),
    ("ghi", "j", [1.0, 1.0]),
    ("kl", "m", [-1.0, -1.0]),
    ("n", "opqr", [0.0, 1.0]),
]
ONE_HEAD = [(a, b, labels[:1]) for a, b, labels in ROWS]


def trainer(folder: Path, **options: Any) -> L.Trainer:
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "max_epochs": 1,
        "log_every_n_steps": 1,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
    }
    return L.Trainer(**{**settings, **options})


def loader(batches: Sequence[PreferenceBatch]) -> DataLoader[PreferenceBatch]:
    return DataLoader(list(batches), batch_size=None, num_workers=0)  # type: ignore[arg-type]


def fit_pairs(
    module: RewardModel,
    batches: Sequence[PreferenceBatch],
    folder: Path,
    *,
    ckpt: Path | None = None,
    **options: Any,
) -> L.Trainer:
    run = trainer(folder, **options)
    run.fit(module, loader(batches), ckpt_path=ckpt)
    return run


def flat_weights(module: RewardModel) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.network.parameters()])


def loss_of(module: RewardModel, batch: PreferenceBatch) -> Tensor:
    scores = module.score_pairs(batch)
    losses = module.objective(*scores, batch.labels, batch.margin)
    return (losses * module.head_weights).sum() / len(batch)
