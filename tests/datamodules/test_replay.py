import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lrlhf.datamodules import ReplayDataModule
from lrlhf.datamodules.loading.loader import Ranks
from lrlhf.rollout import save_rollout
from lrlhf.rollout.storage import rollout_path
from lrlhf.types import Rollout


def store(folder: Path, step: int, rank: int = 0, groups: tuple[int, ...] = (0, 0, 1, 1)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows = len(groups)
    mask = torch.tensor([[False, True]]).repeat(rows, 1)
    rollout = Rollout(
        input_ids=torch.full((rows, 2), step),
        attention_mask=torch.ones(rows, 2, dtype=torch.bool),
        response_mask=mask,
        sampling_logprobs=-mask.float(),
        group_ids=torch.tensor(groups),
        truncated=torch.zeros(rows, dtype=torch.bool),
    )
    path = rollout_path(folder, step, rank)
    records = [{"step": step, "rank": rank}] * rows
    save_rollout(path, rollout, torch.arange(rows).float(), records)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five iterations of one rank."""
    for step in range(5):
        store(tmp_path / "rollouts", step)
    return tmp_path / "rollouts"


def ready(folder: Path, **options: Any) -> ReplayDataModule:
    data = ReplayDataModule(folder, **options)
    data.setup("fit")
    return data


def places(batches: Any) -> list[tuple[int, int]]:
    return [(batch.records[0]["step"], batch.records[0]["rank"]) for batch in batches]


def steps(batches: Any) -> list[int]:
    return [step for step, _ in places(batches)]


def test_without_shuffling_the_oldest_comes_first_in_each_epoch(folder: Path) -> None:
    loader = ready(folder, shuffle=False).train_dataloader()
    assert [steps(loader) for _ in range(2)] == [[0, 1, 2, 3, 4]] * 2
    store(folder, 3, rank=1)
    newest = ready(folder, max_rollouts=2, shuffle=False)
    assert places(newest.train_dataloader()) == [(3, 1), (4, 0)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_files_are_dealt_to_ranks_and_the_remainder_is_told(
    folder: Path, shuffle: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaders = []
    for rank in (0, 1):
        for module in ("core", "replay"):
            monkeypatch.setattr(
                f"lrlhf.datamodules.{module}.data_ranks", lambda trainer, rank=rank: Ranks(rank, 2)
            )
        with caplog.at_level(logging.INFO):
            loaders.append(ready(folder, shuffle=shuffle).train_dataloader())
    epochs = [[steps(loader) for loader in loaders] for _ in range(10)]
    assert all([len(first), len(second)] == [2, 2] for first, second in epochs)
    assert all(set(first).isdisjoint(second) for first, second in epochs)
    # no file is left out for ever
    assert {step for both in epochs for one in both for step in one} == {0, 1, 2, 3, 4}
    assert "the last 1 of its 5 rows make no full batch" in caplog.text
    if not shuffle:
        assert epochs[:2] == [[[0, 2], [1, 3]], [[4, 1], [0, 2]]]


def test_a_folder_without_rollouts_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no folder .*nowhere"):
        ready(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"did you mean .*rollouts\?"):
        ready(tmp_path)
    shutil.rmtree(folder)
    folder.mkdir()
    with pytest.raises(ValueError, match=r"holds no step_.*save_tensors=True"):
        ready(folder)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((0, 0, 1), "group 1 holds 1 responses"),
        ((0, 1, 0, 1), "do not stand together"),
        ((), "without rows"),
    ],
)
def test_groups_that_cannot_be_trained_on_name_their_file(
    tmp_path: Path, groups: tuple[int, ...], message: str
) -> None:
    store(tmp_path, 7, groups=groups)
    with pytest.raises(ValueError, match=rf"step_000007\.rank_0\.safetensors.* {message}"):
        ready(tmp_path)


def test_a_folder_that_was_moved_away_under_the_run_is_explained(folder: Path) -> None:
    loader = ready(folder).train_dataloader()
    folder.rename(folder.with_name("rollouts.1"))
    with pytest.raises(ValueError, match="is gone: a RolloutLog of this run"):
        next(iter(loader))


def test_files_of_different_size_are_for_one_rank_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(folder, 5, groups=(0, 0))
    assert len(ready(folder).train_dataloader()) == 6
    monkeypatch.setattr("lrlhf.datamodules.replay.data_ranks", lambda trainer: Ranks(0, 2))
    with pytest.raises(ValueError, match=r"4 in .*000000.*, 2 in .*000005"):
        ready(folder)


@pytest.mark.parametrize("options", [{"max_rollouts": 0}, {"seed": -1}])
def test_impossible_settings_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        ReplayDataModule("rollouts", **options)
