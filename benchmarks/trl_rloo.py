"""RLOO by lrlhf and by TRL, on the same prompts and, where asked for, the same responses."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from exclusive_clock import ExclusiveClock
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl_measure import Laps, Memory, Run, import_trl, save_weights
from trl_prompts import build_engine, prepare, prompt_batch, stored_responses

from lrlhf.callbacks import VLLMWeightSync
from lrlhf.models import CausalLM
from lrlhf.modules import RLOO
from lrlhf.modules.optimizers import OptimizerConfig
from lrlhf.modules.settings import Reference, Update
from lrlhf.rewards import Rewards
from lrlhf.rollout import RolloutEngine, RolloutListener, Sampling, VLLMEngine, response_ids
from lrlhf.types import Experience, PromptBatch

__all__ = ["PHASES", "prepare", "run_lrlhf", "run_trl"]

PHASES = ("generation", "weight sync", "scoring", "log-probabilities", "update", "rest")

_NAMES = {
    "generate": "generation",
    "sync": "weight sync",
    "reward": "scoring",
    "logprob": "log-probabilities",
    "update": "update",
}


def letter_count(completions: Sequence[str], **_: Any) -> list[float]:
    """Score responses by their share of the letter e: a reward that costs nothing."""
    return [text.count("e") / (len(text) + 1) for text in completions]


# ------------------------------------------------------------------ lrlhf


class LrlhfSteps(RolloutListener, L.Callback):
    """Notes what lrlhf logs of every iteration."""

    def __init__(self, laps: Laps) -> None:
        self._laps = laps
        self._tokens = 0

    def on_rollout(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        experience: Experience,
        records: Sequence[dict[str, Any]],
    ) -> None:
        """Count what is trained on."""
        del trainer, module, records
        self._tokens = int(experience.attention_mask.sum())

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        """Close the iteration."""
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        logged = {
            "score": found["rollout/score"],
            "kl": found.get("kl/reference", 0.0),
            "loss": found["train/loss"],
            "grad_norm": found["policy/grad_norm"],
        }
        phases = {
            ours: found[f"perf/{theirs}_s"]
            for theirs, ours in _NAMES.items()
            if f"perf/{theirs}_s" in found
        }
        self._laps.end(logged, phases, self._tokens)


def run_lrlhf(
    options: argparse.Namespace, folder: Path, callbacks: Sequence[L.Callback] = (), ranks: int = 1
) -> Run:
    """Train with lrlhf, where ``ranks`` take turns with the batches."""
    run = Run("lrlhf")
    prompts = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    policy = lrlhf_policy(options, folder)
    save_initial(policy, folder)
    memory = Memory(policy)
    engine = build_engine(options, prompts)
    longest = max(len(prompt["ids"]) for prompt in prompts) + options.new_tokens
    module = RLOO(
        policy,
        Rewards([letter_count]),
        tokenizer=tokenizer,
        engine=engine,
        num_generations=options.generations,
        sampling=Sampling(max_new_tokens=options.new_tokens),
        reference=Reference(kl_coef=options.beta),
        update=Update(
            micro_batch_tokens=options.micro_batch_tokens or options.micro_batch * longest,
            max_grad_norm=options.clip,
        ),
        optimizer=optimizer_config(options),
        seed=options.seed,
    )
    batches: Any = [
        prompt_batch(prompts[start : start + options.prompts], int(tokenizer.pad_token_id))
        for start in range(0, len(prompts), options.prompts)
    ]
    callbacks = [*callbacks, LrlhfSteps(Laps(run, options.warm_up))]
    if isinstance(engine, VLLMEngine):
        callbacks.append(VLLMWeightSync())
    trainer = lightning_trainer(options, folder, callbacks, ranks)
    loader: DataLoader[PromptBatch] = DataLoader(batches, batch_size=None)
    trainer.fit(module, loader)
    run.memory = memory.peak()
    save_weights(policy, folder / "lrlhf.pt")
    return run


def optimizer_config(options: argparse.Namespace) -> OptimizerConfig:
    """Return what TRL's optimizer is in `shared_trl_options`; no default of lrlhf is left in it."""
    return OptimizerConfig(
        lr=options.lr,
        betas=(0.9, 0.999),
        weight_decay=0.0,
        eps=1e-8,
        schedule="constant",
        warmup_steps=0,
        fused=True,
    )


def lrlhf_policy(options: argparse.Namespace, folder: Path) -> PreTrainedModel:
    """Load the policy; by default it keeps its activations."""
    spec = CausalLM(
        source=str(folder / "model"), gradient_checkpointing=options.lrlhf_checkpointing
    )
    return spec.load()


def lightning_trainer(
    options: argparse.Namespace, folder: Path, callbacks: list[L.Callback], ranks: int = 1
) -> L.Trainer:
    """Build a trainer that does nothing but train."""
    return L.Trainer(
        devices=ranks,
        strategy="auto" if ranks == 1 else "ddp",
        max_steps=options.warm_up + options.steps,
        precision="bf16-mixed" if options.dtype == "bfloat16" else "32-true",
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=callbacks,
    )


