"""How many tokens go together where a device tells of its memory."""

from __future__ import annotations

import pytest
import torch

from lrlhf.models import TokenBudget

GPU = torch.device("cuda")
CPU = torch.device("cpu")


class LinearDevice:
    """A device on which ``n`` tokens take ``fixed + each * n`` bytes of a room of ``size``."""

    def __init__(self, size: int, fixed: int, each: int) -> None:
        self.left, self.fixed, self.each = size, fixed, each
        self.highest = self.resident = 5000

    def size(self) -> int:
        return 1 << 30

    def room(self) -> int:
        return self.left

    def allocated(self) -> int:
        return self.resident

    def peak(self) -> int:
        return self.highest

    def reset_peak(self) -> None:
        self.highest = self.resident

    def run(self, tokens: int) -> None:
        taken = self.fixed + self.each * tokens
        assert taken <= self.left, "out of memory"
        self.highest = max(self.highest, self.resident + taken)


def budget_on(device: LinearDevice) -> TokenBudget:
    return TokenBudget(lambda asked: device if asked.type == "cuda" else None)


def run(budget: TokenBudget, device: LinearDevice, tokens: int) -> None:
    with budget.measuring(tokens, GPU):
        device.run(tokens)


def grow(budget: TokenBudget, device: LinearDevice, times: int) -> int:
    """Use the budget so often; returns what it is in the end."""
    for _ in range(times):
        run(budget, device, budget.limit("auto", GPU) or 0)
        budget.update()
    return budget.limit("auto", GPU) or 0


@pytest.mark.parametrize(
    ("size", "fixed", "each"),
    [(10_000_000, 0, 100), (10_000_000, 4_000_000, 100), (900_000, 100_000, 200)],
)
def test_it_comes_close_to_what_fits_and_never_passes_it(size, fixed, each) -> None:
    device = LinearDevice(size, fixed, each)
    budget = budget_on(device)
    for _ in range(20):
        tokens = budget.limit("auto", GPU)
        run(budget, device, tokens)  # asserts that it fits
        budget.update()
    fits = (0.9 * size - fixed) / each
    assert 0.85 * fits <= budget.limit("auto", GPU) <= fits


def test_it_stays_once_it_is_close() -> None:
    device = LinearDevice(10_000_000, 1_000_000, 100)
    budget = budget_on(device)
    seen = []
    for _ in range(12):
        seen.append(budget.limit("auto", GPU))
        run(budget, device, seen[-1])
        budget.update()
    assert len(set(seen[-5:])) == 1


def test_the_first_time_does_not_count() -> None:
    device = LinearDevice(10_000_000, 0, 100)
    budget = budget_on(device)
    first = budget.limit("auto", GPU)
    run(budget, device, first)
    budget.update()
    assert budget.limit("auto", GPU) == first
    run(budget, device, first)
    budget.update()
    assert budget.limit("auto", GPU) == 8 * first  # 90,000 would fit; eightfold at a time


def test_it_shrinks_when_others_take_the_memory() -> None:
    device = LinearDevice(10_000_000, 0, 100)
    budget = budget_on(device)
    grow(budget, device, 5)
    assert budget.limit("auto", GPU) == 90_000
    run(budget, device, 90_000)
    device.left = 5_000_000
    with budget.measuring(49_000, GPU):  # rows of this length happened to come
        device.run(49_000)
    budget.update()
    assert budget.limit("auto", GPU) == 45_000


def test_few_tokens_say_nothing() -> None:
    device = LinearDevice(10_000_000, 4_000_000, 100)
    budget = budget_on(device)
    grow(budget, device, 8)
    settled = budget.limit("auto", GPU)
    run(budget, device, 10)
    budget.update()
    assert budget.limit("auto", GPU) == settled


def test_ranks_agree_on_the_smallest() -> None:
    device = LinearDevice(10_000_000, 0, 100)
    budget = budget_on(device)
    for _ in range(2):
        run(budget, device, 2048)
    budget.update(lambda own: min(own, 3000.0))
    assert budget.limit("auto", GPU) == 3000


def test_a_rank_without_a_measurement_follows_the_others() -> None:
    device = LinearDevice(10_000_000, 0, 100)
    budget = budget_on(device)
    run(budget, device, 10)
    budget.update(lambda own: min(own, 4096.0))
    assert budget.limit("auto", GPU) == 4096


def test_responses_that_end_early_do_not_let_it_grow_beyond_what_long_ones_take() -> None:
    device = LinearDevice(10_000_000, 0, 100)  # 90,000 tokens fit
    budget = budget_on(device)
    for _ in range(12):
        rows = max(1, budget.limit("auto", GPU) // 1280)
        with budget.measuring(rows * 1280, GPU) as computed:
            device.run(rows * 320)  # of up to 1,280 tokens each
            computed.tokens = rows * 320
        budget.update()
    assert 50_000 < budget.limit("auto", GPU) <= 90_000
    device.run(budget.limit("auto", GPU))  # one of full length: every row is as long


def test_on_another_device_it_starts_anew() -> None:
    device = LinearDevice(10_000_000, 0, 100)
    budget = budget_on(device)
    grow(budget, device, 4)
    smaller = LinearDevice(1_000_000, 0, 100)
    smaller.size = lambda: 1 << 29  # type: ignore[method-assign]
    again = budget_on(smaller)
    again.load_state_dict(budget.state_dict())
    assert again.limit("auto", GPU) == 2048


def test_deterministic_runs_measure_nothing() -> None:
    device = LinearDevice(10_000_000, 0, 100)
    budget = budget_on(device)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            run(budget, device, budget.limit("auto", GPU))
            budget.update()
    finally:
        torch.use_deterministic_algorithms(False)
    assert budget.limit("auto", GPU) == 2048


@pytest.mark.parametrize(("given", "expected"), [(100, 100), (None, None), ("auto", None)])
def test_on_a_cpu_only_a_number_limits(given, expected) -> None:
    asked = []
    budget = budget_on(LinearDevice(1, 0, 1))
    assert budget.limit(given, CPU) == expected
    with budget.measuring(10, CPU):
        pass
    budget.update(lambda own: asked.append(own) or own)
    assert asked == [], "ranks that measure nothing have nothing to agree on"


def test_a_resumed_run_cuts_rows_as_before() -> None:
    device = LinearDevice(10_000_000, 0, 100)
    budget = budget_on(device)
    grow(budget, device, 4)
    again = budget_on(device)
    again.load_state_dict(budget.state_dict())
    assert again.limit("auto", GPU) == budget.limit("auto", GPU) == 90_000


def test_a_failure_inside_is_not_measured() -> None:
    device = LinearDevice(1000, 0, 100)
    budget = budget_on(device)
    with pytest.raises(AssertionError, match="out of memory"):
        run(budget, device, 11)
    budget.update()
    assert budget.limit("auto", GPU) == 2048
