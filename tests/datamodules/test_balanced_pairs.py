"""Pairs of one batch are dealt to the ranks so that each has about as many tokens."""

from itertools import combinations
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from lrlhf.datamodules import PreferenceDataModule
from lrlhf.datamodules.loading.loader import Ranks
from lrlhf.types import PreferenceBatch
from tests.datamodules.conftest import WriteRows

WORLD, EACH = 2, 4


def rows(count: int = 40) -> list[dict[str, Any]]:
    """One pair in five is many times as long as the others."""
    lengths = [200 if number % 5 == 0 else 2 + number % 7 for number in range(count)]
    return [
        {"prompt": "p" * length, "chosen": " a" * length, "rejected": " b", "id": number}
        for number, length in enumerate(lengths)
    ]


def on_rank(
    rank: int,
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    *,
    world: int = WORLD,
    each: int = EACH,
) -> PreferenceDataModule:
    ranks = Ranks(rank, world)
    monkeypatch.setattr("lrlhf.datamodules.core.data_ranks", lambda trainer: ranks)
    data = PreferenceDataModule(path, tokenizer=tokenizer, batch_size=each, seed=3)
    data.prepare_data()
    data.setup("fit")
    data.train_dataloader()
    return data


def ids(batch: PreferenceBatch) -> list[int]:
    return [row["id"] for row in batch.info]


def tokens(batch: PreferenceBatch) -> list[int]:
    """Of both candidates of each pair, the prompt before them once."""
    prompts = (batch.candidate0.attention_mask & ~batch.candidate0.response_mask).sum(dim=1)
    both = batch.candidate0.lengths + batch.candidate1.lengths
    return [int(count) for count in both - prompts]


def test_ranks_share_the_batches_of_one_process_evenly(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(rows())
    alone = on_rank(0, path, tokenizer, monkeypatch, world=1, each=WORLD * EACH)
    ranks = [on_rank(rank, path, tokenizer, monkeypatch) for rank in range(WORLD)]
    whole = list(alone.train_dataloader())
    shares = list(zip(*[data.train_dataloader() for data in ranks], strict=True))
    assert len(whole) == len(shares) == 5
    slowest = in_order = 0
    for batch, parts in zip(whole, shares, strict=True):
        assert [len(part) for part in parts] == [EACH] * WORLD
        assert sorted(ids(parts[0]) + ids(parts[1])) == sorted(ids(batch))
        size = dict(zip(ids(batch), tokens(batch), strict=True))
        halves = [sum(size[row] for row in half) for half in combinations(ids(batch), EACH)]
        most = max(sum(tokens(part)) for part in parts)
        assert most <= 1.03 * min(max(half, sum(size.values()) - half) for half in halves)
        slowest += most
        # what the first and the second half of the batch take
        in_order += max(halves[0], halves[-1])
    assert slowest < 0.9 * in_order


def test_one_process_has_the_order_that_it_had(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(rows(20))
    data = on_rank(0, path, tokenizer, monkeypatch, world=1, each=5)
    splits = data._splits
    assert splits is not None
    expected = splits.train.order(3).epoch(0).tolist()
    assert [row for batch in data.train_dataloader() for row in ids(batch)] == expected


@pytest.mark.parametrize("stop", [1, 3, 5, 7])
def test_a_rank_that_was_stopped_goes_on_with_the_same_pairs(
    stop: int,
    write_rows: WriteRows,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_rows(rows())
    whole = on_rank(1, path, tokenizer, monkeypatch)
    seen, states = [], []
    for _ in range(2):
        for batch in whole.train_dataloader():
            seen.append(ids(batch))
            states.append(whole.state_dict())
    resumed = on_rank(1, path, tokenizer, monkeypatch)
    resumed.load_state_dict(states[stop - 1])
    again: list[list[int]] = []
    while len(again) < len(seen) - stop:
        again += [ids(batch) for batch in resumed.train_dataloader()]
    assert again == seen[stop:]


def test_another_number_of_ranks_goes_on_with_the_rows_that_are_left(
    write_rows: WriteRows, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_rows(rows())
    two = [on_rank(rank, path, tokenizer, monkeypatch) for rank in range(2)]
    seen = []
    for data in two:
        batches = iter(data.train_dataloader())
        seen += [row for _ in range(3) for row in ids(next(batches))]
    alone = on_rank(0, path, tokenizer, monkeypatch, world=1, each=WORLD * EACH)
    alone.load_state_dict(two[0].state_dict())
    left = [row for batch in alone.train_dataloader() for row in ids(batch)]
    assert sorted(seen + left) == list(range(40))
