"""Every module under every strategy: two processes end where one does, and resume anywhere."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.distributed.strategy_runs import MODULES, STRATEGIES, checkpoint, run

pytestmark = [
    pytest.mark.slow,
    # of DeepSpeed's own code
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

Ends = list[dict[str, Any]]


@pytest.fixture(scope="module")
def alone(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of the run in one process, by module."""

    @cache
    def trained(name: str) -> Path:
        folder = tmp_path_factory.mktemp("alone")
        run(name, Path(model_folder), folder)
        return folder

    return trained


def ends(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / "rank0.pt")
    return state


def merged(ranks: Ends, what: str) -> dict[str, Tensor]:
    """Tensors that lie on one rank each, or on all alike."""
    together: dict[str, Tensor] = {}
    for rank in ranks:
        for name, value in rank[what].items():
            if name in together:
                assert torch.equal(together[name], value), name
            together[name] = value
    return together


def assert_close(ranks: Ends, one: dict[str, Any]) -> None:
    for what in ("weights", "averages"):
        there = merged(ranks, what)
        assert there.keys() == one[what].keys()
        for name, value in one[what].items():
            torch.testing.assert_close(
                there[name], value, rtol=1e-3, atol=2e-5, msg=f"{what} {name}"
            )


SPLIT = ("fsdp2", "deepspeed_zero3")
# every module once and every strategy, the rarer modules where a strategy splits weights
SHORT = {
    ("ddp", "rloo"),
    ("ddp", "dpo"),
    ("ddp", "kto"),
    ("fsdp2", "sft"),
    ("fsdp2", "dpo with lora and a precomputed reference"),
    ("fsdp2", "ppo with its own critic"),
    ("fsdp2", "rloo through an engine"),
    ("fsdp2", "rloo with an environment"),
    ("deepspeed_zero1", "reward"),
    ("deepspeed_zero2", "ppo"),
    ("deepspeed_zero3", "rloo with lora"),
}
WHOLE_IN_NONE = (
    "rloo with lora",
    "rloo through an engine",
    "rloo with an environment",
    "dpo with lora and a precomputed reference",
)
CASES = [
    pytest.param(
        strategy,
        name,
        marks=[
            # a compiler and what it imports may warn as they like
            *([pytest.mark.filterwarnings("ignore")] if name == "rloo compiled" else []),
            *([] if (strategy, name) in SHORT else [pytest.mark.exhaustive]),
        ],
    )
    for name in MODULES
    for strategy in STRATEGIES
    # these are about weights that no rank has whole
    if strategy in SPLIT or name not in WHOLE_IN_NONE
    # and this is about how a strategy wraps or hooks what is compiled
    if name != "rloo compiled" or strategy not in ("deepspeed_zero1", "deepspeed_zero3")
]


@pytest.mark.parametrize(("strategy", "name"), CASES)
def test_two_processes_train_as_one_and_resume_anywhere(
    strategy: str, name: str, alone: Callable[[str], Path], model_folder: str, tmp_path: Path
) -> None:
    one, model = ends(alone(name)), Path(model_folder)

    two = run(name, model, tmp_path / "two", strategy=strategy)
    assert_close(two, one)
    for state in two:
        assert state["step"] == one["step"]
        for key in ("kl_coef", "running_scores"):
            assert state.get(key) == two[0].get(key)
        same = [key for key in one["metrics"] if not key.startswith("perf/")]
        assert {key: state["metrics"][key] for key in same} == {
            key: pytest.approx(one["metrics"][key], rel=1e-2, abs=1e-4) for key in same
        }

    again = run(
        name,
        model,
        tmp_path / "again",
        strategy=strategy,
        ckpt_path=checkpoint(tmp_path / "two", 2),
    )
    for what in ("weights", "averages"):
        for key, value in merged(two, what).items():
            assert torch.equal(merged(again, what)[key], value), (what, key)
    for state in again:
        for key in ("kl_coef", "running_scores"):
            assert state.get(key) == two[0].get(key)

    on_one = run(name, model, tmp_path / "on one", ckpt_path=checkpoint(tmp_path / "two", 2))
    assert_close(on_one, one)
    from_one = run(
        name,
        model,
        tmp_path / "from one",
        strategy=strategy,
        ckpt_path=checkpoint(alone(name), 2),
    )
    assert_close(from_one, one)

    for file in sorted((alone(name) / "export").rglob("*.safetensors")):
        there = load_file(tmp_path / "two" / file.relative_to(alone(name)))
        assert there.keys() == load_file(file).keys()
        for key, value in load_file(file).items():
            torch.testing.assert_close(
                there[key], value, rtol=1e-3, atol=2e-5, msg=lambda text, at=key: f"{at}: {text}"
            )
