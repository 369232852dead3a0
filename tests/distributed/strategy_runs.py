"""Runs of every module under every strategy, on models of 27,000 parameters."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor

from lrlhf.callbacks import EMA, HFExport, KLControl, RLCheckpoint, VLLMWeightSync
from lrlhf.datamodules import (
    PreferenceDataModule,
    PromptDataModule,
    SupervisedDataModule,
    UnpairedPreferenceDataModule,
)
from lrlhf.environments import Episodes, TextEnvironment
from lrlhf.models import CausalLM, LoRA, ScoreModel, ValueModel
from lrlhf.models.sharding import state_of
from lrlhf.modules import (
    DPO,
    KTO,
    PPO,
    RLOO,
    SFT,
    Advantage,
    Critic,
    OptimizerConfig,
    Reference,
    RewardModel,
    Teacher,
    Update,
)
from lrlhf.modules.pairs.pair_module import PairModule
from lrlhf.rewards import Rewards
from lrlhf.rollout import Sampling, SyncedEngine
from lrlhf.rollout.episodes.episode_engine import EpisodeEngine
from lrlhf.strategies import FSDP2, DeepSpeed
from lrlhf.types import Episode
from tests.conftest import build_language_model, build_tokenizer
from tests.modules.policy_runs import letters
from tests.rollout.copy_engine import CopyEngine

STEPS = 4
ROWS = 8
"""Prompts, or pairs, of one step over all processes."""

STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "ddp": partial(DDPStrategy, find_unused_parameters=True),
    "fsdp2": FSDP2,
    **{f"deepspeed_zero{stage}": partial(DeepSpeed, stage=stage) for stage in (1, 2, 3)},
}


def adamw(lr: float) -> OptimizerConfig:
    # a large eps: else gradients that are rounding noise would move weights as far as any other
    return OptimizerConfig(lr=lr, eps=1e-3, weight_decay=0.1, schedule="linear")


def reward(folder: Path) -> RewardModel:
    L.seed_everything(3, verbose=False)
    return RewardModel(ScoreModel(source=str(folder)), optimizer=adamw(5e-3), center_coef=0.01)


def sft(_folder: Path) -> SFT:
    tokenizer = build_tokenizer()
    model = build_language_model(tokenizer)
    return SFT(model, tokenizer=tokenizer, optimizer=adamw(5e-3), micro_batch_tokens=40)


def dpo(_folder: Path) -> DPO:
    tokenizer = build_tokenizer()
    model = build_language_model(tokenizer)
    return DPO(model, tokenizer=tokenizer, optimizer=adamw(5e-3), sft_coef=0.1)


def kto(folder: Path) -> KTO:
    tokenizer = build_tokenizer()
    model = build_language_model(tokenizer)
    return KTO(
        model,
        tokenizer=tokenizer,
        reference=CausalLM(source=str(folder)),
        beta=0.5,
        micro_batch_tokens=40,
        optimizer=adamw(5e-3),
    )


def dpo_lora(folder: Path) -> DPO:
    L.seed_everything(3, verbose=False)
    spec = CausalLM(source=str(folder), lora=LoRA(r=2))
    return DPO(spec, optimizer=adamw(5e-3), precompute_reference=True)


def policy(kind: type[RLOO] | type[PPO], model: Any = None, **options: Any) -> Any:
    """A policy of two responses to each prompt; ``options`` replace the common ones."""
    tokenizer = build_tokenizer()
    common: dict[str, Any] = {
        "tokenizer": tokenizer,
        "num_generations": 2,
        "sampling": Sampling(max_new_tokens=6),
        "reference": Reference(kl_coef=0.05),
        "update": Update(micro_batch_tokens=40),
        "optimizer": adamw(5e-3),
    }
    model = build_language_model(tokenizer) if model is None else model
    rewards = options.pop("rewards", Rewards([letters]))
    return kind(model, rewards, **(common | options))


def rloo(_folder: Path) -> Any:
    return policy(
        RLOO,
        reference=Reference(kl_coef=0.05, sync_every=3),
        advantage=Advantage(normalize=True),
        update=Update(micro_batch_tokens=40, num_iterations=2, max_grad_norm=0.05),
    )


def ppo(folder: Path, *, own_critic: bool = False) -> Any:
    return policy(
        PPO,
        sampling=Sampling(max_new_tokens=6, stop=["a", "e", "i", "o"]),
        advantage=Advantage(estimator="gae", scale_rewards="mean_std"),
        update=Update(
            loss="token_clip",
            aggregate="token_mean",
            num_minibatches=1,
            micro_batch_tokens=40,
            max_grad_norm=0.05,
        ),
        critic=Critic(
            model=ValueModel(source=str(folder)) if own_critic else None,
            optimizer=adamw(2e-2),
            max_grad_norm=0.02,
        ),
    )


def from_folder(folder: Path, lr: float, **options: Any) -> Any:
    L.seed_everything(3, verbose=False)
    return policy(RLOO, CausalLM(source=str(folder), **options), optimizer=adamw(lr))


def lora(folder: Path) -> Any:
    # no draw of this run lies within 1e-5 of the next token, so that two orders of a sum, which
    # end some 1e-6 apart, draw the same ones
    return from_folder(folder, 3e-3, lora=LoRA(r=2), gradient_checkpointing=True)


def through_an_engine(_folder: Path, engine: CopyEngine | None = None, **options: Any) -> Any:
    reference = Reference(kl_coef=0.05, offload=True)
    return policy(RLOO, engine=engine or CopyEngine(), reference=reference, **options)


class Asks(TextEnvironment):
    """Asks on, up to four times: the more turns, the later the prompt is in the alphabet."""

    def reset(self, prompt: Any) -> None:
        self.left = "abcdefgh".index(prompt[0]["content"][-2]) % 4

    def step(self, action: str) -> str | None:
        self.left -= 1
        return f"{len(action)}?" if self.left >= 0 else None


def letters_of_turns(episodes: list[Episode], **_: Any) -> list[float]:
    said = [
        [one["content"] for one in each.messages if one["role"] == "assistant"] for each in episodes
    ]
    return letters(["".join(turns) for turns in said])


def with_an_environment(_folder: Path) -> Any:
    # the processes need different numbers of rounds, and weights that are split need all of them
    episodes = Episodes(environment=Asks, max_turn_tokens=4, history="template")
    tokenizer = build_tokenizer()
    # every turn becomes a fork
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] if message['role'] == 'user' else "
        "message['content'] | replace('e', '') | upper }}<|im_end|>{{ message['role'] }}"
        "{% endfor %}"
    )
    return policy(
        RLOO,
        episodes=episodes,
        sampling=Sampling(max_new_tokens=96),
        tokenizer=tokenizer,
        rewards=Rewards([letters_of_turns]),
    )


def with_a_teacher(folder: Path) -> Any:
    return policy(
        RLOO,
        build_language_model(build_tokenizer(), seed=7),
        rewards=None,
        # chunks are computed again in the backward pass, when the teacher is split again
        update=Update(micro_batch_tokens=40, logprob_chunk=4),
        teacher=Teacher(model=str(folder), placement="loss"),
    )


MODULES: dict[str, Callable[[Path], L.LightningModule]] = {
    "reward": reward,
    "sft": sft,
    "dpo": dpo,
    "kto": kto,
    "dpo with lora and a precomputed reference": dpo_lora,
    "rloo": rloo,
    "ppo": ppo,
    "ppo with its own critic": lambda folder: ppo(folder, own_critic=True),
    "rloo with lora": lora,
    "rloo through an engine": through_an_engine,
    "rloo with an environment": with_an_environment,
    "rloo with a teacher": with_a_teacher,
    "rloo compiled": lambda folder: from_folder(folder, 5e-3, compile=True),
}


class SaveAtEnd(L.Callback):
    """Leaves what was trained in a file per rank, weights as they are on one device."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        weights = {
            f"{role}.{name}": value
            for role, model in pl_module.trainable_models().items()  # type: ignore[operator]
            for name, value in state_of(model).items()
        }
        averages = next(c for c in trainer.callbacks if isinstance(c, EMA)).state_dict()  # type: ignore[attr-defined]
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        state: dict[str, Any] = {"step": trainer.global_step, "metrics": metrics}
        if isinstance(pl_module, RLOO | PPO):
            state |= {
                "kl_coef": pl_module.kl_coef,
                "running_scores": pl_module.running_scores.state_dict(),
            }
        shared = {"weights": _whole(weights), "averages": _whole(averages["shadows"])}
        torch.save({**state, **shared}, self.folder / f"rank{trainer.global_rank}.pt")


