"""Two processes that share a batch train as one process does."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lrlhf.datamodules import PromptDataModule
from lrlhf.modules import (
    PPO,
    RLOO,
    Advantage,
    Critic,
    OptimizerConfig,
    PolicyModule,
    Reference,
    Update,
)
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling
from tests.conftest import build_language_model
from tests.modules.policy_runs import letters


class SaveAtEnd(L.Callback):
    """Leaves the trained weights and the metrics of each rank in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, PolicyModule)
        state = {
            f"{role}.{name}": value
            for role, model in pl_module.trainable_models().items()
            for name, value in model.state_dict().items()
        }
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        torch.save((state, metrics), self.folder / f"rank{trainer.global_rank}.pt")


def rloo(tokenizer: Any) -> PolicyModule:
    return RLOO(
        build_language_model(tokenizer),
        Rewards([letters]),
        tokenizer=tokenizer,
        num_generations=2,
        sampling=Sampling(max_new_tokens=6),
        reference=Reference(kl_coef=0.05),
        advantage=Advantage(normalize=True),
        update=Update(micro_batch_tokens=40, num_iterations=2),
        optimizer=OptimizerConfig(lr=1e-2, optimizer_class="torch.optim.SGD"),
    )


def ppo(tokenizer: Any) -> PolicyModule:
    return PPO(
        build_language_model(tokenizer),
        Rewards([letters]),
        tokenizer=tokenizer,
        num_generations=2,
        sampling=Sampling(max_new_tokens=6, stop=["a", "e", "i", "o"]),
        advantage=Advantage(estimator="gae", scale_rewards="mean_std"),
        update=Update(loss="token_clip", aggregate="token_mean", micro_batch_tokens=40),
        optimizer=OptimizerConfig(lr=1e-2, optimizer_class="torch.optim.SGD"),
        critic=Critic(optimizer=OptimizerConfig(lr=0.1, optimizer_class="torch.optim.SGD")),
    )


def trained(
    module: PolicyModule,
    prompts: Path,
    folder: Path,
    ranks: int,
    callbacks: Sequence[L.Callback] = (),
) -> list[tuple[dict[str, Tensor], dict[str, float]]]:
    folder.mkdir()
    settings = {"strategy": "ddp_fork_find_unused_parameters_true"} if ranks > 1 else {}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        max_steps=2,
        max_epochs=-1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[SaveAtEnd(folder), *callbacks],
        **settings,
    )
    trainer.fit(module, datamodule=PromptDataModule(train=str(prompts), batch_size=8 // ranks))
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.parametrize("build", [rloo, ppo])
def test_two_processes_train_as_one(tokenizer, tmp_path, build: Any) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(f'{{"prompt": "say {word}"}}' for word in "abcdefghijklmnop"))
    ((alone, metrics),) = trained(build(tokenizer), prompts, tmp_path / "one", 1)
    both = trained(build(tokenizer), prompts, tmp_path / "two", 2)
    assert any(not torch.equal(alone[n], v) for n, v in build_state(build(tokenizer)).items())
    for state, logged in both:
        for name, value in alone.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6, msg=name)
        same = [n for n in metrics if not n.startswith("perf/")]
        assert {n: pytest.approx(logged[n], rel=1e-3, abs=1e-5) for n in same} == {
            n: metrics[n] for n in same
        }


def build_state(module: PolicyModule) -> dict[str, Tensor]:
    return {f"policy.{name}": value for name, value in module.policy.state_dict().items()}
