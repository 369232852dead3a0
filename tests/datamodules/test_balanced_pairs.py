"""Pairs of one batch are shared out to the ranks so that each has about as many tokens."""

from collections.abc import Callable
from itertools import combinations

import pytest

from lrlhf.datamodules import PreferenceDataModule
from lrlhf.datamodules.loading.loader import Ranks
from lrlhf.types import PreferenceBatch
from tests.datamodules.conftest import TOKENIZER, Rows

WORLD, EACH = 2, 4
OnRank = Callable[..., PreferenceDataModule]
# one pair in five is many times as long as the others
LENGTHS = [200 if number % 5 == 0 else 2 + number % 7 for number in range(40)]
ROWS = Rows(
    {"prompt": "p" * length, "chosen": " a" * length, "rejected": " b", "id": number}
    for number, length in enumerate(LENGTHS)
)


@pytest.fixture
def on_rank(monkeypatch: pytest.MonkeyPatch) -> OnRank:
    def load(rank: int, world: int = WORLD, each: int = EACH) -> PreferenceDataModule:
        ranks = Ranks(rank, world)
        monkeypatch.setattr("lrlhf.datamodules.core.data_ranks", lambda trainer: ranks)
        data = PreferenceDataModule(ROWS, tokenizer=TOKENIZER, batch_size=each, seed=3)
        data.setup("fit")
        data.train_dataloader()
        return data

    return load


def ids(batch: PreferenceBatch) -> list[int]:
    return [row["id"] for row in batch.info]


def tokens(batch: PreferenceBatch) -> list[int]:
    """Of both candidates of each pair, the prompt before them once."""
    prompts = (batch.candidate0.attention_mask & ~batch.candidate0.response_mask).sum(dim=1)
    both = batch.candidate0.lengths + batch.candidate1.lengths
    return [int(count) for count in both - prompts]


def test_ranks_share_the_batches_of_one_process_evenly(on_rank: OnRank) -> None:
    alone = on_rank(0, world=1, each=WORLD * EACH)
    whole = list(alone.train_dataloader())
    shares = list(zip(*[on_rank(rank).train_dataloader() for rank in range(WORLD)], strict=True))
    assert len(whole) == len(shares) == 5
    # one process has the order that the seed gives
    assert alone._splits is not None
    order = alone._splits[0].order(3).epoch(0).tolist()
    assert [row for batch in whole for row in ids(batch)] == order
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


def test_a_rank_that_was_stopped_goes_on_with_the_same_pairs(on_rank: OnRank) -> None:
    whole = on_rank(1)
    seen, states = [], []
    for _ in range(2):
        for batch in whole.train_dataloader():
            seen.append(ids(batch))
            states.append(whole.state_dict())
    for stop in (1, 5, 7):
        resumed = on_rank(1)
        resumed.load_state_dict(states[stop - 1])
        again: list[list[int]] = []
        while len(again) < len(seen) - stop:
            again += [ids(batch) for batch in resumed.train_dataloader()]
        assert again == seen[stop:]


def test_another_number_of_ranks_goes_on_with_the_rows_that_are_left(on_rank: OnRank) -> None:
    two = [on_rank(rank) for rank in range(2)]
    seen = []
    for data in two:
        batches = iter(data.train_dataloader())
        seen += [row for _ in range(3) for row in ids(next(batches))]
    alone = on_rank(0, world=1, each=WORLD * EACH)
    alone.load_state_dict(two[0].state_dict())
    left = [row for batch in alone.train_dataloader() for row in ids(batch)]
    assert sorted(seen + left) == list(range(40))
