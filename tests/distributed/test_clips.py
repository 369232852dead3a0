"""Actor and critic under split weights: one step of each, by its own learning rate and clip."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lrlhf.models import ValueModel
from lrlhf.models.sharding import settle, whole
from lrlhf.modules import PPO, Advantage, Critic, OptimizerConfig, Reference, Update
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling
from tests.conftest import build_language_model, build_tokenizer
from tests.distributed.strategy_runs import STRATEGIES, data_of
from tests.modules.policy_runs import letters

pytestmark = [
    pytest.mark.slow,
    # of DeepSpeed's own code
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

ACTOR_LR, CRITIC_LR = 0.5, 0.125


class Moved(L.Callback):
    """How far each model was moved by the run, and the gradient norms that it logged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.before: dict[str, list[Tensor]] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.before = self.weights(pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        found: dict[str, Any] = {
            role: torch.cat(
                [(new - old).flatten() for new, old in zip(after, self.before[role], strict=True)]
            )
            .norm()
            .item()
            for role, after in self.weights(pl_module).items()
        }
        for key in ("policy/grad_norm", "value/grad_norm"):
            found[key] = float(trainer.callback_metrics[key])
        torch.save(found, self.folder / f"rank{trainer.global_rank}.pt")

    def weights(self, module: L.LightningModule) -> dict[str, list[Tensor]]:
        assert isinstance(module, PPO)
        return {role: whole_of(model) for role, model in module.trainable_models().items()}


def whole_of(model: nn.Module) -> list[Tensor]:
    settle(model)
    return [whole(weight).detach().double().clone() for weight in model.parameters()]


def sgd(lr: float) -> OptimizerConfig:
    return OptimizerConfig(
        lr=lr,
        weight_decay=0.0,
        schedule="constant",
        optimizer_class="torch.optim.SGD",
        optimizer_options={},
    )


def moved(
    strategy: str, own_critic: bool, clips: tuple[float, float], model_folder: str, folder: Path
) -> list[dict[str, float]]:
    """One optimizer step of two processes; what each of them saw."""
    tokenizer = build_tokenizer()
    L.seed_everything(3, verbose=False)
    module = PPO(
        build_language_model(tokenizer),
        Rewards([letters]),
        tokenizer=tokenizer,
        num_generations=2,
        sampling=Sampling(max_new_tokens=6),
        advantage=Advantage(estimator="gae"),
        reference=Reference(kl_coef=0.05),
        update=Update(
            loss="token_clip",
            aggregate="token_mean",
            num_minibatches=1,
            micro_batch_tokens=40,
            max_grad_norm=clips[0],
        ),
        optimizer=sgd(ACTOR_LR),
        critic=Critic(
            model=ValueModel(source=model_folder) if own_critic else None,
            optimizer=sgd(CRITIC_LR),
            max_grad_norm=clips[1],
        ),
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=STRATEGIES[strategy](start_method="fork"),
        max_steps=1,
        max_epochs=-1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[Moved(folder)],
    )
    trainer.fit(module, datamodule=data_of(module, folder, 2))
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(
    ("strategy", "own_critic"),
    [
        ("fsdp2", True),
        ("deepspeed_zero3", False),
        pytest.param("fsdp2", False, marks=pytest.mark.exhaustive),
        pytest.param("deepspeed_zero3", True, marks=pytest.mark.exhaustive),
    ],
)
def test_actor_and_critic_are_clipped_and_moved_apart(
    strategy: str, own_critic: bool, model_folder: str, tmp_path: Path
) -> None:
    # w' = w - lr · g · clip / |g|, so |w' - w| = lr · clip, whatever g is
    actor, critic = 1e-2, 3e-3
    for rank in moved(strategy, own_critic, (actor, critic), model_folder, tmp_path):
        assert rank["policy/grad_norm"] > 2 * actor
        assert rank["value/grad_norm"] > 2 * critic
        assert rank["policy"] == pytest.approx(ACTOR_LR * actor, rel=1e-3)
        assert rank["critic"] == pytest.approx(CRITIC_LR * critic, rel=1e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["fsdp2", "deepspeed_zero3"])
def test_the_norm_that_is_logged_is_that_of_the_whole_gradient(
    strategy: str, model_folder: str, tmp_path: Path
) -> None:
    # without a clip |w' - w| = lr · |g|; the actor's stays as it is while the critic's is clipped
    for rank in moved(strategy, True, (1e9, 1e-2), model_folder, tmp_path):
        assert rank["policy"] == pytest.approx(ACTOR_LR * rank["policy/grad_norm"], rel=1e-3)
        assert rank["critic"] == pytest.approx(CRITIC_LR * 1e-2, rel=1e-3)
