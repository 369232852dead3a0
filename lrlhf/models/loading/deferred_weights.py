"""Models without weights that know where theirs are stored, to be read when they are split.

``from_pretrained`` builds such a model on torch's "meta" device, with the names, shapes and tied
weights of a loaded one. What it would have read is noted on the modules, so that copies of a model,
adapters around it and its body alone know it too. Once a model is split, each rank reads the rows
that it holds.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from lrlhf.models.sharding import own_part, reshard, within
from lrlhf.models.transformers_internals import (
    compute_buffers,
    mark_initialized,
    weight_conversions,
)
from lrlhf.torch_internals import local_slices

logger = logging.getLogger(__name__)

_PLACES, CHECKS = "_places_of_weights", "_checks_once_read"
"""What is noted on modules: where their tensors are stored; on models: what waits for weights."""

_later: ContextVar[bool] = ContextVar("later", default=False)


class Built(NamedTuple):
    """A model, and what its loading reported."""

    model: PreTrainedModel
    report: dict[str, Any]


@contextlib.contextmanager
def reading(*, later: bool) -> Iterator[None]:
    """Build models inside without their weights, or, not ``later``, with them again."""
    token = _later.set(later)
    try:
        yield
    finally:
        _later.reset(token)


# ------------------------------------------------------------------ building


def build_deferred(
    load: Callable[..., Any],
    location: str,
    config: PreTrainedConfig,
    *,
    exotic: str | None,
    of_hub: dict[str, Any],
) -> Built | None:
    """Build a model whose weights are read later; None: it is to be loaded now.

    Args:
        load: ``from_pretrained`` with its arguments.
        location: Folder or hub id.
        config: Of the model.
        exotic: What keeps this model from being read in parts, if that is known already.
        of_hub: What a hub id is loaded with.
    """
    if not _later.get():
        return None
    if getattr(config, "quantization_config", None) is not None:
        exotic = "its weights are stored quantised"
    files = [] if exotic else _weight_files(location, of_hub)
    reason = exotic or (None if files else "its weights are not in safetensors files")
    if reason is None:
        model, report = load(device_map="meta")
        reason = _note_places(model, report, files)
        if reason is None:
            return Built(model, report)
    logger.info("every process loads all of %s before it is split: %s", location, reason)
    return None


def _weight_files(location: str, of_hub: dict[str, Any]) -> list[Path]:
    """Return the files that ``from_pretrained`` reads; empty: they are of another format."""
    find = partial(
        cached_file,
        location,
        revision=of_hub["revision"],
        _raise_exceptions_for_missing_entries=False,
    )
    if (single := find(SAFE_WEIGHTS_NAME)) is not None:
        return [Path(single)]
    if (index := find(SAFE_WEIGHTS_INDEX_NAME)) is None:
        return []
    shards: Any = get_checkpoint_shard_files  # without annotations
    files, _ = shards(location, index, revision=of_hub["revision"])
    return [Path(file) for file in files]


@dataclass(frozen=True)
class _StoredTensor:
    """Where a tensor is stored: as it is, or, with a converter, its experts each by itself."""

    name: str
    stored: dict[str | None, list[tuple[Path, str]]]
    """File and key of what it is made of, by the pattern that a key fits."""
    converter: WeightConverter | None

    def read(self, opened: _OpenFiles, rows: tuple[slice, ...], dtype: torch.dtype) -> Tensor:
        """Read some rows along every axis."""
        if self.converter is None:
            [(file, key)] = self.stored[None]
            part: Tensor = opened[file].get_slice(key)[rows]
            return part
        converter = copy.deepcopy(self.converter)
        experts, *inner = rows
        for pattern, locations in self.stored.items():
            for file, key in locations[experts]:
                view = opened[file].get_slice(key)
                converter.add_tensor(self.name, key, pattern, partial(_all_of, view, dtype))  # type: ignore[arg-type]
        (stack,) = converter.convert(self.name).values()
        part = stack[(slice(None), *inner)]
        assert isinstance(part, Tensor)
        return part


def _all_of(stored: Any, dtype: torch.dtype) -> Tensor:
    tensor: Tensor = stored[...]
    return tensor.to(dtype)


class _OpenFiles(dict[Path, Any]):
    """Safetensors files, opened once; only what is asked for is read, and nothing is mapped."""

    def __missing__(self, file: Path) -> Any:
        self[file] = safe_open(file, framework="pt", backend="pread")
        return self[file]


def _note_places(model: PreTrainedModel, report: dict[str, Any], files: list[Path]) -> str | None:
    """Note on the modules of a model where its weights are stored; say what keeps them from it."""
    if report["missing_keys"] or report["mismatched_keys"] or report["error_msgs"]:
        return "its weights are not all in its files"
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    conversions = weight_conversions(model)
    assert conversions is not None
    converters = [one for one in conversions if isinstance(one, WeightConverter)]
    if not all(map(_stacks_experts, converters)):
        return "its weights are stored in another layout than it computes with"
    names = _stored_names(model, state, files, conversions)
    again = model.all_tied_weights_keys.items()
    if any(name in names and other in names for name, other in again):
        return "its tied weights are stored twice"
    by_pattern = {key: each for each in converters for key in each.source_patterns}
    noted: set[int] = set()
    for name, stored in names.items():
        path, _, attribute = name.rpartition(".")
        converter = by_pattern.get(next(iter(stored)) or "")
        stored_tensors = vars(model.get_submodule(path)).setdefault(_PLACES, {})
        stored_tensors[attribute] = _StoredTensor(name, stored, converter)
        noted.add(id(state[name]))
    lacking = [name for name, tensor in state.items() if id(tensor) not in noted]
    return f"{lacking[0]} is in none of its files" if lacking else None


def _stacks_experts(converter: WeightConverter) -> bool:
    first, *rest = converter.operations
    return (
        isinstance(first, MergeModulelist)
        and first.dim == 0
        and len(converter.target_patterns) == 1
        and all(isinstance(further, Concatenate) and further.dim > 0 for further in rest)
    )


def _stored_names(
    model: PreTrainedModel, state: dict[str, Tensor], files: list[Path], conversions: list[Any]
) -> dict[str, dict[str | None, list[tuple[Path, str]]]]:
    """Find what every tensor of a model is made of, in the order that experts have."""
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    keys: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            keys |= dict.fromkeys(opened.keys(), file)
    stored: dict[str, dict[str | None, list[tuple[Path, str]]]] = {}
    prefix = model.base_model_prefix
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:  # as ``from_pretrained`` does it
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name in state:
            parts = stored.setdefault(name, defaultdict(list))
            parts[pattern].append((keys[key], key))
    return stored


# ------------------------------------------------------------------ between building and reading


def is_deferred(model: nn.Module) -> bool:
    """Tell whether weights of a model are still to be read."""
    return any(_PLACES in vars(module) for module in model.modules())


def device_for_new(model: PreTrainedModel) -> torch.device:
    """Return the device of what is added to a model: its own, before it is read the CPU."""
    return torch.device("cpu") if is_deferred(model) else model.device


def waits(model: PreTrainedModel, check: Callable[[Any], object]) -> bool:
    """Put a check of a model's weights off until they are read; False: they are there."""
    if not is_deferred(model):
        return False
    vars(model).setdefault(CHECKS, []).append(check)
    return True