def save_initial(model: nn.Module, folder: Path) -> None:
    """Write the weights that both systems start from, once."""
    if not (folder / "initial.pt").exists():
        save_weights(model, folder / "initial.pt")


# ------------------------------------------------------------------ TRL


def run_trl(options: argparse.Namespace, folder: Path) -> Run:
    """Train with TRL, told to do what lrlhf does where its defaults differ."""
    trl, run = import_trl(), Run("trl")
    datasets = importlib.import_module("datasets")
    prompts = json.loads((folder / "prompts.json").read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    memory = Memory(policy)
    clock = ExclusiveClock("rest", whole={"update"})
    rows = options.prompts * options.generations
    config = trl.RLOOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=rows // options.micro_batch,
        num_generations=options.generations,
        max_completion_length=options.new_tokens,
        shuffle_dataset=False,
        beta=options.beta,
        **shared_trl_options(options),
    )
    # TRL's own engine is a method of its trainer
    engine = None if options.engine == "transformers" else build_engine(options, prompts)
    trainer = _trl_class(options, prompts, engine, clock)(
        model=policy,
        reward_funcs=[letter_count],
        args=config,
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list([{"prompt": row["text"]} for row in prompts]),
    )
    trainer.add_callback(_trl_steps(clock, Laps(run, options.warm_up)))
    clock.watch(trainer, "_calculate_rewards", "scoring")
    clock.watch(trainer, "_get_per_token_logps_and_entropies", "log-probabilities")
    for owner, name in (
        (trainer, "compute_loss"),
        (trainer.accelerator, "backward"),
        (trainer.accelerator, "clip_grad_norm_"),
    ):
        clock.watch(owner, name, "update")
    trainer.train()
    run.memory = memory.peak()
    if engine is not None:
        engine.close()
    # TRL logs a step after it has ended
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    run.steps = [
        {
            "score": entry["reward"],
            "kl": entry.get("kl", 0.0),
            "loss": entry["loss"],
            "grad_norm": entry["grad_norm"],
        }
        for entry in logged
    ]
    save_weights(policy, folder / "trl.pt")
    return run


def shared_trl_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the training arguments of all of TRL's trainers."""
    return {
        "optim": "adamw_torch_fused",
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "weight_decay": 0.0,
        "warmup_steps": 0,
        "max_steps": options.warm_up + options.steps,
        "learning_rate": options.lr,
        "lr_scheduler_type": "constant",
        "max_grad_norm": options.clip,
        "seed": options.seed,
        "bf16": options.dtype == "bfloat16",
        "use_cpu": not torch.cuda.is_available(),
        "gradient_checkpointing": options.trl_checkpointing,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def _trl_class(
    options: argparse.Namespace,
    prompts: Sequence[dict[str, Any]],
    engine: RolloutEngine | None,
    clock: ExclusiveClock,
) -> Any:
    """Return TRL's trainer with the same token ids, and ``engine`` where there is one."""
    ids = {prompt["text"]: prompt["ids"] for prompt in prompts}
    stored = stored_responses(prompts)

    class Trainer(import_trl().RLOOTrainer):  # type: ignore[misc]
        def _tokenize_prompts(
            self, texts: list[str]
        ) -> tuple[list[list[int]], None, dict[str, Any]]:
            return [ids[text] for text in texts], None, {}

        def _generate_single_turn(self, prompt_ids: list[list[int]], *rest: Any) -> list[list[int]]:
            with clock.during("generation"):
                if engine is None:
                    drawn: list[list[int]] = super()._generate_single_turn(prompt_ids, *rest)
                elif isinstance(engine, VLLMEngine):
                    drawn = _draw(self, engine, prompt_ids, options, clock)
                else:
                    unique = prompt_ids[:: options.generations]
                    drawn = [row for prompt in unique for row in stored[tuple(prompt)]]
            return drawn

    return Trainer


def _draw(
    trainer: Any,
    engine: VLLMEngine,
    prompt_ids: list[list[int]],
    options: argparse.Namespace,
    clock: ExclusiveClock,
) -> list[list[int]]:
    """Draw with lrlhf's engine, whose weights are pushed first."""
    step = trainer.state.global_step
    if step == 0:
        engine.attach(trainer.model, trainer.processing_class)
    with clock.during("weight sync"):
        engine.push(step)
    unique = [{"ids": ids, "text": ""} for ids in prompt_ids[:: options.generations]]
    batch = prompt_batch(unique, trainer.processing_class.pad_token_id)
    rollout = engine.generate(
        batch,
        Sampling(max_new_tokens=options.new_tokens),
        num_generations=options.generations,
        seeds=range(step * len(prompt_ids), (step + 1) * len(prompt_ids)),
    )
    return response_ids(rollout, batch)


def _trl_steps(clock: ExclusiveClock, laps: Laps) -> Any:
    """Return a callback that closes every iteration."""
    transformers = importlib.import_module("transformers")

    class Steps(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        tokens = 0

        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            clock.enter("update")

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            clock.leave()

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            del args
            phases = clock.take()
            phases.pop("rest", None)
            seen = int(state.num_input_tokens_seen)
            laps.end({}, phases, seen - self.tokens)
            self.tokens = seen

    return Steps()
