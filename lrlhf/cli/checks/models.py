"""Where models come from, and how long the texts may be that they read."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from lrlhf.cli.config_entries import (
    class_of,
    is_a,
    is_lrlhf,
    options_of,
    processes,
    reward_entries,
    spec_of,
)
from lrlhf.media import MediaProcessor
from lrlhf.models import (
    CausalLM,
    PretrainedSpec,
    ScoreModel,
    TextLimits,
    ValueModel,
    context_of,
    declared_ends,
    load_config,
    resolve_source,
)
from lrlhf.models.loading.meta import model_config, skeleton
from lrlhf.models.loading.model_sources import converted_folder, locate
from lrlhf.modules.referenced_policy import ReferencedPolicy
from lrlhf.options.errors import MistakeError

_TRAINED: Mapping[str, type[PretrainedSpec]] = {"policy": CausalLM, "model": ScoreModel}
"""Options of the modules with what they train, and what a plain source is there."""
_FURTHER_MODELS: Mapping[str, type[PretrainedSpec]] = {
    "reference": CausalLM,
    "teacher": CausalLM,
    "critic": ValueModel,
}
"""Groups of options that have a ``model`` of their own."""


@dataclass(frozen=True)
class TrainedModel:
    """What is known of the model that a module trains, without its weights."""

    key: tuple[str, ...]
    spec: PretrainedSpec
    config: PreTrainedConfig

    further: tuple[TrainedModel, ...] = ()
    """References and critics of their own, which read the same texts."""

    @property
    def context(self) -> int | None:
        """Tokens that it was made for; None: it has no limit, or none that its config tells."""
        return context_of(self.config)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer; a GGUF file is not converted for it."""
        path = _unconverted(self.spec.source)
        if path is None:
            return self.spec.load_tokenizer()
        read: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name
        )
        return read

    def end_token_ids(self, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
        """Return the ids at which generation stops, as far as files say so."""
        generation = None
        if _unconverted(self.spec.source) is None:
            with contextlib.suppress(OSError):  # there need not be any
                generation = GenerationConfig.from_pretrained(
                    resolve_source(self.spec.source), revision=self.spec.revision or "main"
                )
        return declared_ends(generation, self.config, tokenizer)

    def processor(self) -> MediaProcessor | None:
        """Load what reads images; None of a text model, and of a GGUF file."""
        loaded = None if _is_gguf(self.spec.source) else self.spec.load_processor()
        return None if loaded is None else MediaProcessor.of(loaded, self.config)


def check_models(model: Any) -> TrainedModel | None:
    """Refuse sources that lead to no model.

    Returns:
        What is known of the model that is trained; None: the module is not one of this library's.
    """
    if not is_lrlhf(model):
        return None
    options = options_of(model)
    trained, further = None, []
    for name, kind in _TRAINED.items():
        if options.get(name) is not None:
            trained = _look_at(("model", name), _spec(options[name], kind))
    for group, kind in _FURTHER_MODELS.items():
        key: tuple[str, ...] = ("model", group, "model")
        entry = options_of(options.get(group)).get("model")
        if is_a(model, ReferencedPolicy) and group == "reference":
            key, entry = ("model", group), options.get(group)
        if entry is not None:
            looked_at = _look_at(key, _spec(entry, kind))
            further += [looked_at] if group != "teacher" else []  # which compares lengths itself
    for source in _reward_sources(options):
        _check_location(("model", "rewards", "functions", "source"), source)
    return trained and replace(trained, further=tuple(further))


def check_built(trained: TrainedModel | None) -> int | None:
    """Build models without weights, and refuse what their options name and they do not have.

    Returns:
        Rows of the trained model's embedding; None: not known.
    """
    if trained is None:
        return None
    limits = None
    for each in (trained, *trained.further):
        try:
            model = skeleton(each.spec, body=not isinstance(each.spec, CausalLM))
        except ValueError as error:
            raise MistakeError(each.key, str(error), value=each.spec.source) from error
        limits = limits or TextLimits.of(model)
    return None if limits is None else limits.vocabulary


def _spec(entry: Any, kind: type[PretrainedSpec]) -> PretrainedSpec:
    own = class_of(entry) if isinstance(entry, Mapping) else None
    return spec_of(entry, own if own is not None and issubclass(own, PretrainedSpec) else kind)


def _look_at(key: tuple[str, ...], spec: PretrainedSpec) -> TrainedModel:
    _check_location(key, spec.source)
    try:
        if _unconverted(spec.source) is None:
            return TrainedModel(key, spec, load_config(spec.source, **spec.of_hub))
        return TrainedModel(key, spec, model_config(spec))
    except (ValueError, OSError) as error:
        raise MistakeError(key, str(error), value=spec.source) from error


def _check_location(key: tuple[str, ...], source: str) -> None:
    try:
        locate(source)
    except ValueError as error:
        raise MistakeError(key, str(error), value=source) from error


def _is_gguf(source: str) -> bool:
    path = locate(source)
    return isinstance(path, Path) and path.suffix == ".gguf"


@functools.cache
def _unconverted(source: str) -> Path | None:
    """Return the GGUF file of a source that no run has converted yet; None: it is none such."""
    path = locate(source)
    if isinstance(path, str) or path.suffix != ".gguf" or converted_folder(path).is_dir():
        return None
    return path


def _reward_sources(options: Mapping[str, Any]) -> Iterator[str]:
    if not is_lrlhf(options.get("rewards")):
        return
    for entry in reward_entries(options["rewards"]).values():
        if isinstance(entry, Mapping) and is_lrlhf(entry):
            source = options_of(entry).get("source")
            if isinstance(source, str):
                yield source


def check_main_memory(trainer: Mapping[str, Any], trained: TrainedModel | None) -> None:
    """Refuse a model of which DeepSpeed's processes cannot load a copy each before they split it.

    Raises:
        MistakeError: The copies take more than the main memory of this machine.
    """
    entry = trainer["strategy"]
    name = entry if isinstance(entry, str) else entry.get("class_path", "")
    if trained is None or "deepspeed" not in str(name).lower():
        return
    model = skeleton(trained.spec, body=not isinstance(trained.spec, CausalLM))
    size = sum(weight.numel() * weight.itemsize for weight in model.parameters())
    copies = processes({**trainer, "num_nodes": 1}).number or 1
    there = psutil.virtual_memory().total
    if copies * size > there:
        raise MistakeError(
            ("trainer", "strategy"),
            f"DeepSpeed's processes load all of a model before they split it: {copies} times "
            f"{size / 2**30:.1f} GiB of {trained.spec.source}, and this machine has "
            f"{there / 2**30:.1f} GiB of main memory; take fsdp2, whose processes read their parts",
        )