def _whole(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put together what is split, in the order of the names on every rank."""
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()
        if not tensor.is_meta:
            whole[name] = tensor.detach().clone()
    return whole


def data_of(module: L.LightningModule, folder: Path, ranks: int) -> L.LightningDataModule:
    """Write the rows beside the run; each step takes the same ones on any number of ranks."""
    words = [first + second for first in "abcdefgh" for second in "ijkl"]
    if isinstance(module, PairModule):
        rows: list[dict[str, Any]] = [
            {"prompt": "say", "chosen": f"{word} {word}", "rejected": word * (1 + index % 3)}
            for index, word in enumerate(words)
        ]
        build: Any = PreferenceDataModule
    elif isinstance(module, KTO):
        rows = [
            {"prompt": f"say {word}", "completion": word * (1 + index % 5), "label": index % 3 > 0}
            for index, word in enumerate(words)
        ]
        build = UnpairedPreferenceDataModule
    elif isinstance(module, SFT):
        # the ranks have different numbers of tokens
        rows = [
            {"prompt": "say", "completion": word * (1 + index % 5)}
            for index, word in enumerate(words)
        ]
        build = SupervisedDataModule
    else:
        rows = [{"prompt": f"say {word}"} for word in words]
        if isinstance(module.engine, EpisodeEngine):
            rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
        build = PromptDataModule
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    data: L.LightningDataModule = build(train=str(path), batch_size=ROWS // ranks)
    return data


def run(name: str, model_folder: Path, folder: Path, **options: Any) -> list[dict[str, Any]]:
    """Train a module of `MODULES` on a pretrained model; see `train`."""
    return train(MODULES[name](model_folder), folder, **options)


def train(
    module: L.LightningModule,
    folder: Path,
    *,
    strategy: str | None = None,
    start_method: str = "fork",
    ckpt_path: Path | None = None,
    accelerator: str = "cpu",
    devices: int = 2,
) -> list[dict[str, Any]]:
    """Train, average, control the KL, save and export; returns what each rank ended with.

    Args:
        module: One of `MODULES`.
        folder: For everything that is written.
        strategy: One of `STRATEGIES`, of several processes; None: one process.
        start_method: ``popen``: as a program's main module.
        ckpt_path: Where to go on; nothing is exported then.
        accelerator: Of the trainer.
        devices: Processes under a strategy.
    """
    folder.mkdir(parents=True, exist_ok=True)
    callbacks: list[L.Callback] = [
        EMA(decay=0.5),
        RLCheckpoint(folder / "checkpoints", every_n_train_steps=2, save_top_k=-1),
        *([HFExport(folder / "export")] if ckpt_path is None else []),
        SaveAtEnd(folder),
    ]
    if isinstance(module, RLOO | PPO):
        callbacks.append(KLControl(target=0.01, horizon=20))
        if isinstance(module.engine, SyncedEngine):
            callbacks.append(VLLMWeightSync(probe_every=1))
    ranks = 1 if strategy is None else devices
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=ranks,
        strategy=STRATEGIES[strategy](start_method=start_method) if strategy else "auto",
        max_steps=STEPS,
        max_epochs=-1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=callbacks,
    )
    data = data_of(module, folder, ranks)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    files = [folder / f"rank{rank}.pt" for rank in range(ranks)]
    return [torch.load(file, map_location="cpu") for file in files]


def checkpoint(folder: Path, step: int) -> Path:
    """The checkpoint that a run saved after a step."""
    (found,) = folder.glob(f"checkpoints/step={step:06d}*.ckpt")
    return found
