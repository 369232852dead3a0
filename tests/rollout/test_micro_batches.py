"""Micro-batches hold every row once, count what is computed, and stay within the budget."""

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


def rows_of(batches: list[MicroBatch]) -> list[list[int]]:
    return [sorted(one.rows.tolist()) for one in batches]


GIVEN = sum(PROMPTS[prompt] + response for prompt, response in ROWS)


def test_a_prompt_and_its_responses_stay_together_where_they_fit() -> None:
    # 25, 12 and 4 tokens
    batches = plan_micro_batches(batch(), max_tokens=25, packed=True)
    assert rows_of(batches) == [[0, 2, 5, 6], [1, 3, 4]]
    assert [one.computed for one in batches] == [25, 16]


def test_a_prompt_with_too_many_responses_is_computed_again() -> None:
    # longest first: 10 + 5 + 5 = 20, then 10 + 4 + 1 = 15; 4 + 6 + 2 = 12; the last 4 fit to the 15
    batches = plan_micro_batches(batch(), max_tokens=20, packed=True)
    assert rows_of(batches) == [[0, 2], [3, 5, 6], [1, 4]]
    assert [one.computed for one in batches] == [20, 19, 12]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("budget", "least"), [(None, 1), (None, 3), (1, 1), (12, 7), (20, 3), (1000, 20)]
)
def test_every_row_is_in_one_micro_batch(budget: int | None, least: int, packed: bool) -> None:
    batches = plan_micro_batches(batch(), max_tokens=budget, packed=packed, at_least=least)
    assert sorted(int(row) for one in batches for row in one.rows) == list(range(7))
    assert len(batches) >= min(least, 7)
    assert sum(one.given for one in batches) == GIVEN
    for one in batches:
        if budget is not None and len(one.rows) > 1:
            assert one.computed <= budget


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


@pytest.mark.parametrize(
    ("groups", "packed", "computed"),
    [
        (True, True, 10 + 4 + 3 + sum(response for _, response in ROWS)),  # prompts once
        (False, True, GIVEN),
        (True, False, 7 * 15),
    ],
)
def test_what_is_computed_is_counted(groups: bool, packed: bool, computed: int) -> None:
    (one,) = plan_micro_batches(batch(groups=groups), max_tokens=None, packed=packed)
    assert (one.given, one.computed) == (GIVEN, computed)
    assert (one.padding, one.shared) == (max(0, computed - GIVEN), max(0, GIVEN - computed))
    empty = batch().select(torch.tensor([], dtype=torch.long))
    assert plan_micro_batches(empty, max_tokens=8, packed=packed, at_least=3) == []
