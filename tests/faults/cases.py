"""Small runs that together use every part of training that has a state."""

import json
import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

ROOT = Path(__file__).parents[2]
STEPS = 11
"""Iterations of a policy; a checkpoint after every second, a validation after every fourth."""

Config = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A configuration, made of the models and data of a stage."""

    name: str
    config: Callable[[Path], Config]
    vllm: bool = False
    """Whether it starts vLLM: half a minute each time."""
    draws: bool = True
    """Whether responses are drawn, as a policy's are."""
    steps: int = STEPS


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

    def write_config(self, case: Case, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(case.config(self.folder), sort_keys=False))


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


# ---------------------------------------------------------------------- parts of configurations


def _merged(base: Any, change: Any) -> Any:
    if not (isinstance(base, Mapping) and isinstance(change, Mapping)):
        return change
    return {key: _merged(base.get(key), change[key]) for key in change} | {
        key: value for key, value in base.items() if key not in change
    }


def _named(path: str, **arguments: Any) -> Config:
    return {"class_path": path, "init_args": arguments}


def _trainer(*callbacks: Config, ema: bool = True, steps: int = STEPS) -> Config:
    averaged = [_named("lrlhf.callbacks.EMA", decay=0.7)] if ema else []
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
        "logger": [
            _named("ResumingCSVLogger", save_dir="run", name="metrics"),
        ],
        "callbacks": [
            *averaged,
            *callbacks,
            _named("lrlhf.callbacks.RolloutLog", dirpath="run", print_every=None),
            _named("lrlhf.callbacks.EvalJSONL", dirpath="run"),
            # its points lie between what has been logged and what is written about it
            _named("tests.faults.kill_points.KillPoint"),
            _named("lrlhf.callbacks.RunReport", dirpath="run"),
            _named("lrlhf.callbacks.HFExport", dirpath="run/export", use_ema=ema),
            _named("lrlhf.callbacks.RLCheckpoint", dirpath="run/ckpt", every_n_train_steps=2),
        ],
    }


def _policy_run(kind: str, *, model: Config, data: Config, trainer: Config) -> Config:
    return {
        "seed_everything": 5,
        "model": _named(
            f"lrlhf.modules.{kind}",
            **_merged(
                {
                    "rewards": _named(
                        "lrlhf.rewards.Rewards", functions=["tests.faults.rewards.letters"]
                    ),
                    "num_generations": 4,
                    "sampling": {"max_new_tokens": 6, "temperature": 0.9},
                    "reference": {"kl_coef": 0.05},
                    "optimizer": {"lr": 3e-3, "warmup_steps": 2, "schedule": "cosine"},
                },
                model,
            ),
        ),
        "data": _named("lrlhf.datamodules.PromptDataModule", batch_size=3, **data),
        "trainer": trainer,
    }


def _text(folder: Path, **more: Any) -> Config:
    return {"train": str(folder / "prompts.jsonl"), "val": str(folder / "val.jsonl"), **more}


def _images(folder: Path, **more: Any) -> Config:
    paths = {"train": str(folder / "images.jsonl"), "val": str(folder / "val_images.jsonl")}
    return {**paths, **more}


def _lora(source: Path) -> Config:
    # dropout, so that random numbers matter in the update too
    return {"source": str(source), "lora": {"r": 4, "alpha": 8, "dropout": 0.1}}


_KL = _named("lrlhf.callbacks.KLControl", mode="adaptive", target=0.5, horizon=200)
_SYNC = _named("lrlhf.callbacks.VLLMWeightSync", probe_every=3)
_OWN_ENGINE = _named("lrlhf.rollout.VLLMEngine", max_model_len=128, kv_cache_gib=0.05)
_SERVER = _named("lrlhf.rollout.VLLMServerEngine", max_model_len=128, kv_cache_gib=0.05)
_MOVING = {"sync_every": 3, "mixup": 0.5}


def _rloo(folder: Path) -> Config:
    texts = {"pretraining": str(folder / "texts.jsonl"), "pretraining_batch_size": 2}
    return _policy_run(
        "RLOO",
        model={
            "policy": str(folder / "text"),
            "reference": _MOVING,
            "advantage": {"scale_rewards": "std"},
            "update": {"pretraining_coef": 0.1, "num_iterations": 2},
        },
        data=_text(folder, num_workers=2, **texts),
        trainer=_trainer(_KL),
    )


