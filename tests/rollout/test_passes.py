"""Forward passes hold every row once, count what is computed, and stay within the budget."""

from dataclasses import replace

import pytest
import torch

from lrlhf.models import allow_packing, hidden_states
from lrlhf.rollout import MicroBatch, plan_micro_batches
from lrlhf.types import SequenceBatch
from tests.models.families import llama, seeded

PROMPTS = {0: 10, 1: 4, 2: 3}
ROWS = [(0, 5), (1, 2), (0, 5), (2, 1), (1, 6), (0, 1), (0, 4)]
"""Prompt and tokens of the response."""


def batch(*, groups: bool = True) -> SequenceBatch:
    """Every token says which prompt, or which row, it is of."""
    width = 16
    ids = torch.zeros(len(ROWS), width, dtype=torch.long)
    for index, (prompt, response) in enumerate(ROWS):
        ids[index, : PROMPTS[prompt]] = 100 + prompt
        ids[index, PROMPTS[prompt] : PROMPTS[prompt] + response] = index + 1
    mask = ids != 0
    return SequenceBatch(
        input_ids=ids,
        attention_mask=mask,
        response_mask=mask & (ids < 100),
        group_ids=torch.tensor([prompt for prompt, _ in ROWS]) if groups else None,
    )


def rows_of(passes: list[MicroBatch]) -> list[list[int]]:
    return [sorted(one.rows.tolist()) for one in passes]


GIVEN = sum(PROMPTS[prompt] + response for prompt, response in ROWS)


def test_without_a_budget_there_is_one_pass() -> None:
    (one,) = plan_micro_batches(batch(), max_tokens=None, packed=True)
    assert sorted(one.rows.tolist()) == list(range(7))
    # prompts once, responses each
    assert one.computed == 10 + 4 + 3 + sum(response for _, response in ROWS)
    assert (one.given, one.padding, one.shared) == (GIVEN, 0, 10 * 3 + 4)


def test_a_prompt_and_its_responses_stay_together_where_they_fit() -> None:
    # 25, 12 and 4 tokens
    passes = plan_micro_batches(batch(), max_tokens=25, packed=True)
    assert rows_of(passes) == [[0, 2, 5, 6], [1, 3, 4]]
    assert [one.computed for one in passes] == [25, 16]


def test_a_prompt_with_too_many_responses_is_computed_again() -> None:
    # longest first: 10 + 5 + 5 = 20, then 10 + 4 + 1 = 15; 4 + 6 + 2 = 12; the last 4 fit to the 15
    passes = plan_micro_batches(batch(), max_tokens=20, packed=True)
    assert rows_of(passes) == [[0, 2], [3, 5, 6], [1, 4]]
    assert [one.computed for one in passes] == [20, 19, 12]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("budget", [None, 1, 12, 20, 1000])
@pytest.mark.parametrize("least", [1, 3, 7, 20])
def test_every_row_is_in_one_pass(budget: int | None, least: int, packed: bool) -> None:
    passes = plan_micro_batches(batch(), max_tokens=budget, packed=packed, at_least=least)
    assert sorted(int(row) for one in passes for row in one.rows) == list(range(7))
    assert len(passes) >= min(least, 7)
    assert sum(one.given for one in passes) == GIVEN
    for one in passes:
        if budget is not None and len(one.rows) > 1:
            assert one.computed <= budget


def test_rows_without_groups_share_nothing_and_need_no_padding() -> None:
    (one,) = plan_micro_batches(batch(groups=False), max_tokens=None, packed=True)
    assert one.computed == one.given == GIVEN


def test_padded_rows_count_their_padding() -> None:
    (one,) = plan_micro_batches(batch(), max_tokens=None, packed=False)
    assert one.computed == 7 * 15
    assert (one.padding, one.shared) == (7 * 15 - GIVEN, 0)


def test_no_rows_need_no_pass() -> None:
    empty = batch().select(torch.tensor([], dtype=torch.long))
    assert plan_micro_batches(empty, max_tokens=8, packed=True, at_least=3) == []


@torch.no_grad()
@pytest.mark.parametrize("share", [True, False])
def test_what_is_planned_is_what_goes_through_the_model(share: bool) -> None:
    model = seeded(llama)
    assert allow_packing(model)
    ids = batch().input_ids
    whole = replace(batch(), input_ids=torch.where(ids < 100, ids, ids - 60))  # in its vocabulary
    for budget in (None, 20):
        plan = plan_micro_batches(whole, max_tokens=budget, packed=True, shared=share)
        for one in plan:
            hidden = hidden_states(model, whole.select(one.rows), share=share)
            assert len(hidden.states) == one.computed
