"""The sizes of an iteration add up, and sizes that cannot are refused with those that would."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrlhf.modules.policy.batch_plan import BatchPlan, Quantity, plan_batches, table_of


def _plan(**changes: Any) -> BatchPlan:
    sizes: dict[str, Any] = {
        "prompts_per_rank": 8,
        "num_generations": 4,
        "world_size": 2,
        "minibatch_size": 16,
        "num_iterations": 3,
    }
    return plan_batches(**(sizes | changes))


def test_the_numbers_of_an_iteration_on_two_processes() -> None:
    plan = _plan()

    assert plan.prompts == 16  # 8 x 2
    assert plan.responses_sampled == 64  # 16 x 4
    assert plan.responses_trained == 64
    assert plan.responses_per_rank == 32  # 8 x 4
    assert plan.minibatch_size == 16
    assert plan.minibatch_rows == 8  # 16 / 2
    assert plan.steps_per_iteration == 12  # 3 x 4


def test_dynamic_sampling_trains_on_fewer_responses_than_it_draws() -> None:
    plan = _plan(kept_prompts=6)

    assert plan.responses_sampled == 64
    assert plan.responses_per_rank == 24  # 6 x 4
    assert plan.responses_trained == 48
    assert plan.steps_per_iteration == 9  # 3 x 48 / 16


def test_without_a_minibatch_size_a_pass_is_one_step() -> None:
    plan = _plan(minibatch_size=None, num_iterations=1, kept_prompts=3)

    assert plan.minibatch_size == 24  # 3 x 4 x 2
    assert plan.steps_per_iteration == 1


@pytest.mark.parametrize(
    ("prompts", "steps"),
    [(8, 4), (3, 4), (1, 4)],  # 32, 12 and 4 responses on each process
)
def test_a_module_may_cut_a_rollout_into_steps_by_itself(prompts: int, steps: int) -> None:
    plan = _plan(prompts_per_rank=prompts, minibatch_size=None, default_minibatches=4)
    assert plan.steps_per_iteration // plan.num_iterations == steps
    assert plan.minibatch_size * steps == prompts * 4 * 2


@pytest.mark.parametrize(("rows", "steps"), [(6, 3), (7, 1), (2, 2)])
def test_a_rollout_that_does_not_divide_into_four_has_fewer_steps(rows: int, steps: int) -> None:
    plan = _plan(
        prompts_per_rank=rows, num_generations=1, minibatch_size=None, default_minibatches=4
    )
    assert plan.steps_per_iteration // plan.num_iterations == steps


def test_minibatches_may_be_counted_instead_of_measured() -> None:
    plan = _plan(minibatch_size=None, num_minibatches=8, default_minibatches=4)
    assert plan.steps_per_iteration // plan.num_iterations == 8
    assert plan.minibatch_size == 8  # 64 / 8


REFUSED = {
    "does not divide into so many": (
        {"minibatch_size": None, "num_minibatches": 5},
        "update.num_minibatches is 5, but each process has 32 responses, which do not split into "
        "5 equal parts; the nearest number that fits is 4",
    ),
    # on 2 processes, 64 responses: 2 x the divisors of 32 are 2 4 8 16 32 64
    "does not divide the responses": (
        {"minibatch_size": 24},
        "update.minibatch_size is 24, but an iteration has 64 responses, 32 on each of 2 "
        "process(es); the nearest sizes that fit are 16 and 32",
    ),
    "is no multiple of the processes": (
        {"minibatch_size": 9},
        "update.minibatch_size is 9, but an iteration has 64 responses, 32 on each of 2 "
        "process(es); the nearest sizes that fit are 8 and 16",
    ),
    "is less than the processes": (
        {"minibatch_size": 1},
        "update.minibatch_size is 1, but an iteration has 64 responses, 32 on each of 2 "
        "process(es); the nearest size that fits is 2",
    ),
    "divides the responses, but not those of a process": (
        # 3 x 2 responses on each of 4: 8 divides 24, but 2 x 4 rows split 6 into 3 steps; 4 into
        # 1.5: of the sizes 4, 8, 12 and 24 the neighbours of 16 are 12 and 24
        {"prompts_per_rank": 3, "num_generations": 2, "world_size": 4, "minibatch_size": 16},
        "update.minibatch_size is 16, but an iteration has 24 responses, 6 on each of 4 "
        "process(es); the nearest sizes that fit are 12 and 24",
    ),
    "is larger than the rollout": (
        {"minibatch_size": 128},
        "update.minibatch_size is 128, but an iteration has 64 responses, 32 on each of 2 "
        "process(es); the nearest size that fits is 64",
    ),
    "does not divide what dynamic sampling keeps": (
        # 5 x 4 x 2 = 40 responses: 2 x the divisors of 20 are 2 4 8 10 20 40
        {"kept_prompts": 5},
        "update.minibatch_size is 16, but an iteration has 40 responses, 20 on each of 2 "
        "process(es); the nearest sizes that fit are 10 and 20",
    ),
    "more prompts kept than drawn": (
        {"kept_prompts": 9},
        "dynamic_sampling.prompts is 9, but there are only 8 prompts per process "
        "(data.batch_size); the nearest number is 8",
    ),
    "no prompt kept": ({"kept_prompts": 0}, "dynamic_sampling.prompts is 0; it must be 1 or more"),
    "no prompt": ({"prompts_per_rank": 0}, "data.batch_size is 0; it must be 1 or more"),
    "no response": ({"num_generations": 0}, "num_generations is 0; it must be 1 or more"),
    "no pass": ({"num_iterations": 0}, "update.num_iterations is 0; it must be 1 or more"),
    "no step": ({"minibatch_size": 0}, "update.minibatch_size is 0; it must be 1 or more"),
    "no process": ({"world_size": 0}, "the number of processes is 0; it must be 1 or more"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        _plan(**changes)


@given(
    kept=st.integers(1, 12),
    dropped=st.integers(0, 5),
    generations=st.integers(1, 8),
    ranks=st.integers(1, 8),
    passes=st.integers(1, 4),
    rows=st.integers(1, 96),
)
def test_every_response_is_used_once_per_pass_or_the_sizes_are_refused(
    kept: int, dropped: int, generations: int, ranks: int, passes: int, rows: int
) -> None:
    fits = (kept * generations) % rows == 0
    sizes = {
        "prompts_per_rank": kept + dropped,
        "num_generations": generations,
        "world_size": ranks,
        "num_iterations": passes,
        "kept_prompts": kept,
    }
    if not fits:
        with pytest.raises(ValueError, match="nearest"):
            plan_batches(**sizes, minibatch_size=rows * ranks)
        return
    plan = plan_batches(**sizes, minibatch_size=rows * ranks)
    assert plan.steps_per_iteration * plan.minibatch_size == kept * generations * ranks * passes
    assert plan.minibatch_rows * ranks == plan.minibatch_size
    assert plan.responses_trained <= plan.responses_sampled


@given(rows=st.integers(1, 60), ranks=st.integers(1, 6), size=st.integers(1, 400))
def test_a_suggested_size_is_accepted(rows: int, ranks: int, size: int) -> None:
    def plan(minibatch_size: int) -> BatchPlan:
        return plan_batches(
            prompts_per_rank=rows,
            num_generations=1,
            world_size=ranks,
            minibatch_size=minibatch_size,
            num_iterations=1,
        )

    try:
        plan(size)
    except ValueError as refusal:
        suggested = str(refusal).rpartition("fit")[2].removeprefix("s").split()
        numbers = [int(word) for word in suggested if word.isdigit()]
        assert numbers
        for number in numbers:
            assert plan(number).minibatch_size == number


def _cells(table: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {what: rest for what, *rest in lines}


def test_the_table_has_one_line_per_number_with_its_unit_and_origin() -> None:
    cells = _cells(_plan(kept_prompts=6).table())

    assert cells["prompts"] == ["16", "data.batch_size × 2 processes"]
    assert cells["responses sampled, at most"] == ["64", "prompts × num_generations"]
    trained = "dynamic_sampling.prompts × num_generations × 2 processes"
    assert cells["responses trained on"] == ["48", trained]
    assert cells["responses per optimizer step"] == [
        "16",
        "update.minibatch_size, 8 on each process",
    ]
    assert cells["optimizer steps"][0] == "9"
    assert cells["off-policy optimizer steps"][0] == "8"


def test_what_is_sampled_beside_the_responses_is_counted() -> None:
    cells = _cells(_plan(beside=["greedy"]).table())

    # 16 prompts x (4 + 1)
    expected = ["80", "prompts × (num_generations + 1 greedy)"]
    assert cells["responses sampled, at most"] == expected
    assert cells["responses trained on"][0] == "64"


def test_a_number_that_is_not_known_says_so_and_long_lines_do_not_wrap() -> None:
    table = table_of("the run", [Quantity("steps", None, "x" * 300)])

    assert table.splitlines()[-1] == f"| steps   | unknown | {'x' * 300} |"
