"""Small runs that together use every part of training that has a state."""

import json
import runpy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

ROOT = Path(__file__).parents[2]
STEPS = 11
"""Iterations of a policy; a checkpoint after every second, a validation after every fourth."""
_SUPERVISED = ("reward_model", "dpo", "kto", "sft", "process_reward")
"""Cases that learn from rows alone, and their nine steps."""

Config = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A configuration, made of the models and data of a stage."""

    name: str
    steps: int

    @property
    def vllm(self) -> bool:
        """Whether it starts vLLM: half a minute each time."""
        return self.name.endswith(("_vllm", "_ahead"))

    @property
    def plays(self) -> bool:
        """Whether its responses are episodes."""
        return "turns" in self.name

    @property
    def draws(self) -> bool:
        """Whether responses are drawn, as a policy's are."""
        return self.name not in _SUPERVISED


@dataclass(frozen=True)
class Stage:
    """The folder in which models and data of all cases are made once."""

    folder: Path

    def build(self) -> None:
        """Make what is not there yet."""
        if (self.folder / "complete").exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        _write_models(self.folder)
        _write_data(self.folder)
        (self.folder / "complete").touch()

    def config(self, case: Case) -> Config:
        """Make the configuration of a case."""
        return _configs(self.folder)[case.name]

    def write_config(self, case: Case, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(self.config(case), sort_keys=False))


def _write_models(folder: Path) -> None:
    # here, as the process that only starts runs needs neither torch nor transformers
    from tests.conftest import build_tokenizer  # noqa: PLC0415
    from tests.vllm.models import build_policy  # noqa: PLC0415

    tokenizer = build_tokenizer()
    for name, seed in (("text", 0), ("critic", 1)):
        build_policy(tokenizer, seed=seed).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    build_vlm = runpy.run_path(str(ROOT / "examples" / "tiny_vlm.py"))["build"]
    for name, seed in (("vlm", 0), ("vlm_critic", 1)):
        build_vlm(folder / name, seed=seed)


def _write_data(folder: Path) -> None:
    words = [f"{first}{second}" for first in "abcde" for second in "vwxyz"]
    _write_lines(folder / "prompts.jsonl", [{"prompt": f"say {word}"} for word in words[:20]])
    _write_lines(folder / "val.jsonl", [{"prompt": f"tell {word}"} for word in words[20:]])
    _write_lines(folder / "texts.jsonl", [{"text": f"{word} is a word"} for word in words])
    pairs = [
        {"prompt": f"say {word}", "chosen": f"{word} {word}", "rejected": f"not {word[::-1]}"}
        for word in words
    ]
    _write_lines(folder / "pairs.jsonl", pairs[:20])
    _write_lines(folder / "val_pairs.jsonl", pairs[20:])
    answers = [{"prompt": one["prompt"], "completion": one["chosen"]} for one in pairs]
    _write_lines(folder / "answers.jsonl", answers[:20])
    _write_lines(folder / "val_answers.jsonl", answers[20:])
    steps = [
        {"prompt": f"say {word}", "completions": [word, word[::-1]], "labels": [True, False]}
        for word in words
    ]
    _write_lines(folder / "steps.jsonl", steps[:20])
    _write_lines(folder / "val_steps.jsonl", steps[20:])
    colours = np.random.default_rng(0).integers(0, 256, (25, 32, 32, 3), dtype=np.uint8)
    rows = []
    for number, pixels in enumerate(colours):
        path = folder / f"{number}.png"
        Image.fromarray(pixels).save(path)
        parts = [{"type": "image", "image": str(path)}, {"type": "text", "text": "what digit?"}]
        rows.append({"prompt": [{"role": "user", "content": parts}]})
    _write_lines(folder / "images.jsonl", rows[:20])
    _write_lines(folder / "val_images.jsonl", rows[20:])


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---------------------------------------------------------------------- configurations


def _merged(base: Any, change: Any) -> Any:
    if not (isinstance(base, Mapping) and isinstance(change, Mapping)):
        return change
    return {key: _merged(base.get(key), change[key]) for key in change} | {
        key: value for key, value in base.items() if key not in change
    }


def named(path: str, **arguments: Any) -> Config:
    """A class with its arguments."""
    return {"class_path": path, "init_args": arguments}


