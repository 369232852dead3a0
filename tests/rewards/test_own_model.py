"""Rewards with a model in the process: loaded once, and again by every copy."""

import copy
import pickle
import threading
from typing import Any

import pytest

from lrlhf.rewards.learned import OwnModelReward


class _Model:
    """Cannot be copied, as what lives on a device."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


class _Named(OwnModelReward[_Model]):
    def __init__(self, value: float) -> None:
        self.value, self.loads = value, 0
        self._start_afresh()

    def _load(self) -> _Model:
        self.loads += 1
        return _Model()

    def __call__(self, *, completions: Any, **columns: Any) -> list[float | None]:
        self._ready()
        return [self.value] * len(completions)


def test_a_model_is_loaded_once() -> None:
    reward = _Named(2.0)
    assert reward.loads == 0
    reward.prepare()
    reward.prepare()
    reward(completions=["a"])
    assert reward.loads == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))])
def test_a_copy_has_the_settings_and_loads_a_model_of_its_own(copied: Any) -> None:
    reward = _Named(2.0)
    reward.prepare()
    other = copied(reward)
    assert other(completions=["a"]) == [2.0]
    assert (reward.loads, other.loads) == (1, 2)  # the count is one of the settings here
    assert other._ready() is not reward._ready()
