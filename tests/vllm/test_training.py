"""PPO and RLOO with vLLM in the training process."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lrlhf.callbacks import RLCheckpoint, VLLMWeightSync
from lrlhf.modules import PPO, RLOO
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling, VLLMEngine
from tests.modules.policy_runs import Watcher, fit, letters, weights
from tests.vllm.conftest import Kept
from tests.vllm.models import largest_gap


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(f'{{"prompt": "say {word}"}}' for word in "abcdefghijklmnop"))
    return path


def module(
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    engine: VLLMEngine,
    kind: type[RLOO | PPO] = RLOO,
    **options: Any,
) -> RLOO | PPO:
    return kind(
        policy,
        Rewards([letters]),
        tokenizer=tokenizer,
        engine=Kept(engine),
        num_generations=4,
        sampling=Sampling(max_new_tokens=8, temperature=0.9),
        optimizer=OptimizerConfig(lr=1e-2),
        **options,
    )


@pytest.fixture
def build(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, engine: VLLMEngine) -> Any:
    return partial(module, policy, tokenizer, engine)


class Gaps(Watcher):
    """Recomputes each rollout with the policy that is about to learn from it."""

    def __init__(self) -> None:
        super().__init__()
        self.gaps: list[float] = []

    def on_rollout(self, trainer: L.Trainer, module: Any, experience: Any, records: Any) -> None:
        super().on_rollout(trainer, module, experience, records)
        self.gaps.append(largest_gap(module.policy.eval(), experience, 0.9))


@pytest.mark.parametrize(
    ("kind", "every_n_steps", "versions"),
    [
        (RLOO, 1, [0, 1, 2]),
        (RLOO, 2, [0, 0, 2]),
        pytest.param(PPO, 1, [0, 1, 2], marks=pytest.mark.exhaustive),
    ],
)
def test_every_iteration_learns_from_the_policy_of_the_last_push(
    kind: type[RLOO | PPO],
    every_n_steps: int,
    versions: list[int],
    build: Any,
    prompts: Path,
    tmp_path: Path,
) -> None:
    gaps, trained = Gaps(), build(kind)
    before = weights(trained.policy)
    callbacks = [gaps, VLLMWeightSync(every_n_steps, probe_every=1)]
    trainer = fit(trained, prompts, tmp_path, steps=3, callbacks=callbacks)
    assert [int(e.weight_version.max()) for e in gaps.experiences] == versions
    fresh = [step == version for step, version in enumerate(versions)]
    assert [gap < 1e-4 for gap in gaps.gaps] == fresh
    assert trainer.callback_metrics["sync/age"] == 0
    assert trainer.callback_metrics["mismatch/max"] < 1e-4
    assert trainer.callback_metrics["perf/sync_s"] > 0
    assert any(not torch.equal(before[name], w) for name, w in weights(trained.policy).items())


@pytest.mark.exhaustive
def test_a_resumed_run_ends_with_the_same_weights(
    build: Any, policy: PreTrainedModel, prompts: Path, tmp_path: Path
) -> None:
    before = weights(policy)

    def run(folder: Path, steps: int, resume: str | None = None) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        policy.load_state_dict(before)
        trained = build(seed=3)
        fit(
            trained,
            prompts,
            folder,
            steps=steps,
            callbacks=[VLLMWeightSync(), RLCheckpoint(dirpath=str(folder), every_n_train_steps=1)],
            ckpt_path=resume,
        )
        return weights(trained.policy)

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "parts", 2)
    (last,) = (tmp_path / "parts").rglob("last.ckpt")
    resumed = run(tmp_path / "parts", 4, str(last))
    assert all(torch.equal(whole[name], weight) for name, weight in resumed.items())
