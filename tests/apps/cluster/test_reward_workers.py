"""Reward workers on a real Ray cluster say exactly what the same rewards say without one."""

import copy
import os
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("ray", reason="the extra ray is not installed")

import ray

from lrlhf.apps.cluster.connection import NAMESPACE
from lrlhf.apps.cluster.rewards import NAME, RayRewards, RewardWorker
from lrlhf.media import Audio, Video
from lrlhf.rewards import RewardResult, Rewards
from lrlhf.rewards.function import CompletionText, CompletionTurns, RewardError, TextSegment
from lrlhf.types import Episode, Message
from tests.apps.cluster.toys import CountsTurns, darkened

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]
SPACE = "tests"


@pytest.fixture(scope="module")
def _cluster() -> Iterator[None]:
    before = dict(os.environ)
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", NAMESPACE: SPACE}
    os.environ |= {"RAY_memory_monitor_refresh_ms": "0"}
    sizes = {"num_cpus": 1, "object_store_memory": 100_000_000, "include_dashboard": False}
    try:
        ray.init(address="local", namespace=SPACE, log_to_driver=False, **sizes)
        yield
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def through_a_worker(_cluster: None) -> Iterator[Callable[..., RayRewards]]:
    """Puts rewards into a worker of the cluster, as a launch does."""
    workers: list[Any] = []

    def place(*arguments: Any, **options: Any) -> RayRewards:
        pickled = pickle.dumps(Rewards(*arguments, **options))
        actor = ray.remote(RewardWorker).options(name=f"{NAME}000", num_cpus=0)
        workers.append(actor.remote(pickled, []))
        return RayRewards(*arguments, **options)

    yield place
    for worker in workers:
        ray.kill(worker)
    while ray.util.list_named_actors():  # it goes a moment later, and the next has its name
        time.sleep(0.05)


def assert_same(found: RewardResult, expected: RewardResult) -> None:
    """All but the seconds, NaN being equal to itself."""
    for name in ("scores", "per_function", "weights", "turn_weights"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=0, atol=0, equal_nan=True
        )
    for name in ("names", "metrics", "extras", "failures", "step_rewards"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.seconds.keys() == expected.seconds.keys()


def shown(size: int) -> list[dict[str, Any]]:
    """Columns of three responses: the first two are to one prompt, the last sees nothing."""
    random = np.random.default_rng(size)
    pixels = random.integers(0, 256, (5, size, size, 3), dtype=np.uint8)
    pictures = [Image.fromarray(pixels[0]), Image.fromarray(pixels[0, ..., 0])]
    sound = Audio(random.standard_normal(size * size).astype(np.float32), 16_000)
    own = {"images": pictures, "videos": [Video(pixels[1:], 2.0)], "audios": [sound]}
    return [own, own, {"images": [], "videos": [], "audios": []}]


@pytest.mark.parametrize("size", [8, 256])  # Ray sends large arguments in another way
def test_images_videos_and_sounds_are_scored_as_without_ray(
    size: int, through_a_worker: Callable[..., RayRewards]
) -> None:
    rows: Any = (["q", "q", "p"], ["a", "b", "c"], [[1], [2], [3]])
    expected = Rewards([darkened]).score(*rows, shown(size))
    assert expected.metrics["images"] == 4.0
    assert expected.extras["modes"] == [["RGB", "L"], ["RGB", "L"], []]
    assert expected.scores[0] == expected.scores[1] > 0 == expected.scores[2]
    assert_same(through_a_worker([darkened]).score(*rows, shown(size)), expected)


class Closed:
    """An environment, which stays in the trainer."""

    def __reduce__(self) -> Any:
        raise TypeError("an environment cannot be sent")


def episode(answer: str, *, failure: str = "") -> tuple[Episode, CompletionTurns]:
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}
    picture = Image.new("RGB", (4, 4), "red")
    messages: tuple[Message, ...] = (
        {"role": "assistant", "content": "let me see", "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "image", "image": picture}]},
        {"role": "assistant", "content": answer},
    )
    played = Episode(
        prompt=({"role": "user", "content": "what?"},),
        messages=messages,
        rewards=(0.0, float(len(answer))),
        finish_reason="failed" if failure else "done",
        failure=failure,
        environment=Closed(),
        release=lambda: None,
    )
    parts = [
        TextSegment("let me see", True),
        TextSegment("<image>", False),
        TextSegment(answer, True),
    ]
    return played, CompletionTurns(CompletionText(parts), copy.deepcopy(messages))


def test_episodes_are_scored_as_without_ray(through_a_worker: Callable[..., RayRewards]) -> None:
    functions = ["environment_reward", CountsTurns()]
    played = [episode("a cat"), episode("", failure="it broke"), episode("a dog!")]
    episodes, completions = [one for one, _ in played], [turns for _, turns in played]
    given: Any = ([one.prompt for one in episodes], completions, [[1, 2]] * 3, [{"step": 1}] * 3)
    further: Any = {
        "on_request": {"episodes": episodes, "environments": [one.environment for one in episodes]},
        "failed": {1: "it broke"},
        "limited": False,
    }
    options = {"weights": [1.0, 2.0]}
    expected = Rewards(functions, **options).score(*given, **further)
    # two turns and a picture of 1.25 each, twice, and what the environment gave
    assert expected.scores.tolist()[::2] == [5.0 + 7.5, 6.0 + 7.5]
    assert expected.extras["sampled"][::2] == [[True, False, True]] * 2
    assert expected.extras["ends"] == ["done", None, "done"]
    assert expected.metrics["turns"] == 2.0
    assert_same(through_a_worker(functions, **options).score(*given, **further), expected)


def reads_environments(environments: Any) -> list[float]:
    return [0.0] * len(environments)


def test_a_reward_that_reads_environments_is_refused(
    through_a_worker: Callable[..., RayRewards],
) -> None:
    with pytest.raises(RewardError, match=r"rewards\.workers of the cluster to 0"):
        through_a_worker([reads_environments]).prepare()
