"""Short runs of a language model on given rows, and the gradient of one step."""

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from lrlhf.modules import OptimizerConfig
from lrlhf.types import PreferenceBatch, SequenceBatch, SupervisedBatch, TensorBatch
from tests.modules.reward_runs import trainer

SGD = OptimizerConfig(lr=1.0, optimizer_class="torch.optim.SGD", warmup_steps=0)
"""Whose first step is the gradient."""

Row = tuple[Sequence[int], Sequence[int]]
"""Ids that are given, and ids that are learnt."""


def columns(rows: Sequence[Row], *, width: int = 0, pad: int = 0) -> dict[str, Tensor]:
    """Right-padded rows, at least so wide."""
    whole = [torch.tensor([*given, *said]) for given, said in rows]
    learnt = [torch.tensor([False] * len(given) + [True] * len(said)) for given, said in rows]
    ids = pad_sequence(whole, batch_first=True, padding_value=pad)
    mask = pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in whole], True)
    more = max(0, width - ids.shape[1])
    return {
        "input_ids": nn.functional.pad(ids, (0, more), value=pad),
        "attention_mask": nn.functional.pad(mask, (0, more), value=False),
        "response_mask": nn.functional.pad(pad_sequence(learnt, True), (0, more), value=False),
    }


def texts(rows: Sequence[Row], **options: int) -> SupervisedBatch:
    places = tuple(f"rows.jsonl:{number}" for number, _ in zip(count(1), rows, strict=False))
    return SupervisedBatch(**columns(rows, **options), places=places)


def pairs(
    rows: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]],
    labels: Sequence[float] | None = None,
    margin: Sequence[float] | None = None,
    **options: int,
) -> PreferenceBatch:
    """Prompt, first and second answer of each pair; the first is chosen if nothing says else."""
    first, second = (
        SequenceBatch(**columns([(row[0], row[place]) for row in rows], **options))
        for place in (1, 2)
    )
    return PreferenceBatch(
        candidate0=first,
        candidate1=second,
        labels=torch.tensor(labels or [1.0] * len(rows))[:, None],
        margin=None if margin is None else torch.tensor(margin),
        info=({},) * len(rows),
    )


def loader(batches: Sequence[TensorBatch]) -> DataLoader[TensorBatch]:
    return DataLoader(list(batches), batch_size=None, num_workers=0)  # type: ignore[arg-type]


def fit(
    module: Any, batches: Sequence[TensorBatch], folder: Path, *, ckpt: Any = None, **options: Any
) -> L.Trainer:
    run = trainer(folder, **options)
    run.fit(module, loader(batches), ckpt_path=ckpt)
    return run


def weights(module: Any) -> dict[str, Tensor]:
    (model,) = module.trainable_models().values()
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def gradients(
    module: Any, batches: Sequence[TensorBatch], folder: Path, **options: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Of the only step that `SGD` takes; and what was logged."""
    before = weights(module)
    run = fit(module, batches, folder, **options)
    after = weights(module)
    return {name: before[name] - after[name] for name in before}, dict(run.callback_metrics)
