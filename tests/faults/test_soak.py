"""Nothing piles up in a process that trains for long."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.faults.campaign import soak
from tests.faults.soak import EVERY, Measure, Sample, excesses, growth


def samples_of(**slopes: float) -> list[Sample]:
    start = {"rss": 5e8, "objects": 200_000, "descriptors": 40, "threads": 3}
    return [
        Sample(
            iteration=iteration,
            **{name: int(value + slopes.get(name, 0) * iteration) for name, value in start.items()},
        )
        for iteration in range(EVERY, 501, EVERY)
    ]


def test_a_process_that_stays_as_it_is_passes() -> None:
    assert excesses(growth(samples_of())) == []


@pytest.mark.parametrize(
    ("name", "slope"), [("rss", 4096), ("objects", 1), ("descriptors", 0.1), ("threads", 0.1)]
)
def test_each_quantity_that_grows_is_named(name: str, slope: float) -> None:
    (found,) = excesses(growth(samples_of(**{name: slope})))
    assert found.startswith(f"{name} grows by")


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


def test_a_process_that_does_nothing_does_not_grow() -> None:
    assert excesses(measured(None)) == []


def test_one_small_list_per_iteration_is_noticed() -> None:
    grown = measured(list)
    assert grown["objects"] == pytest.approx(1, abs=0.2)
    (found,) = excesses(grown)
    assert found.startswith("objects grows by")


def test_64_kilobytes_per_iteration_are_noticed() -> None:
    # a few would fit into what other tests have left free
    (found,) = excesses(measured(lambda: b"x" * random.randint(65536, 65537)))
    assert found.startswith("rss grows by")


def test_open_files_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    opened: list[int] = []

    def leak() -> None:
        opened.append(os.open(path, os.O_RDONLY))

    grown = measured(leak)
    for descriptor in opened:
        os.close(descriptor)
    assert grown["descriptors"] == pytest.approx(1, abs=0.1)
    assert any(line.startswith("descriptors grows by") for line in excesses(grown))


@pytest.mark.slow
@pytest.mark.exhaustive
def test_500_iterations_leave_nothing_behind() -> None:
    # in a process of its own: other tests' threads and hooks grow too
    (grown,) = soak(["RLOO"], 500)
    assert grown["excesses"] == [], grown