def _trainer(*callbacks: Config, ema: bool = True, steps: int = STEPS) -> Config:
    averaged = [named("lrlhf.callbacks.EMA", decay=0.7)] if ema else []
    return {
        "default_root_dir": "run",
        "accelerator": "cpu",
        "max_steps": steps,
        "max_epochs": -1,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": -1,
        "check_val_every_n_epoch": None,
        "val_check_interval": 4,
        "enable_progress_bar": False,
        "logger": [named("ResumingCSVLogger", save_dir="run", name="metrics")],
        "callbacks": [
            *averaged,
            *callbacks,
            named("lrlhf.callbacks.EvalJSONL", dirpath="run"),
            # its points lie between what has been logged and what is written about it
            named("tests.faults.kill_points.KillPoint"),
            named("lrlhf.callbacks.RunReport", dirpath="run"),
            named("lrlhf.callbacks.HFExport", dirpath="run/export", use_ema=ema),
            named("lrlhf.callbacks.RLCheckpoint", dirpath="run/ckpt", every_n_train_steps=2),
        ],
    }


def _policy(kind: str, model: Config, data: Config, *callbacks: Config, ema: bool = True) -> Config:
    common = {
        "rewards": named("lrlhf.rewards.Rewards", functions=["tests.faults.rewards.letters"]),
        "num_generations": 4,
        "sampling": {"max_new_tokens": 6, "temperature": 0.9},
        "reference": {"kl_coef": 0.05},
        "optimizer": {"lr": 3e-3, "warmup_steps": 2, "schedule": "cosine"},
    }
    log = named("lrlhf.callbacks.RolloutLog", dirpath="run", print_every=None)
    return {
        "seed_everything": 5,
        "model": named(f"lrlhf.modules.{kind}", **_merged(common, model)),
        "data": named("lrlhf.datamodules.PromptDataModule", batch_size=3, **data),
        "trainer": _trainer(*callbacks, log, ema=ema),
    }


def _supervised(kind: str, model: Config, data_kind: str, data: Config) -> Config:
    # of pairs alone: their optimization is Lightning's automatic one
    pairs = {"accumulate_grad_batches": 2, "log_every_n_steps": 2}
    trainer = _trainer(steps=9) | (pairs if data_kind == "PreferenceDataModule" else {})
    optimizer = {"lr": 3e-3, "schedule": "linear"}
    return {
        "seed_everything": 5,
        "model": named(f"lrlhf.modules.{kind}", **model, optimizer=optimizer),
        "data": named(f"lrlhf.datamodules.{data_kind}", batch_size=3, **data),
        "trainer": trainer,
    }


def _lora(source: str) -> Config:
    # dropout, so that random numbers matter in the update too
    return {"source": source, "lora": {"r": 4, "alpha": 8, "dropout": 0.1}}


def _critic(model: str | None) -> Config:
    return {
        "advantage": {"estimator": "gae", "scale_rewards": "mean_std"},
        "update": {"loss": "token_clip", "minibatch_size": 6, "num_iterations": 2},
        "critic": {"model": model, "optimizer": {"lr": 1e-3, "warmup_steps": 2}},
    }


_KL = named("lrlhf.callbacks.KLControl", mode="adaptive", target=0.5, horizon=200)
_SYNC = named("lrlhf.callbacks.VLLMWeightSync", probe_every=3)
_ENGINE = {"engine": named("lrlhf.rollout.VLLMEngine", max_model_len=128, kv_cache_gib=0.05)}
_AHEAD = {
    "engine": named("lrlhf.rollout.VLLMServerEngine", max_model_len=128, kv_cache_gib=0.05),
    "max_staleness": 1,
}
_TURNS = {
    "episodes": {"environment": "tests.faults.environments.Letters", "max_turn_tokens": 5},
    "rewards": {"init_args": {"functions": ["environment_reward"]}},
    "sampling": {"max_new_tokens": 24},
}
_SHOWN_TURNS = _merged(
    _TURNS,
    {
        "episodes": {"environment": "tests.faults.environments.Pictures"},
        "sampling": {"max_new_tokens": 80},
    },
)
_MOVING = {"reference": {"sync_every": 3, "mixup": 0.5}}
_SCALED = {"advantage": {"scale_rewards": "std"}}