def stored_tensor(module: nn.Module, name: str) -> Tensor:
    """Return a tensor of a module, read by itself where the module is not read yet."""
    tensor: Tensor = getattr(module, name)
    stored: _StoredTensor | None = vars(module).get(_PLACES, {}).get(name)
    if stored is None:
        return tensor
    return stored.read(_OpenFiles(), _rows(tensor), tensor.dtype).to(tensor.dtype)


@contextlib.contextmanager
def standing_in(model: nn.Module) -> Iterator[None]:
    """Have what is not read yet on the CPU, where it takes no memory and means nothing.

    Adapters are made from the device and shape of a layer; inside they are what they are for a
    loaded model, and random numbers are drawn as for that.
    """
    if not is_deferred(model):
        yield
        return
    standing: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for weight in [weight for weight in model.parameters() if weight.is_meta]:
        one = nn.Parameter(_standing_in(weight), requires_grad=weight.requires_grad)
        standing[id(weight)] = weight, one
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_meta
    ]
    _replace(model, {before: one for before, (_, one) in standing.items()})
    for module, name, buffer in buffers:
        setattr(module, name, _standing_in(buffer))
    try:
        yield
    finally:
        for module, name, buffer in buffers:
            setattr(module, name, buffer)
        _replace(model, _taken_back(model, standing.values()))


