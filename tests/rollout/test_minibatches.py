"""Cutting a batch loses no row, repeats none, and stays within its budget."""

from dataclasses import replace

import pytest
import torch

from lrlhf.rollout import micro_batch_rows, minibatches
from lrlhf.types import SequenceBatch
from tests.batches import micro_batches

LENGTHS = [5, 2, 9, 1, 4, 4]


def batch() -> SequenceBatch:
    width = 12
    ids = torch.arange(len(LENGTHS))[:, None].expand(-1, width).clone()
    mask = torch.arange(width) < torch.tensor(LENGTHS)[:, None]
    return SequenceBatch(input_ids=ids, attention_mask=mask, response_mask=mask)


def test_the_longest_rows_come_first() -> None:
    # lengths 9 5 4 4 2 1 under a budget of 10: 9 | 5 4 (2 x 5) | 4 2 (2 x 4 <= 10) | 1
    groups = micro_batch_rows(torch.tensor(LENGTHS), max_tokens=10)
    assert [group.tolist() for group in groups] == [[2], [0, 4], [5, 1], [3]]


def test_minibatches_are_drawn_at_random_and_hold_every_row_once() -> None:
    torch.manual_seed(3)
    first = [part.input_ids[:, 0].tolist() for part in minibatches(batch(), size=2)]
    second = [part.input_ids[:, 0].tolist() for part in minibatches(batch(), size=2)]
    assert sorted(row for part in first for row in part) == list(range(6))
    assert first != second
    torch.manual_seed(3)
    assert first == [part.input_ids[:, 0].tolist() for part in minibatches(batch(), size=2)]


def test_groups_stay_together_where_the_size_allows_it() -> None:
    torch.manual_seed(3)
    grouped = replace(batch(), group_ids=torch.tensor([7, 7, 2, 2, 5, 5]))
    drawn = [part.input_ids[:, 0].tolist() for part in minibatches(grouped, size=2)]
    assert sorted(drawn) == [[0, 1], [2, 3], [4, 5]]
    # three rows cannot be whole pairs, and groups of several sizes fill no part
    assert sorted(row for part in minibatches(grouped, size=3) for row in part.input_ids[:, 0]) == [
        *range(6)
    ]
    uneven = replace(batch(), group_ids=torch.tensor([1, 1, 1, 2, 2, 3]))
    assert len(list(minibatches(uneven, size=2))) == 3
    with pytest.raises(ValueError, match="6 rows do not split into parts of 4"):
        list(minibatches(uneven, size=4))


@pytest.mark.parametrize(
    ("budget", "least"), [(None, 1), (None, 5), (1, 2), (9, 3), (10, 7), (18, 100)]
)
def test_ranks_can_make_equally_many_groups(least: int, budget: int | None) -> None:
    lengths = torch.tensor(LENGTHS)
    usual = micro_batch_rows(lengths, max_tokens=budget)
    groups = micro_batch_rows(lengths, max_tokens=budget, at_least=least)
    # as many as asked for, where the budget does not make more and the rows suffice
    assert len(groups) == max(len(usual), min(least, len(LENGTHS)))
    assert all(len(group) > 0 for group in groups)
    # every row once, still the longest first, and no group larger than it would have been
    rows = [int(row) for group in groups for row in group]
    assert rows == [int(row) for group in usual for row in group]
    assert [LENGTHS[row] for row in rows] == sorted(LENGTHS, reverse=True)
    assert max(map(len, groups)) <= max(map(len, usual))
    for part in micro_batches(batch(), max_tokens=budget, at_least=least):  # each is trimmed
        longest = max(LENGTHS[int(row)] for row in part.input_ids[:, 0])
        assert part.input_ids.shape[1] == longest
        assert budget is None or len(part) == 1 or len(part) * longest <= budget
    assert micro_batch_rows(torch.tensor([], dtype=torch.long), max_tokens=budget) == []


def test_the_largest_group_is_split_first() -> None:
    # lengths 9 5 4 4 2 1 in one group: 3 + 3, then the first of the larger ones 2 + 1 + 3, …
    for least, sizes in {2: [3, 3], 3: [2, 1, 3], 4: [2, 1, 2, 1], 5: [1, 1, 1, 2, 1]}.items():
        groups = micro_batch_rows(torch.tensor(LENGTHS), max_tokens=None, at_least=least)
        assert [len(group) for group in groups] == sizes
