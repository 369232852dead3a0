"""``lrlhf export``: the model of a checkpoint, as others load it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lrlhf.callbacks import EMA
from lrlhf.callbacks.ema import trainable_weights
from lrlhf.callbacks.hub import HubRepo
from lrlhf.callbacks.model_card import Origin, write_model_card
from lrlhf.models import stop_at
from lrlhf.models.sharding import check_same_names, load_state
from lrlhf.modules.contracts import Exportable
from lrlhf.modules.policy.load_policy import END_TOKEN_IDS
from lrlhf.run.atomic import atomic_folder, remove_unclaimed
from lrlhf.run.checkpoints.checkpoint_reader import read_checkpoint
from lrlhf.run.checkpoints.checkpoint_search import check
from lrlhf.secrets import safe


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


_UNFINISHED = "export"
"""Ending of the hidden folder that is being written."""


def export_checkpoint(
    module: L.LightningModule, data: L.LightningDataModule | None, options: Mapping[str, Any]
) -> None:
    """Fill a module from a checkpoint of any strategy, and write its model into a new folder.

    Args:
        module: As the config builds it.
        data: Of the same config, for the model card.
        options: ``ckpt_path``, ``output``, ``use_ema`` (the averaged weights of the `EMA`
            callback), ``license``, and those of the push: ``push_to_hub``, ``private``,
            ``revision``.

    Raises:
        CheckpointMismatchError: The checkpoint is that of another model.
        FileExistsError: The folder exists.
        HubError: The hub cannot be written to; the export is complete if it was begun.
        NotACheckpointError: The checkpoint is damaged, or none.
        ValueError: The module cannot be exported, or the checkpoint has no averaged weights.
    """
    checkpoint, folder = Path(options["ckpt_path"]), Path(options["output"])
    if not isinstance(module, Exportable):
        raise ValueError(f"{type(module).__name__} has no export_pretrained()")
    if folder.exists():
        raise FileExistsError(f"{folder} exists; choose another name, or remove it")
    repo = hub_repo(options)
    if repo is not None:
        repo.create()
    averaged = trainable_weights(module) if options["use_ema"] else None
    step = fill(module, checkpoint, averaged=averaged)
    origin = Origin(
        module=module,
        data=data,
        step=step,
        run=_run_of(checkpoint),
        license=options["license"],
        repo=None if repo is None else repo.repo_id,
    )
    # of exports that were killed, whatever they were to be called
    remove_unclaimed(folder.parent, "", _UNFINISHED)
    with atomic_folder(folder, _UNFINISHED) as fresh:
        module.export_pretrained(fresh)
        write_model_card(fresh, origin)
    sys.stdout.write(safe(f"wrote {folder}\n"))
    if repo is not None:
        sys.stdout.write(safe(f"pushed it to {repo.push(folder, step=step)}\n"))


def hub_repo(options: Mapping[str, Any]) -> HubRepo | None:
    """Return where options say to push to.

    Raises:
        ValueError: They say how to push, but not where to, or the name is none.
    """
    name, private, revision = (options[key] for key in ("push_to_hub", "private", "revision"))
    if name is not None:
        return HubRepo(repo_id=name, private=private, revision=revision)
    if private is not None or revision is not None:
        raise ValueError("private and revision are options of a push: give push_to_hub too")
    return None


def _run_of(checkpoint: Path) -> Path | None:
    """Return the run folder that a checkpoint is in; None: it was moved out of it."""
    for folder in checkpoint.absolute().parents[:2]:
        if (folder / "metrics.csv").exists() or (folder / "config.yaml").exists():
            return folder
    return None