def _standing_in(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def _taken_back(
    model: nn.Module, standing: Iterable[tuple[nn.Parameter, nn.Parameter]]
) -> dict[int, nn.Parameter]:
    """Return weights that are not read yet, by what stood in for them or was copied from that."""
    deferred: dict[int, nn.Parameter] = {}
    for weight, one in standing:
        weight.requires_grad_(one.requires_grad)
        deferred[id(one)] = weight
    for module in model.modules():
        parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        for name in parameters.keys() & vars(module).get(_PLACES, {}).keys():
            copied = parameters[name]
            if id(copied) not in deferred:
                meta = torch.empty_like(copied, device="meta")
                deferred[id(copied)] = nn.Parameter(meta, requires_grad=copied.requires_grad)
    return deferred


def _replace(model: nn.Module, weights: dict[int, nn.Parameter]) -> None:
    """Put weights in the place of others, by their ids, wherever they are tied to."""
    for module in model.modules():
        for name, weight in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            if id(weight) in weights:
                setattr(module, name, weights[id(weight)])


# ------------------------------------------------------------------ reading


@torch.no_grad()
def read(
    model: nn.Module, weights_on: torch.device | str, buffers_on: torch.device | str | None = None
) -> None:
    """Give a model its weights, each rank the parts that it holds, and make up for its checks.

    Args:
        model: Built by `build_deferred`, whole or split; any other stays as it is. If it is split,
            all ranks must call this.
        weights_on: Device of this rank's parts.
        buffers_on: Device of what is not trained; None: the same.

    Raises:
        ValueError: A check that was waiting for the weights refuses the model.
    """
    if not is_deferred(model):
        return
    _make_room(model, weights_on, buffers_on or weights_on)
    opened = _OpenFiles()
    for module in model.modules():
        for name, stored in vars(module).pop(_PLACES, {}).items():
            tensor = getattr(module, name)
            rows = _rows(tensor)
            if all(row.stop > row.start for row in rows):
                own_part(tensor).copy_(stored.read(opened, rows, tensor.dtype))
    waiting = [(part, vars(part).pop(CHECKS, [])) for part in model.modules()]
    for part, checks in waiting:
        for check in checks:
            within(model, partial(check, part))
            reshard(model)


def _make_room(
    model: nn.Module, weights_on: torch.device | str, buffers_on: torch.device | str
) -> None:
    """Take memory for what is on the meta device, and compute what no file holds."""
    room: dict[int, nn.Parameter] = {}
    for weight in [weight for weight in model.parameters() if weight.is_meta]:
        empty = torch.empty_like(weight, device=weights_on)
        room[id(weight)] = nn.Parameter(empty, requires_grad=weight.requires_grad)
        # else computing a layer's buffers would draw new weights for it
        mark_initialized(room[id(weight)])
    _replace(model, room)
    family: dict[nn.Module, PreTrainedModel] = {}
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            family |= dict.fromkeys(part.modules(), part)
    for module in list(family):
        missing = [(name, one) for name, one in module.named_buffers(recurse=False) if one.is_meta]
        for name, buffer in missing:
            setattr(module, name, torch.empty_like(buffer, device=buffers_on))
        if missing:
            compute_buffers(family[module], module)
    nn.Module.to(model)  # nowhere else, but FSDP2 looks for its parts again


def _rows(tensor: Tensor) -> tuple[slice, ...]:
    """Return where this rank's part of a tensor begins and ends along every axis."""
    if isinstance(tensor, DTensor):
        return local_slices(tensor)
    return tuple(slice(0, size) for size in tensor.shape)
