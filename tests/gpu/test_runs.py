"""Whole runs on a GPU give what they give on a CPU, and go on exactly where they stopped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lrlhf import Trainer
from lrlhf.callbacks import RLCheckpoint
from lrlhf.datamodules import PromptDataModule
from lrlhf.models import TokenBudget
from lrlhf.models.flops import peak_flops
from lrlhf.models.token_budget import begin_anew, peak_memory
from lrlhf.modules import (
    PPO,
    RLOO,
    Critic,
    OptimizerConfig,
    ProcessRewardModel,
    RewardModel,
    Update,
)
from lrlhf.rewards import LearnedReward, ProcessReward, Rewards
from lrlhf.run import seed_everything_for
from tests.modules.conftest import (  # noqa: F401  fixtures
    build,
    collate,
    critic_of,
    ppo,
    prompts,
    reward_model,
    train,
    value_network,
)
from tests.modules.policy_runs import Run, assert_same, sgd, weights
from tests.modules.reward_runs import ONE_HEAD, fit_pairs, flat_weights
from tests.modules.test_vision_training import ask, policy, questions  # noqa: F401
from tests.vlms import build_vlm

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
"""Two devices add up in another order."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*GPU available but not used"),
]


@pytest.fixture(autouse=True)
def _whole_float32() -> Iterator[None]:
    """No TF32: a tenth of a percent would hide what is wrong."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def both(train: Callable[..., Run], make: Callable[[], Any], accelerator: str, **options: Any):  # noqa: F811
    """Run the same on the CPU and on the GPU."""
    return [
        train(make(), accelerator=place, steps=2, precision="32-true", **options)
        for place in ("cpu", accelerator)
    ]


@pytest.mark.gpu_lines(
    "lrlhf.modules.optimizers._can_fuse",
    "lrlhf.datamodules.core.RowDataModule",
    "lrlhf.models.flops.peak_flops",
)
@pytest.mark.parametrize("kind", ["rloo", "ppo"])
def test_two_iterations_equal_those_on_a_cpu(kind, build, ppo, train, accelerator) -> None:  # noqa: F811
    def make() -> RLOO | PPO:
        if kind == "rloo":
            return build(optimizer=sgd(0.1))
        return ppo(optimizer=sgd(0.1), critic=Critic(optimizer=sgd(0.1)))

    here, there = both(train, make, accelerator)
    for one, other in zip(here.watcher.experiences, there.watcher.experiences, strict=True):
        assert torch.equal(one.input_ids.cpu(), other.input_ids.cpu()), "the same responses"
    assert_same(here.after, {name: w.cpu() for name, w in there.after.items()}, **CLOSE)
    if peak_flops(torch.device(accelerator)) is not None:
        assert 0 < there.logged["perf/mfu"] < 1


@pytest.mark.gpu_lines("lrlhf.models.token_budget")
def test_how_rows_are_cut_does_not_matter(build, train, accelerator) -> None:  # noqa: F811
    runs = [
        train(
            build(optimizer=sgd(0.1), update=Update(micro_batch_tokens=tokens)),
            accelerator=accelerator,
            precision="32-true",
            steps=3,
        )
        for tokens in ("auto", None, 24)
    ]
    for other in runs[1:]:
        assert_same(runs[0].after, other.after, **CLOSE)


@pytest.mark.gpu_lines("lrlhf.models.token_budget")
def test_measured_memory_lets_micro_batches_grow() -> None:
    budget, gpu = TokenBudget(), torch.device("cuda")
    first = budget.limit("auto", gpu)
    assert first is not None
    for _ in range(3):
        with budget.measuring(first, gpu):
            held = torch.empty(first * 1024, device=gpu)
            del held
        budget.update()
    found = budget.limit("auto", gpu)
    assert found is not None
    _, total = torch.cuda.mem_get_info()
    assert first < found <= total / 4096, "each token took 4 KiB"


@pytest.mark.gpu_lines("lrlhf.models.token_budget")
def test_a_peak_outlives_what_is_measured_anew() -> None:
    gpu = torch.device("cuda", torch.cuda.current_device())
    held = torch.empty(2**26, device=gpu)
    peak = peak_memory(gpu)
    assert peak >= 2**28
    del held
    begin_anew(gpu)
    assert torch.cuda.max_memory_allocated(gpu) < peak
    assert peak_memory(gpu) == peak


@pytest.mark.parametrize("kind", ["rloo", "ppo"])
def test_a_resumed_run_ends_with_the_same_bits(
    kind,
    build,  # noqa: F811
    ppo,  # noqa: F811
    train,  # noqa: F811
    accelerator,
    tmp_path: Path,
) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        make = {"rloo": build, "ppo": ppo}[kind]
        folder = str(tmp_path / "ck")

        def go(steps: int, **options: Any) -> Run:
            saver = RLCheckpoint(dirpath=folder, every_n_train_steps=2)
            return train(make(), accelerator=accelerator, steps=steps, callbacks=[saver], **options)

        whole = go(4)
        shutil.rmtree(folder)
        go(2)
        resumed = go(4, ckpt_path=f"{folder}/last.ckpt")
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(whole.after, resumed.after)


def test_a_reward_model_learns_the_same(reward_model, collate, accelerator, tmp_path) -> None:  # noqa: F811
    found: list[Tensor] = []
    for place in ("cpu", accelerator):
        module: RewardModel = reward_model(optimizer=sgd(0.5))
        fit_pairs(module, [collate(ONE_HEAD)] * 3, tmp_path, accelerator=place)
        found.append(flat_weights(module).cpu())
    torch.testing.assert_close(found[1], found[0], **CLOSE)


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "idefics3"])
def test_a_policy_that_sees_trains_as_on_a_cpu(family, ask, accelerator) -> None:  # noqa: F811
    here, there = (
        ask(policy(build_vlm(family), optimizer=sgd(0.05)), accelerator=place, batch_size=4)
        for place in ("cpu", accelerator)
    )
    assert_same(here.after, {name: w.cpu() for name, w in there.after.items()}, **CLOSE)


@pytest.mark.gpu_lines("lrlhf.rewards.learned")
def test_a_learned_reward_scores_as_on_a_cpu(reward_model, tmp_path, device) -> None:  # noqa: F811
    folder = tmp_path / "reward"
    reward_model().save_pretrained(folder)
    texts = ["a", "bc", "def", "some longer text"]
    scores = []
    for place in ("cpu", str(device), "auto"):
        reward = LearnedReward(str(folder), device=place, dtype="float32", batch_size=3)
        rows = (["say"] * len(texts), texts, [[1]] * len(texts), [{}] * len(texts))
        scores.append(Rewards([reward]).score(*rows).scores.tolist())
    for other in scores[1:]:
        assert other == pytest.approx(scores[0], abs=1e-4)


def test_a_process_reward_scores_as_on_a_cpu(model_folder, tmp_path, device) -> None:
    folder = tmp_path / "steps"
    ProcessRewardModel(model_folder, seed=0).save_pretrained(folder)
    rows = (["say"] * 2, [["a", "bc"], ["some longer text"]])
    expected = ProcessReward(str(folder), device="cpu", dtype="float32").judge(*rows)
    found = ProcessReward(str(folder), device=str(device), dtype="float32").judge(*rows)
    for own, other in zip(found, expected, strict=True):
        assert own == pytest.approx(other, abs=1e-4)


@pytest.mark.gpu_lines("lrlhf.trainer.default_precision")
def test_bfloat16_is_the_default_and_learns(build, prompts, tmp_path, accelerator) -> None:  # noqa: F811
    trainer = Trainer(
        default_root_dir=tmp_path, accelerator=accelerator, devices=1, max_steps=2, logger=False
    )
    if accelerator == "gpu" and torch.cuda.get_device_capability() >= (8, 0):
        assert trainer.precision == "bf16-mixed"
    module = build(optimizer=OptimizerConfig(lr=1e-3))
    before = weights(module)
    trainer.fit(module, datamodule=PromptDataModule(train=str(prompts), batch_size=4))
    after = weights(module)
    assert all(weight.dtype == torch.float32 for weight in module.policy.parameters())
    assert any(not torch.equal(before[name], after[name].cpu()) for name in before)


@pytest.mark.gpu_lines("lrlhf.run.seeding.seed_everything_for")
def test_a_seed_is_that_of_the_device_too() -> None:
    def drawn(*where: int) -> list[float]:
        seed_everything_for(1, *where)
        numbers: list[float] = torch.rand(8, device="cuda").tolist()
        return numbers

    first = drawn(2)
    assert drawn(3) != first
    assert drawn(2) == first
