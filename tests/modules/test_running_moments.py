"""Running moments equal those of all scores at once."""

import math
from types import SimpleNamespace

import pytest
import torch

from lrlhf.modules.policy.running_moments import RunningMoments
from lrlhf.run import Collectives

NAN = float("nan")


def one_process() -> Collectives:
    return Collectives(SimpleNamespace(world_size=1, global_rank=0))  # type: ignore[arg-type]


def test_moments_of_parts_are_those_of_the_whole() -> None:
    moments = RunningMoments()
    parts = [torch.tensor([1.0, 2.0, NAN]), torch.tensor([NAN]), torch.tensor([4.0, 9.0, -3.0])]
    for part in parts:
        moments.update(part, one_process())
    # mean of 1 2 4 9 -3; squared distances 2.56 0.36 1.96 40.96 31.36
    assert moments.count == 5
    assert moments.mean == pytest.approx(2.6)
    assert moments.deviation == pytest.approx(math.sqrt(77.2 / 4))
    now = moments.moments
    scaled = now.scaled(torch.tensor([2.6, NAN]), "mean_std")
    assert scaled[0] == pytest.approx(0.0, abs=1e-6)
    assert scaled[1].isnan()
    assert now.scaled(torch.tensor([1.0]), "std")[0] == pytest.approx(1 / math.sqrt(19.3))
    assert now.scaled(torch.tensor([1.0]), "none")[0] == 1.0


def test_large_offsets_do_not_cost_precision() -> None:
    moments = RunningMoments()
    for part in torch.tensor([0.0, 1.0, 2.0, 3.0]).double().add(1e8).split(1):
        moments.update(part, one_process())
    assert moments.deviation == pytest.approx(math.sqrt(5 / 3), rel=1e-6)


def test_nothing_is_scaled_before_scores_differ() -> None:
    moments = RunningMoments()
    moments.update(torch.tensor([5.0, 5.0]), one_process())
    assert moments.deviation == 1.0
