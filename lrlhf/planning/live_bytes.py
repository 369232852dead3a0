"""Counts the bytes of the fake tensors of a pass, each from its creation to its end."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ON_HOST = "host"
"""Column of what is kept in main memory, which no `Usage` counts."""


class Usage(NamedTuple):
    """Bytes of one process at one moment, by column of the memory table."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    cache: int = 0

    @property
    def total(self) -> int:
        """The sum of all columns."""
        return sum(self)

    def plus(self, *others: Usage) -> Usage:
        """Return the sum, column by column."""
        return Usage(*map(sum, zip(self, *others, strict=True)))


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes of the tensors that are created inside, for as long as they live.

    Args:
        known: Tensors that exist already and do not count: weights and inputs.
        cache: Keys and values that exist already and count.
        vocabulary: Length of a row of logits; None: there are none.
        selected: How many positions of a mask are True, which shapes alone do not tell.
    """

    def __init__(
        self,
        *,
        known: Iterable[Tensor],
        cache: Iterable[Tensor] = (),
        vocabulary: int | None = None,
        selected: int = 0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._vocabulary, self._selected = vocabulary, selected
        self._live: dict[int, tuple[weakref.ref[Any], str, int]] = {}
        self._now: Counter[str] = Counter()
        self._at_peak: Mapping[str, int] = {}
        for tensor in cache:
            self._count(tensor, "cache")

    def peak(self) -> Usage:
        """Return what was alive when it was most."""
        return Usage(**{name: size for name, size in self._at_peak.items() if name != ON_HOST})

    def move(self, tensor: Tensor, column: str) -> None:
        """Count a tensor in another column from now on."""
        key = tensor.untyped_storage()._cdata
        if key in self._live:
            reference, before, size = self._live[key]
            self._now[before] -= size
            self._now[column] += size
            self._live[key] = (reference, column, size)
            self._note_peak()

    def _note_peak(self) -> None:
        if _on_device(self._now) > _on_device(self._at_peak):
            self._at_peak = dict(self._now)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = self._selection(func, args)
        if result is None:
            result = func(*args, **(kwargs or {}))
        # autocast keeps its copies of weights until the backward pass
        copied = func is torch.ops.aten._to_copy.default and self._is_weight(args[0])
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf, "parameters" if copied else None)
        return result

    def _is_weight(self, tensor: Tensor) -> bool:
        return tensor.is_floating_point() and tensor.untyped_storage()._cdata in self._known

    def _selection(self, func: Any, args: tuple[Any, ...]) -> Tensor | None:
        """Answer what depends on how many entries of a mask are True."""
        if func is torch.ops.aten.masked_select.default:
            return args[0].new_empty(self._selected)  # type: ignore[no-any-return]
        if func is not torch.ops.aten.index.Tensor:
            return None
        tensor, indices = args
        masks = [i for i, index in enumerate(indices) if index is not None]
        if len(masks) != 1 or indices[masks[0]].dtype != torch.bool:
            return None
        axis = masks[0]
        rest = tensor.shape[axis + indices[axis].dim() :]
        return tensor.new_empty((*tensor.shape[:axis], self._selected, *rest))  # type: ignore[no-any-return]

    def _count(self, tensor: Tensor, column: str | None) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or key in self._known:
            return
        if column is None:
            wide = tensor.dim() > 1 and tensor.shape[-1] == self._vocabulary
            column = "logits" if wide and tensor.is_floating_point() else "activations"
        reference = weakref.ref(storage, lambda _, key=key: self._forget(key))  # type: ignore[misc]
        size = storage.nbytes()
        self._live[key] = (reference, column, size)
        self._now[column] += size
        self._note_peak()

    def _forget(self, key: int) -> None:
        _, column, size = self._live.pop(key)
        self._now[column] -= size


def _on_device(sizes: Mapping[str, int]) -> int:
    return sum(size for column, size in sizes.items() if column != ON_HOST)