def _rloo_lora(folder: Path) -> Config:
    return _policy_run(
        "RLOO",
        model={
            "policy": _lora(folder / "text"),
            "dynamic_sampling": {"prompts": 2},
            "importance_sampling": {"mode": "token_truncate"},
            "update": {"loss": "token_clip", "minibatch_size": 4},
            "reference": {"placement": "loss"},
        },
        data=_text(folder),
        trainer=_trainer(),
    )


def _ppo_model(policy: Any, critic: Any) -> Config:
    return {
        "policy": policy,
        "advantage": {"estimator": "gae", "scale_rewards": "mean_std"},
        "update": {"loss": "token_clip", "minibatch_size": 6, "num_iterations": 2},
        "critic": {"model": critic, "optimizer": {"lr": 1e-3, "warmup_steps": 2}},
    }


def _ppo(folder: Path) -> Config:
    model = _ppo_model(str(folder / "text"), str(folder / "critic"))
    return _policy_run(
        "PPO",
        model=model | {"reference": _MOVING},
        data=_text(folder, num_workers=2),
        trainer=_trainer(_KL),
    )


def _ppo_lora(folder: Path) -> Config:
    model = _ppo_model(_lora(folder / "text"), None)
    return _policy_run("PPO", model=model, data=_text(folder), trainer=_trainer(_KL))


def _rloo_media(folder: Path) -> Config:
    return _policy_run(
        "RLOO",
        model={"policy": str(folder / "vlm"), "advantage": {"scale_rewards": "std"}},
        data=_images(folder, num_workers=2),
        trainer=_trainer(_KL),
    )


def _ppo_media(folder: Path) -> Config:
    model = _ppo_model(_lora(folder / "vlm"), str(folder / "vlm_critic"))
    return _policy_run("PPO", model=model, data=_images(folder), trainer=_trainer())


def _rloo_vllm(folder: Path) -> Config:
    # no averaged weights: what validation leaves in the engine's caches is there afterwards; and
    # prompts that begin alike and fill some blocks of them
    template = "This is a task of one line only, and you are to do it: {{ prompt }}"
    return _policy_run(
        "RLOO",
        model={"policy": str(folder / "text"), "engine": _OWN_ENGINE, "reference": _MOVING},
        data=_text(folder, prompt_template=template),
        trainer=_trainer(_SYNC, ema=False),
    )


def _ppo_vllm(folder: Path) -> Config:
    model = _ppo_model(_lora(folder / "text"), str(folder / "critic"))
    return _policy_run(
        "PPO",
        model=model | {"engine": _OWN_ENGINE},
        data=_text(folder),
        trainer=_trainer(_KL, _SYNC),
    )


def _rloo_media_vllm(folder: Path) -> Config:
    return _policy_run(
        "RLOO",
        model={"policy": str(folder / "vlm"), "engine": _OWN_ENGINE},
        data=_images(folder),
        trainer=_trainer(_SYNC, ema=False),
    )


def _rloo_ahead(folder: Path) -> Config:
    return _policy_run(
        "RLOO",
        model={"policy": str(folder / "text"), "engine": _SERVER, "rollout_ahead": 1},
        data=_text(folder),
        trainer=_trainer(_SYNC),
    )


def _reward_model(folder: Path) -> Config:
    trainer = _trainer(steps=9)
    # nothing is drawn here
    callbacks = [one for one in trainer["callbacks"] if "RolloutLog" not in one["class_path"]]
    trainer |= {"callbacks": callbacks, "accumulate_grad_batches": 2, "log_every_n_steps": 2}
    paths = {"train": str(folder / "pairs.jsonl"), "val": str(folder / "val_pairs.jsonl")}
    return {
        "seed_everything": 5,
        "model": _named(
            "lrlhf.modules.RewardModel",
            model=_lora(folder / "text"),
            optimizer={"lr": 3e-3, "schedule": "linear"},
        ),
        "data": _named(
            "lrlhf.datamodules.PreferenceDataModule", batch_size=3, num_workers=2, **paths
        ),
        "trainer": trainer,
    }


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("rloo", _rloo),
        Case("rloo_lora", _rloo_lora),
        Case("ppo", _ppo),
        Case("ppo_lora", _ppo_lora),
        Case("rloo_media", _rloo_media),
        Case("ppo_media", _ppo_media),
        Case("reward_model", _reward_model, draws=False, steps=9),
        Case("rloo_vllm", _rloo_vllm, vllm=True),
        Case("ppo_vllm", _ppo_vllm, vllm=True),
        Case("rloo_media_vllm", _rloo_media_vllm, vllm=True),
        Case("rloo_ahead", _rloo_ahead, vllm=True),
    )
}
