"""The sizes of an iteration add up, and sizes that cannot are refused with those that would."""

import re
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from lrlhf.modules.policy.iteration import BatchPlan, Quantity, plain_text, plan_batches, table_of
from tests.faults.fuzz_settings import fuzzing


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
    assert plan.responses_sampled == plan.responses_trained == 64  # 16 x 4
    assert plan.responses_per_rank == 32  # 8 x 4
    assert plan.minibatch_size == 16
    assert plan.minibatch_rows == 8  # 16 / 2
    assert plan.steps_per_iteration == 12  # 3 x 4
    kept = _plan(kept_prompts=6)
    assert kept.responses_sampled == 64
    assert kept.responses_per_rank == 24  # 6 x 4
    assert kept.responses_trained == 48
    assert kept.steps_per_iteration == 9  # 3 x 48 / 16


@pytest.mark.parametrize(
    ("changes", "size", "steps"),
    [
        # without any size a pass is one step, unless the module cuts it: 3 x 4 x 2 responses
        ({"kept_prompts": 3}, 24, 1),
        ({"default_minibatches": 4}, 16, 4),
        ({"default_minibatches": 4, "prompts_per_rank": 1}, 2, 4),
        # a rollout that does not divide into four has fewer steps
        ({"default_minibatches": 4, "prompts_per_rank": 6, "num_generations": 1}, 4, 3),
        ({"default_minibatches": 4, "prompts_per_rank": 7, "num_generations": 1}, 14, 1),
        # minibatches may be counted instead of measured: 64 / 8
        ({"default_minibatches": 4, "num_minibatches": 8}, 8, 8),
    ],
)
def test_a_pass_is_cut_into_steps_without_a_minibatch_size(
    changes: dict[str, int], size: int, steps: int
) -> None:
    plan = _plan(minibatch_size=None, **changes)
    assert (plan.minibatch_size, plan.steps_per_iteration // plan.num_iterations) == (size, steps)


SIZES = (
    "update.minibatch_size is {}, but an iteration has {} responses, {} on each of {} process(es); "
    "the nearest {} {}"
)
REFUSED = {
    "does not divide into so many": (
        {"minibatch_size": None, "num_minibatches": 5},
        "update.num_minibatches is 5, but each process has 32 responses, which do not split into "
        "5 equal parts; the nearest number that fits is 4",
    ),
    # on 2 processes, 64 responses: 2 x the divisors of 32 are 2 4 8 16 32 64
    "does not divide the responses": (
        {"minibatch_size": 24},
        SIZES.format(24, 64, 32, 2, "sizes that fit are", "16 and 32"),
    ),
    "is larger than the rollout": (
        {"minibatch_size": 128},
        SIZES.format(128, 64, 32, 2, "size that fits is", "64"),
    ),
    "divides the responses, but not those of a process": (
        # 3 x 2 responses on each of 4: 8 divides 24, but 2 x 4 rows split 6 into 3 steps; 4 into
        # 1.5: of the sizes 4, 8, 12 and 24 the neighbours of 16 are 12 and 24
        {"prompts_per_rank": 3, "num_generations": 2, "world_size": 4, "minibatch_size": 16},
        SIZES.format(16, 24, 6, 4, "sizes that fit are", "12 and 24"),
    ),
    "does not divide what dynamic sampling keeps": (
        # 5 x 4 x 2 = 40 responses: 2 x the divisors of 20 are 2 4 8 10 20 40
        {"kept_prompts": 5},
        SIZES.format(16, 40, 20, 2, "sizes that fit are", "10 and 20"),
    ),
    "more prompts kept than drawn": (
        {"kept_prompts": 9},
        "dynamic_sampling.prompts is 9, but there are only 8 prompts per process "
        "(data.batch_size); the nearest number is 8",
    ),
    "no prompt": ({"prompts_per_rank": 0}, "data.batch_size is 0; it must be 1 or more"),
    "no step": ({"minibatch_size": 0}, "update.minibatch_size is 0; it must be 1 or more"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_sizes_that_do_not_fit_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        _plan(**changes)


@fuzzing(100)
@given(
    kept=st.integers(1, 12),
    dropped=st.integers(0, 5),
    generations=st.integers(1, 8),
    ranks=st.integers(1, 8),
    passes=st.integers(1, 4),
    size=st.integers(1, 400),
)
def test_every_response_is_used_once_per_pass_or_sizes_that_fit_are_suggested(
    kept: int, dropped: int, generations: int, ranks: int, passes: int, size: int
) -> None:
    sizes = {
        "prompts_per_rank": kept + dropped,
        "num_generations": generations,
        "world_size": ranks,
        "num_iterations": passes,
        "kept_prompts": kept,
    }
    rows, rest = divmod(size, ranks)
    if rest or rows == 0 or (kept * generations) % rows:
        with pytest.raises(ValueError, match="nearest") as refusal:
            plan_batches(**sizes, minibatch_size=size)
        suggested = str(refusal.value).rpartition("fit")[2].removeprefix("s").split()
        numbers = [int(word) for word in suggested if word.isdigit()]
        assert numbers
        for number in numbers:
            assert plan_batches(**sizes, minibatch_size=number).minibatch_size == number
        return
    plan = plan_batches(**sizes, minibatch_size=size)
    assert plan.steps_per_iteration * plan.minibatch_size == kept * generations * ranks * passes
    assert plan.minibatch_rows * ranks == plan.minibatch_size
    assert plan.responses_trained <= plan.responses_sampled


def _lines(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def _cells(table: str) -> dict[str, list[str]]:
    return {what: rest for what, *rest in _lines(table)}


def test_the_table_has_one_line_per_number_with_its_unit_and_origin() -> None:
    cells = _cells(_plan(kept_prompts=6).table())
    trained = "dynamic_sampling.prompts × num_generations × 2 processes"
    assert cells["prompts"] == ["16", "data.batch_size × 2 processes"]
    assert cells["responses sampled, at most"] == ["64", "prompts × num_generations"]
    assert cells["responses trained on"] == ["48", trained]
    assert cells["responses per optimizer step"] == [
        "16",
        "update.minibatch_size, 8 on each process",
    ]
    assert cells["off-policy optimizer steps"][0] == "8"
    unknown = table_of("the run", [Quantity("steps", None, "x" * 300)])
    # long lines do not wrap
    assert unknown.splitlines()[-1] == f"| steps   | unknown | {'x' * 300} |"
    beside = _cells(_plan(extra_samples=["greedy"]).table())["responses sampled, at most"]
    assert beside == ["80", "prompts × (num_generations + 1 greedy)"]  # 16 x (4 + 1)


def test_on_a_narrow_terminal_origins_go_on_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "41")
    # 41 - 12 for the bars and their blanks - 9 - 6 leaves 16 or fewer for the origin
    table = table_of("the run", [Quantity("responses", 48, "prompts of data × 3 for each")])
    assert table.splitlines()[0].startswith("| the run   | number | from")
    assert max(map(len, table.splitlines())) <= 41
    lines = _lines(table)
    assert [cells[:2] for cells in lines[2:]] == [["responses", "48"], ["", ""]]
    assert " ".join(cells[2] for cells in lines[2:]) == "prompts of data × 3 for each"


def test_a_table_is_text_in_a_notebook_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    table = Table("name", box=None)
    table.add_row("value")
    assert [line.strip() for line in plain_text(table).splitlines()] == ["name", "value"]
