"""Cutting a batch loses no row, repeats none, counts what is computed, and keeps its budget."""

from dataclasses import replace

import pytest
import torch

from lrlhf.models import allow_packing, hidden_states
from lrlhf.rollout.minibatches import (
    MicroBatch,
    micro_batch_rows,
    minibatches,
    plan_micro_batches,
    trim,
)
from lrlhf.types import SequenceBatch
from tests.models.families import llama, seeded

LENGTHS = [5, 2, 9, 1, 4, 4]
PROMPTS = {0: 10, 1: 4, 2: 3}
ROWS = [(0, 5), (1, 2), (0, 5), (2, 1), (1, 6), (0, 1), (0, 4)]
"""Prompt and tokens of the response."""
GIVEN = sum(PROMPTS[prompt] + response for prompt, response in ROWS)


def numbered() -> SequenceBatch:
    """Every token says which row it is of."""
    ids = torch.arange(len(LENGTHS))[:, None].expand(-1, 12).clone()
    mask = torch.arange(12) < torch.tensor(LENGTHS)[:, None]
    return SequenceBatch(input_ids=ids, attention_mask=mask, response_mask=mask)


def answers(*, groups: bool = True) -> SequenceBatch:
    """Every token says which prompt, or which row, it is of."""
    ids = torch.zeros(len(ROWS), 16, dtype=torch.long)
    for index, (prompt, response) in enumerate(ROWS):
        ids[index, : PROMPTS[prompt]] = 40 + prompt
        ids[index, PROMPTS[prompt] : PROMPTS[prompt] + response] = index + 1
    return SequenceBatch(
        input_ids=ids,
        attention_mask=ids != 0,
        response_mask=(ids != 0) & (ids < 40),
        group_ids=torch.tensor([prompt for prompt, _ in ROWS]) if groups else None,
    )


def rows_of(batches: list[MicroBatch]) -> list[list[int]]:
    return [sorted(one.rows.tolist()) for one in batches]


def drawn(batch: SequenceBatch, size: int) -> list[list[int]]:
    return [part.input_ids[:, 0].tolist() for part in minibatches(batch, size=size)]


def test_minibatches_are_drawn_at_random_and_keep_groups_together_where_they_fit() -> None:
    torch.manual_seed(3)
    first, second = drawn(numbered(), 2), drawn(numbered(), 2)
    assert sorted(row for part in first for row in part) == list(range(6))
    assert first != second
    torch.manual_seed(3)
    assert first == drawn(numbered(), 2)
    grouped = replace(numbered(), group_ids=torch.tensor([7, 7, 2, 2, 5, 5]))
    assert sorted(drawn(grouped, 2)) == [[0, 1], [2, 3], [4, 5]]
    # wherever siblings stand
    apart = replace(numbered(), group_ids=torch.tensor([7, 2, 5, 5, 2, 7]))
    assert sorted(map(sorted, drawn(apart, 2))) == [[0, 5], [1, 4], [2, 3]]
    # three rows cannot be whole pairs, and groups of several sizes fill no part
    assert sorted(row for part in drawn(grouped, 3) for row in part) == list(range(6))
    uneven = replace(numbered(), group_ids=torch.tensor([1, 1, 1, 2, 2, 3]))
    assert len(drawn(uneven, 2)) == 3
    with pytest.raises(ValueError, match="6 rows do not split into parts of 4"):
        drawn(uneven, 4)


def test_trimming_takes_the_padding_behind_the_longest_row_and_no_more() -> None:
    batch = replace(numbered(), group_ids=torch.arange(6))
    short = trim(batch.select(torch.tensor([0, 1, 3])))
    assert short.input_ids.tolist() == [[0] * 5, [1] * 5, [3] * 5]
    assert short.attention_mask.sum(dim=1).tolist() == [5, 2, 1]
    assert short.group_ids is not None
    assert short.group_ids.tolist() == [0, 1, 3]


def test_a_row_that_is_longer_than_the_budget_is_alone() -> None:
    groups = micro_batch_rows(torch.tensor([3, 9, 3]), max_tokens=6)
    assert [group.tolist() for group in groups] == [[1], [0, 2]]


def test_rows_of_similar_length_go_together_the_longest_first() -> None:
    # lengths 9 5 4 4 2 1 under a budget of 10: 9 | 5 4 (2 x 5) | 4 2 (2 x 4 <= 10) | 1
    groups = micro_batch_rows(torch.tensor(LENGTHS), max_tokens=10)
    assert [group.tolist() for group in groups] == [[2], [0, 4], [5, 1], [3]]
    # in one group: 3 + 3, then the first of the larger ones 2 + 1 + 3, …
    for least, sizes in {2: [3, 3], 3: [2, 1, 3], 4: [2, 1, 2, 1], 100: [1] * 6}.items():
        groups = micro_batch_rows(torch.tensor(LENGTHS), max_tokens=None, at_least=least)
        assert [len(group) for group in groups] == sizes


def test_a_prompt_and_its_responses_stay_together_where_they_fit() -> None:
    # 25, 12 and 4 tokens
    batches = plan_micro_batches(answers(), max_tokens=25, packed=True)
    assert rows_of(batches) == [[0, 2, 5, 6], [1, 3, 4]]
    assert [one.computed for one in batches] == [25, 16]
    # longest first: 10 + 5 + 5 = 20, then 10 + 4 + 1 = 15; 4 + 6 + 2 = 12; the last 4 fit to the 15
    batches = plan_micro_batches(answers(), max_tokens=20, packed=True)
    assert rows_of(batches) == [[0, 2], [3, 5, 6], [1, 4]]
    assert [one.computed for one in batches] == [20, 19, 12]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("budget", "least"), [(None, 3), (1, 1), (12, 7), (20, 3), (1000, 20)])
def test_every_row_is_in_one_micro_batch(budget: int | None, least: int, packed: bool) -> None:
    batches = plan_micro_batches(answers(), max_tokens=budget, packed=packed, at_least=least)
    assert sorted(int(row) for one in batches for row in one.rows) == list(range(7))
    assert len(batches) >= min(least, 7)
    assert sum(one.tokens for one in batches) == GIVEN
    for one in batches:
        assert budget is None or len(one.rows) == 1 or one.computed <= budget
    empty = answers().select(torch.tensor([], dtype=torch.long))
    assert plan_micro_batches(empty, max_tokens=budget, packed=packed, at_least=least) == []


@torch.no_grad()
@pytest.mark.parametrize("share", [True, False])
def test_what_is_planned_is_what_goes_through_the_model(share: bool) -> None:
    model = seeded(llama)
    assert allow_packing(model)
    for one in plan_micro_batches(answers(), max_tokens=20, packed=True, shared=share):
        hidden = hidden_states(model, answers().select(one.rows), share=share)
        assert len(hidden.states) == one.computed


@pytest.mark.parametrize(
    ("groups", "packed", "computed"),
    [
        (True, True, 10 + 4 + 3 + sum(response for _, response in ROWS)),  # prompts once
        (False, True, GIVEN),
        (True, False, 7 * 15),
    ],
)
def test_what_is_computed_is_counted(groups: bool, packed: bool, computed: int) -> None:
    (one,) = plan_micro_batches(answers(groups=groups), max_tokens=None, packed=packed)
    assert (one.tokens, one.computed) == (GIVEN, computed)
    assert (one.padding, one.shared) == (max(0, computed - GIVEN), max(0, GIVEN - computed))
