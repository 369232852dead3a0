"""Nothing piles up in a process that trains for long."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.faults.kills import soak
from tests.faults.soak import EVERY, Measure, Sample, excesses, growth


def test_what_grows_in_the_warm_up_alone_is_no_leak() -> None:
    early = [
        Sample(iteration, rss=iteration * 10_000_000, objects=9, descriptors=9, threads=9)
        for iteration in range(EVERY, 101, EVERY)
    ]
    late = [Sample(n, rss=10**9, objects=9, descriptors=9, threads=9) for n in range(110, 501, 10)]
    assert excesses(growth([*early, *late])) == []


def measured(leak: Callable[[], object] | None) -> dict[str, float]:
    """Measure this process in 300 iterations that do nothing but leak.

    What other tests have left running here may move a figure a little.
    """
    measure = Measure(leak)
    measure.on_train_start()
    for step in range(1, 301):
        measure.on_train_batch_end(SimpleNamespace(global_step=step))
    measure.on_train_end()
    return growth(measure.samples)


def test_what_a_process_keeps_is_named_and_nothing_else(tmp_path: Path) -> None:
    assert excesses(measured(None)) == []
    (found,) = excesses(measured(list))
    assert found.startswith("objects grows by 1 ")
    # a few would fit into what other tests have left free
    (found,) = excesses(measured(lambda: b"x" * random.randint(65536, 65537)))
    assert found.startswith("rss grows by")
    path = tmp_path / "file"
    path.touch()
    opened: list[int] = []
    grown = measured(lambda: opened.append(os.open(path, os.O_RDONLY)))
    for descriptor in opened:
        os.close(descriptor)
    assert any(line.startswith("descriptors grows by 1 ") for line in excesses(grown))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_500_iterations_leave_nothing_behind() -> None:
    # in a process of its own: other tests' threads and hooks grow too
    grown = soak("rloo", 500)
    assert grown["excesses"] == [], grown
