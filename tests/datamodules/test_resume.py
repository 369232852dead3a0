from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lrlhf.datamodules import EvalLoader, PromptDataModule
from tests.datamodules.conftest import (
    TOKENIZER,
    Remembers,
    Rows,
    numbered_prompts,
    resumes_alike,
    trainer,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using ModelCheckpoint with manual optimization"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]


def data(**options: Any) -> PromptDataModule:
    # 4 batches of 4 rows per epoch, 2 rows are held out, 4 are left over
    defaults = {"tokenizer": TOKENIZER, "batch_size": 4, "val_size": 2}
    return PromptDataModule(Rows(numbered_prompts(22)), **{**defaults, **options})


@pytest.mark.parametrize(
    ("options", "stops"),
    [
        ({}, (1, 4, 5, 8, 11)),
        ({"limit_train_batches": 3}, (3, 4, 8)),
        ({"val_check_interval": 2}, (3, 4)),
        ({"max_epochs": -1, "max_steps": 11}, (3, 5)),
    ],
    ids=["whole epochs", "limited epochs", "validation in between", "steps"],
)
def test_a_run_that_was_stopped_anywhere_goes_on_with_the_same_batches(
    tmp_path: Path, options: dict[str, Any], stops: Any
) -> None:
    resumes_alike(tmp_path, Remembers, data, stops, **options)


def test_neither_workers_nor_an_early_look_at_the_loader_lose_the_position(tmp_path: Path) -> None:
    resumes_alike(tmp_path / "workers", Remembers, lambda: data(num_workers=1), (3,))
    asks = lambda: Remembers(ask_for_steps=True)  # noqa: E731
    resumes_alike(tmp_path / "steps", asks, data, (3, 4))


def test_the_checkpoint_holds_plain_numbers(tmp_path: Path) -> None:
    trainer(tmp_path / "checkpoints", max_epochs=1).fit(Remembers(), datamodule=data())
    state = torch.load(tmp_path / "checkpoints" / "step=2.ckpt", weights_only=True)[
        "PromptDataModule"
    ]
    digests = {name: state.pop(name) for name in ("data", "tokens")}
    assert state == {"batches": 2, "rows": 20, "seed": 0, "batch_size": 4, "ranks": 1}
    assert all(len(bytes.fromhex(digest)) == 16 for digest in digests.values())


def test_reloading_the_loader_every_epoch_changes_nothing() -> None:
    runs = []
    for every in (0, 1):
        module = Remembers()
        trainer(reload_dataloaders_every_n_epochs=every, max_epochs=2).fit(
            module, datamodule=data()
        )
        runs.append(module.seen)
    assert runs[0] == runs[1]
    assert runs[0][:5] != runs[0][5:]


def test_overfitting_on_a_few_batches_takes_the_same_ones_in_every_epoch() -> None:
    module = Remembers()
    trainer(overfit_batches=2).fit(module, datamodule=data())
    assert module.seen[:2] == module.seen[2:4] == module.seen[4:6]
    assert len(module.seen) == 6


def test_validation_and_test_runs_need_no_train_loader() -> None:
    module = Remembers()
    trainer().validate(module, datamodule=data(), verbose=False)
    assert sum(map(len, module.validated)) == 2
    loaded = data()
    loaded.setup("test")
    assert isinstance(loaded.test_dataloader(), EvalLoader)
    assert isinstance(loaded.predict_dataloader(), EvalLoader)
    assert loaded.state_dict() == {}


def test_each_rank_gets_its_share_whatever_lightning_does_to_samplers() -> None:
    loaded = data(batch_size=2)
    loaded.trainer = trainer(strategy="ddp", devices=2)
    loaded.setup("fit")
    loader = loaded.train_dataloader()
    assert len(loader) == 5  # 20 rows, 2 on each of 2 ranks
    assert not isinstance(loader, DataLoader)  # whose sampler Lightning would replace
