"""Options of DeepSpeed's engines."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

_ELSEWHERE = {
    "bf16": "set trainer.precision: bf16-mixed",
    "bfloat16": "set trainer.precision: bf16-mixed",
    "data_types": "set trainer.precision",
    "fp16": "fp16 is not supported, take trainer.precision: bf16-mixed",
    "gradient_accumulation_steps": "set trainer.accumulate_grad_batches of a reward model, or "
    "update.micro_batch_tokens of a policy",
    "gradient_clipping": "set trainer.gradient_clip_val of a reward model, or "
    "update.max_grad_norm and critic.max_grad_norm of a policy",
    "managed_gradient_accumulation": "the modules decide when a step is due",
    "optimizer": "set the module's optimizer",
    "scheduler": "set the schedule of the module's optimizer",
    "train_batch_size": "set the data's batch_size",
    "train_micro_batch_size_per_gpu": "set the data's batch_size",
    "zero_optimization.offload_optimizer": "set strategy.offload_optimizer",
    "zero_optimization.offload_param": "set strategy.offload_parameters",
    "zero_optimization.stage": "set strategy.stage",
}


def engine_config(
    *, stage: int, offload_optimizer: bool, offload_parameters: bool, bf16: bool, on_gpu: bool
) -> dict[str, Any]:
    """Return the options of an engine that trains a model; see `DeepSpeed` for their meaning."""
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": on_gpu and stage > 1}
    memory = {"device": "cpu", "pin_memory": on_gpu}
    if offload_optimizer:
        zero["offload_optimizer"] = dict(memory)
    if offload_parameters:
        zero["offload_param"] = dict(memory)
    config: dict[str, Any] = {
        # we clip, and we say when a step is due
        "gradient_clipping": 0.0,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "train_micro_batch_size_per_gpu": 1,  # for its own throughput figures only
        # optimizers are those of PyTorch, in main memory too
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    if bf16:
        config["bf16"] = {"enabled": True}
        config["communication_data_type"] = "fp32"
        if stage > 1:  # ZeRO-1 would need another optimizer for it
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def frozen_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Derive the options of an engine that only splits weights from those of one that trains."""
    kept = copy.deepcopy(dict(config))
    for name in ("data_types", "communication_data_type", "managed_gradient_accumulation"):
        kept.pop(name, None)
    kept["zero_optimization"].pop("offload_optimizer", None)
    return kept


def merged(config: Mapping[str, Any], further: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config`` with the options of ``further`` put over it, group by group."""
    result = dict(config)
    for key, value in further.items():
        old = result.get(key)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        result[key] = merged(old, value) if both else copy.deepcopy(value)  # type: ignore[arg-type]
    return result


def check_further_options(options: Mapping[str, Any]) -> None:
    """Raise `ValueError` for an option that is set somewhere else; it says where."""
    zero = options.get("zero_optimization", {})
    names = [*options, *(f"zero_optimization.{name}" for name in zero)]
    for name in names:
        if name in _ELSEWHERE:
            raise ValueError(f"strategy.config sets {name}; instead, {_ELSEWHERE[name]}")
