import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lrlhf.datamodules.loading.loader import EpochOrder, EvalLoader, Ranks, TrainLoader
from lrlhf.datamodules.loading.sources import Fetching


def as_list(rows: Sequence[int]) -> list[int]:
    return list(rows)


def train_loader(
    rows: int = 23, batch_size: int = 4, *, seed: int = 7, workers: int = 0, **options: Any
) -> TrainLoader[int, list[int]]:
    return TrainLoader(
        list(range(rows)),
        EpochOrder([list(range(rows))], None, seed),
        batch_size,
        fetching=Fetching(as_list, workers),
        ranks=options.pop("ranks", Ranks()),
        **options,
    )


def take(loader: TrainLoader[int, list[int]], passes: int) -> list[list[int]]:
    return [batch for _ in range(passes) for batch in loader]


def test_the_rows_left_out_of_an_epoch_are_told_and_change(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        loader = train_loader()
    assert "the last 3 of its 23 rows" in caplog.text
    left_out = [set(range(23)) - {row for batch in loader for row in batch} for _ in range(6)]
    assert all(len(rows) == 3 for rows in left_out)
    assert len(set.union(*left_out)) > 3


# starting processes is slow, so with a worker only the edge of an epoch is tried
@pytest.mark.parametrize(
    ("taken", "workers"), [*((taken, 0) for taken in (0, 1, 4, 5, 6, 12)), (5, 1)]
)
def test_what_follows_a_resume_equals_the_uninterrupted_run(taken: int, workers: int) -> None:
    expected = take(train_loader(), 3)
    interrupted, seen = train_loader(workers=workers), []
    while len(seen) < taken:
        for batch in interrupted:
            seen.append(batch)
            if len(seen) == taken:
                break
    resumed = train_loader(workers=workers)
    resumed.load_state_dict(interrupted.state_dict())
    rest = [batch for _ in range(3 - taken // 5) for batch in resumed]
    assert seen + rest == expected


def test_passes_under_a_limit_go_on_where_the_last_one_ended() -> None:
    for limit, length in ((1.0, 5), (0.5, 2), (99, 5), (1, 1)):
        assert len(list(train_loader(pass_limit=limit))) == length
    limited = train_loader(pass_limit=3)
    passes = [list(limited) for _ in range(4)]
    assert [len(batches) for batches in passes] == [3, 3, 3, 3]
    assert [batch for batches in passes for batch in batches] == take(train_loader(), 3)[:12]


def test_two_ranks_share_the_batch_of_one() -> None:
    alone = take(train_loader(24, 8), 2)
    ranks = [take(train_loader(24, 4, ranks=Ranks(rank, 2)), 2) for rank in (0, 1)]
    assert [first + second for first, second in zip(*ranks, strict=True)] == alone


def test_rows_that_come_again_after_a_change_of_batch_size_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = train_loader(24, 4)
    next(iter(before))
    loader = train_loader(24, 3)
    loader.load_state_dict(before.state_dict())
    assert "1 rows of this epoch come again" in caplog.text
    order = EpochOrder([list(range(24))], None, 7).epoch(0).tolist()
    assert next(iter(loader)) == order[3:6]  # 4 rows were seen, whole batches of 3 are skipped


def test_going_through_the_data_takes_nothing_from_the_global_generator() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    take(train_loader(), 2)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize(
    ("rows", "world", "batch_size"), [(9, 1, 4), (3, 3, 1), (7, 2, 3), (8, 3, 2), (9, 2, 100)]
)
def test_ranks_evaluate_equally_many_batches_and_every_row_once(
    rows: int, world: int, batch_size: int
) -> None:
    def on_rank(rank: int) -> list[list[int]]:
        return list(
            EvalLoader(
                list(range(rows)), batch_size, fetching=Fetching(as_list), ranks=Ranks(rank, world)
            )
        )

    ranks = [on_rank(rank) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    flat = [row for batches in ranks for batch in batches for row in batch]
    assert sorted(flat) == list(range(rows))
    assert all(1 <= len(batch) <= max(batch_size, 2) for batches in ranks for batch in batches)
    if world == 1:
        assert flat == list(range(rows))
        assert len(ranks[0]) == -(-rows // batch_size)
    with pytest.raises(ValueError, match=rf"{rows} validation rows cannot be shared out over 99"):
        EvalLoader(list(range(rows)), 1, fetching=Fetching(as_list), ranks=Ranks(0, 99))


@pytest.mark.parametrize("options", [{}, {"pass_limit": 2}, {"ranks": Ranks(1, 2)}])
def test_the_upcoming_batches_are_those_that_come_next(options: dict[str, Any]) -> None:
    count = 2 * len(train_loader(**options)) + 1  # through the ends of passes and of two epochs
    loader = train_loader(**options)
    all_ahead = [loader.upcoming(skip) for skip in range(count)]
    foretold, seen = [loader.upcoming()], []
    while len(seen) < count:
        for batch in loader:
            seen.append(batch)
            state = loader.state_dict()
            foretold.append(loader.upcoming())
            assert loader.state_dict() == state
    assert all_ahead == seen[:count]
    assert foretold[:-1] == seen
