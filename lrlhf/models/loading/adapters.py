"""LoRA adapters, new ones and those that were trained before, as PEFT stores them."""

from __future__ import annotations

import difflib
import logging
import re
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

import peft
from transformers import PreTrainedModel

from lrlhf.models.loading.deferred_weights import standing_in
from lrlhf.models.loading.model_sources import explained
from lrlhf.options.conversion import settings

logger = logging.getLogger(__name__)


@settings
@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank adapters: only they are trained, the model's own weights stay as they are."""

    r: int = 16
    """Rank of every adapter."""
    alpha: int = 32
    """Adapters are scaled by ``alpha / r``."""
    dropout: float = 0.0
    """Dropout in front of the adapters, active in training mode only."""
    target_modules: str | list[str] = "all-linear"
    """Names (or one regular expression) of the layers that get one; a name of none is refused.
    ``all-linear``: all but the output head, routers of a kind of their own, and what state spaces
    read without calling it."""
    modules_to_save: list[str] | None = None
    """Further modules that are trained in full, as a copy."""
    source: str | None = None
    """Go on training the adapters in this folder, or of this hub id, as PEFT saves them. They bring
    their own options, but for ``dropout``. The policy's reference then has them too. Models that
    stay as they are, such as a teacher, are read with them."""

    def __post_init__(self) -> None:
        own = ("r", "alpha", "target_modules", "modules_to_save")
        defaults = {field.name: field.default for field in fields(self)}
        changed = [name for name in own if getattr(self, name) != defaults[name]]
        if self.source is not None and changed:
            raise ValueError(
                f"lora.{changed[0]}: the adapters of lora.source have that already; leave it out"
            )


def add_adapters(
    model: PreTrainedModel, lora: LoRA, task_type: str, *, skip: str | None
) -> peft.PeftModel:
    """Put adapters around a model, new ones or those that ``lora.source`` holds.

    Args:
        model: As it was loaded.
        lora: Which ones.
        task_type: PEFT's name for what the model does.
        skip: Pattern of module names that get no new adapter; None: there is none to leave out.

    Raises:
        ValueError: They do not fit the model.
    """
    if lora.source is None:
        config = peft.LoraConfig(
            task_type=task_type,
            r=lora.r,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=lora.target_modules,
            exclude_modules=skip,
            modules_to_save=lora.modules_to_save,
        )
    else:
        config = stored_adapters(lora.source, lora_dropout=lora.dropout, task_type=task_type)
    modules = [name for name, _ in model.named_modules() if name]
    learnt = [name for name in modules if not (skip and re.fullmatch(skip, name))]
    _refuse_unknown(model, "modules_to_save", lora.modules_to_save or (), modules)
    try:
        with warnings.catch_warnings():
            # it looks for the ranks of stacked experts among modules, where they are not
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not")
            # `check_mergeable` refuses what would go wrong
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True` and a tied")
            with standing_in(model):
                adapted = peft.get_peft_model(model, config)
                if lora.source is not None:
                    with explained(lora.source):
                        _load(adapted, lora.source)
    except (RuntimeError, ValueError, re.error) as error:
        raise ValueError(f"lora does not fit {type(model).__name__}: {error}") from error
    if not isinstance(lora.target_modules, str):
        # PEFT takes parameters in place of layers that earlier versions of transformers had
        targets = config.target_modules if config.target_parameters else lora.target_modules
        named = [name for name in lora.target_modules if name in (targets or ())]
        _refuse_unknown(model, "target_modules", named, learnt)
    return adapted


def _refuse_unknown(
    model: PreTrainedModel, option: str, names: Sequence[str], modules: Collection[str]
) -> None:
    """Refuse names of no module, which PEFT leaves out where another name is one."""
    for name in names:
        if not any(module == name or module.endswith(f".{name}") for module in modules):
            last = sorted({module.rpartition(".")[2] for module in modules})
            near = difflib.get_close_matches(name.rpartition(".")[2], last, n=3) or last
            raise ValueError(
                f"lora.{option}: {name!r} is the name of no module of {type(model).__name__} that "
                f"can learn; there are {', '.join(near)}"
            )


def warn_of_unknown_words(model: PreTrainedModel, lora: LoRA) -> None:
    """Name what stands in a pattern and in no module's name: it may be an alternative of many."""
    pattern = lora.target_modules
    if not isinstance(pattern, str) or pattern == "all-linear":
        return
    modules = [name for name, _ in model.named_modules()]
    words = re.findall(r"[A-Za-z_]\w{2,}", re.sub(r"\\.|\[.*?\]|\(\?<?!.*?\)|\(\?\S", " ", pattern))
    unknown = [word for word in words if not any(word in module for module in modules)]
    if unknown:
        logger.warning(
            "lora.target_modules: no layer has %s in its name, so that part of %r adapts nothing",
            ", ".join(unknown),
            pattern,
        )


def stored_adapters(source: str, **changed: Any) -> peft.LoraConfig:
    """Read the options of stored adapters, to train them further.

    Args:
        source: Folder or hub id.
        **changed: Options that do not come from there.

    Raises:
        ValueError: There are no adapters, or of another kind than LoRA.
    """
    try:
        config = peft.PeftConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"lora.source {source!r} leads to no adapters: give the folder or hub id with their "
            f"adapter_config.json ({error})"
        ) from error
    if not isinstance(config, peft.LoraConfig):
        kind = type(config).__name__.removesuffix("Config")
        raise ValueError(f"lora.source {source!r} has adapters of the kind {kind}, not LoRA")
    config.inference_mode = False  # else nothing of it would be trained
    for name, value in changed.items():
        setattr(config, name, value)
    return config


def _load(model: peft.PeftModel, source: str) -> None:
    """Give new adapters the values of stored ones.

    Args:
        model: With adapters of the same options. On the meta device nothing is read.
        source: Folder or hub id.

    Raises:
        ValueError: The values are those of other layers.
        RuntimeError: They have other shapes.
    """
    adapters = {name: w for name, w in model.named_parameters() if w.requires_grad}
    if all(weight.is_meta for weight in adapters.values()):
        return
    stored = peft.load_peft_weights(source, device="cpu")
    result = peft.set_peft_model_state_dict(model, stored)
    lacking = sorted(adapters.keys() & set(result.missing_keys))
    if result.unexpected_keys:
        raise ValueError(
            f"lora.source {source!r} has weights of another model, such as "
            f"{result.unexpected_keys[0]}"
        )
    if lacking:
        raise ValueError(f"lora.source {source!r} has no weights for {lacking[0]}")
