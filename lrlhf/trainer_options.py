"""What a trainer's options may be, whether a config or Python gives them."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any, Final

import torch
from lightning.pytorch.strategies import StrategyRegistry

import lrlhf.strategies  # noqa: F401  their names are known once they are imported

_SPLITS_ONE_MODEL: Final = {
    "fsdp": "fsdp2",
    "deepspeed": "deepspeed_zero2",
    **{f"deepspeed_stage_{stage}": f"deepspeed_zero{stage}" for stage in (1, 2, 3)},
}
"""Lightning's ways to split a module, and ours."""
_STRATEGIES: Final = (
    *("auto", "ddp", "ddp_find_unused_parameters_true", "fsdp2"),
    *("deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3"),
)
"""What a message lists; Lightning has more."""
REPLACED: Final = {
    "accumulate_grad_batches": (
        "model.update.micro_batch_tokens, which bounds the tokens of one forward and backward pass "
        "and changes nothing else; data.batch_size and model.num_generations set the batch"
    ),
    "gradient_clip_val": "model.update.max_grad_norm",
}
"""What a policy, which takes its optimizer steps itself, has in the place of an option."""


_OF_ROWS: Final = {
    "accumulate_grad_batches": "model.micro_batch_tokens, and data.batch_size for rows of a step",
    "gradient_clip_val": "model.max_grad_norm",
}
"""The same of modules that learn from rows, such as `lrlhf.modules.SFT`."""


def refuse_strategy(strategy: Any) -> None:
    """Raise ``ValueError`` for a name of none, or of one that does not know of several models."""
    if not isinstance(strategy, str):
        return
    name = strategy.removesuffix("_cpu_offload").removesuffix("_offload")
    if name in _SPLITS_ONE_MODEL:
        raise ValueError(
            f"{strategy} splits a module as one model with one optimizer; take "
            f"{_SPLITS_ONE_MODEL[name]}, which splits each trained model by itself "
            "(docs/distributed.md)"
        )
    if strategy == "auto" or strategy in StrategyRegistry.available_strategies():
        return
    near = [one for one in _STRATEGIES if strategy.lower() in one]
    near = near or difflib.get_close_matches(strategy, _STRATEGIES, n=1)
    nearest = f"; did you mean '{near[0]}'?" if near else ""
    listed = ", ".join(_STRATEGIES)
    raise ValueError(f"there is no strategy '{strategy}'{nearest} (there are {listed})")


def refuse_accelerator(name: Any) -> None:
    """Raise ``ValueError`` for a GPU that is not there."""
    has_mps = name == "gpu" and torch.backends.mps.is_available()
    if name in ("gpu", "cuda") and not torch.cuda.is_available() and not has_mps:
        raise ValueError(
            f"{name} is asked for, and torch finds none on this machine (torch "
            f"{torch.__version__}); take cpu or auto, or install a torch for its GPU"
        )


def refuse_replaced(module: str, option: str, value: Any, *, is_policy: bool) -> None:
    """Raise ``ValueError`` for an option that a module with manual optimization has another for."""
    if value not in (None, 1 if option == "accumulate_grad_batches" else None):
        other = (REPLACED if is_policy else _OF_ROWS)[option]
        raise ValueError(f"{module} takes its optimizer steps itself; set {other}")


def refuse_folder(path: str | Path) -> None:
    """Raise ``ValueError`` for a folder that cannot be made or written."""
    if "://" in str(path):
        return
    folder = Path(path).expanduser()
    try:
        there = next(part for part in (folder, *folder.absolute().parents) if part.exists())
    except PermissionError:
        problem = "there is no permission to look into one of the folders above it"
    else:
        problem = ""
        if not there.is_dir():
            problem = f"{there} is a file" if there != folder else "it is a file"
        elif not os.access(there, os.W_OK | os.X_OK):
            problem = f"there is no permission to write in {there}"
    if problem:
        raise ValueError(f"{path} cannot be written: {problem}")
