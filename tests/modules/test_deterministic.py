"""Whole iterations use no operation that CUDA refuses where algorithms are to be deterministic."""

from typing import Any

import pytest
import torch

from lrlhf.modules import Update
from lrlhf.rollout import Sampling
from lrlhf.rollout.engines.token_sampler import _cumsum, _TopP
from tests.modules.policy_runs import moved
from tests.modules.reward_runs import ONE_HEAD, fit_pairs
from tests.refused_ops import refusing

SAMPLING = Sampling(max_new_tokens=6, top_p=0.9)


def test_what_cuda_refuses_is_refused_here() -> None:
    numbers = torch.arange(3.0)
    with refusing():
        assert numbers.long().cumsum(0).tolist() == [0, 1, 3]
        for refused in (
            lambda: numbers.cumsum(0),
            lambda: numbers.median(dim=0),
            lambda: numbers.histc(2),
            lambda: torch.bincount(torch.arange(3), numbers),
            lambda: torch.nn.functional.cross_entropy(numbers[None], torch.tensor([1])),
        ):
            with pytest.raises(RuntimeError, match="no deterministic implementation"):
                refused()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(("algorithm", "biased"), [("rloo", True), ("grpo", False)])
def test_an_iteration_of_rloo(build: Any, train: Any, algorithm: str, biased: bool) -> None:
    module = build(algorithm=algorithm, sampling=SAMPLING, allow_truncated_sampling=biased)
    with refusing():
        run = train(module)
    assert moved(run.before, run.after)


@pytest.mark.parametrize("kind", ["head", "own"])
def test_an_iteration_of_ppo(ppo: Any, train: Any, critic_of: Any, kind: str) -> None:
    update = Update(high_entropy_fraction=0.5, num_minibatches=2, micro_batch_tokens=64)
    module = ppo(critic=critic_of(kind), update=update)
    with refusing():
        run = train(module)
    assert moved(run.before, run.after)


def test_a_step_of_a_reward_model(reward_model: Any, collate: Any, tmp_path: Any) -> None:
    module = reward_model()
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    with refusing():
        fit_pairs(module, [collate(ONE_HEAD)], tmp_path)
    assert moved(before, module.state_dict())


def test_sums_of_whole_numbers_pick_the_same_tokens() -> None:
    numbers = torch.Generator().manual_seed(2)
    logprobs = (4 * torch.randn(50, 1000, generator=numbers)).log_softmax(-1)
    expected = logprobs.double().exp().cumsum(-1)
    kept = _TopP(0.8)(torch.empty(0), logprobs)
    with refusing():
        assert (_cumsum(logprobs.double().exp()) - expected).abs().max() < 1e-12
        found = _TopP(0.8)(torch.empty(0), logprobs)
    assert torch.equal(found, kept)
    assert 0 < int(found.isinf().sum()) < found.numel()
