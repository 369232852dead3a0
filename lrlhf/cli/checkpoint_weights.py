"""A model filled from a checkpoint: for ``lrlhf export``, ``generate`` and ``chat``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrlhf.callbacks import EMA
from lrlhf.models import stop_at
from lrlhf.models.sharding import check_same_names, load_state
from lrlhf.modules.policy.load_policy import END_TOKEN_IDS
from lrlhf.run.checkpoints.checkpoint_reader import read_checkpoint
from lrlhf.run.checkpoints.checkpoint_search import check


def fill(
    module: nn.Module,
    checkpoint: Path,
    *,
    averaged: Mapping[str, nn.Parameter] | None = None,
    prefix: str = "",
) -> int | None:
    """Give a module the weights of a checkpoint of any strategy, and return its step if it has one.

    What the run learnt to end its responses with goes into the model's generation config.

    Args:
        module: Its weights have the names of the checkpoint.
        checkpoint: A file or folder.
        averaged: Weights that get the averages of the `EMA` callback, by their names there; None:
            none does.
        prefix: Leave out what is called otherwise, such as the weights of a critic.

    Raises:
        CheckpointMismatchError: The checkpoint is that of another model.
        NotACheckpointError: It is damaged, or none.
        ValueError: It has no averaged weights.
    """
    check(checkpoint)
    stored = read_checkpoint(checkpoint)
    weights = stored["state_dict"]
    names = [name for name in weights if name.startswith(prefix)]
    check_same_names("the checkpoint", names, module.state_dict(keep_vars=True))
    load_state(module, weights, strict=False)
    for part in module.modules():
        if isinstance(part, PreTrainedModel) and part.can_generate():
            stop_at(part, stored.get(END_TOKEN_IDS))
    step: int | None = stored.get("global_step")
    if averaged is None:
        return step
    averages = _averages(stored, checkpoint)
    names = [name for name in averages if name.startswith(prefix)]
    check_same_names("the checkpoint's average", names, averaged)
    with torch.no_grad():
        for name, weight in averaged.items():
            weight.copy_(averages[name])
    return step


def _averages(stored: Mapping[str, Any], checkpoint: Path) -> Mapping[str, Tensor]:
    if "callbacks" not in stored:
        raise ValueError(
            f"{checkpoint} holds weights only (save_weights_only), no averages; leave out --use_ema"
        )
    for key, state in stored["callbacks"].items():
        if key.split("{")[0] == EMA.__qualname__:
            shadows: Mapping[str, Tensor] = state["shadows"]
            return shadows
    raise ValueError(
        f"{checkpoint} has no averaged weights: the run had no EMA callback; leave out --use_ema"
    )