def _configs(folder: Path) -> dict[str, Config]:
    """The configuration of every case, on the models and data of a stage."""

    def at(name: str) -> str:
        return str(folder / name)

    text = {"train": at("prompts.jsonl"), "val": at("val.jsonl")}
    mixed = {"pretraining": at("texts.jsonl"), "pretraining_batch_size": 2, "num_workers": 2}
    images = {"train": at("images.jsonl"), "val": at("val_images.jsonl")}
    pairs = {"train": at("pairs.jsonl"), "val": at("val_pairs.jsonl"), "num_workers": 2}
    answers = {"train": at("answers.jsonl"), "val": at("val_answers.jsonl")}
    steps = {"train": at("steps.jsonl"), "val": at("val_steps.jsonl")}
    adapted = _lora(at("text"))
    # prompts that begin alike and fill some blocks of an engine's caches
    template = "This is a task of one line only, and you are to do it: {{ prompt }}"
    policy, vlm = {"policy": at("text")}, {"policy": at("vlm")}
    update = {"update": {"pretraining_coef": 0.1, "num_iterations": 2}}
    clipped = {
        "policy": _lora(at("text")),
        "dynamic_sampling": {"prompts": 2},
        "importance_sampling": {"mode": "token_truncate"},
        "update": {"loss": "token_clip", "minibatch_size": 4},
        "reference": {"placement": "loss"},
    }
    own, value_head = _critic(at("critic")), _critic(None)
    lora_vlm = {"policy": _lora(at("vlm"))} | _critic(at("vlm_critic"))
    return {
        "rloo": _policy("RLOO", policy | _MOVING | _SCALED | update, text | mixed, _KL),
        "rloo_lora": _policy("RLOO", clipped, text),
        "ppo": _policy("PPO", policy | own | _MOVING, text | {"num_workers": 2}, _KL),
        "ppo_lora": _policy("PPO", {"policy": _lora(at("text"))} | value_head, text, _KL),
        "rloo_media": _policy("RLOO", vlm | _SCALED, images | {"num_workers": 2}, _KL),
        "ppo_media": _policy("PPO", lora_vlm, images),
        "rloo_turns": _policy("RLOO", policy | _TURNS | {"algorithm": "rloo_turn"}, text, _KL),
        "ppo_turns": _policy("PPO", policy | own | _TURNS, text | {"num_workers": 2}, _KL),
        "rloo_media_turns": _policy("RLOO", vlm | _SHOWN_TURNS, images, _KL),
        "reward_model": _supervised(
            "RewardModel", {"model": adapted}, "PreferenceDataModule", pairs
        ),
        "dpo": _supervised("DPO", {"policy": adapted}, "PreferenceDataModule", pairs),
        "kto": _supervised("KTO", {"policy": adapted}, "UnpairedPreferenceDataModule", pairs),
        "sft": _supervised("SFT", policy, "SupervisedDataModule", answers),
        "process_reward": _supervised(
            "ProcessRewardModel", {"model": adapted}, "StepwiseDataModule", steps
        ),
        # no averaged weights: what validation leaves in the engine's caches is there afterwards
        "rloo_vllm": _policy(
            "RLOO",
            policy | _ENGINE | _MOVING,
            text | {"prompt_template": template},
            _SYNC,
            ema=False,
        ),
        "ppo_vllm": _policy("PPO", {"policy": _lora(at("text"))} | own | _ENGINE, text, _KL, _SYNC),
        "rloo_media_vllm": _policy("RLOO", vlm | _ENGINE, images, _SYNC, ema=False),
        "rloo_ahead": _policy("RLOO", policy | _AHEAD, text, _SYNC),
        "rloo_turns_vllm": _policy(
            "RLOO", policy | _ENGINE | _TURNS, text | {"prompt_template": template}, _SYNC
        ),
        "rloo_turns_ahead": _policy("RLOO", policy | _AHEAD | _TURNS, text, _SYNC),
        "rloo_media_turns_ahead": _policy("RLOO", vlm | _AHEAD | _SHOWN_TURNS, images, _SYNC),
    }


CASES = {name: Case(name, steps=9 if name in _SUPERVISED else STEPS) for name in _configs(Path())}
