"""Weights under the names, and in the shapes, that checkpoints of a family have.

``from_pretrained`` renames the weights of many families, and stacks those of experts.
``save_pretrained`` undoes it for a whole model at once; here it is undone for one weight after
another.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)

_CONVERSIONS = "_weight_conversions"


def conversions_of(model: PreTrainedModel) -> dict[str, Any]:
    """Return what ``from_pretrained`` noted on a model about names; empty: it was not loaded so."""
    return {key: value for key, value in vars(model).items() if key == _CONVERSIONS}


class CheckpointNames:
    """Undoes what loading does to names and shapes, as ``save_pretrained`` does.

    Args:
        model: Whole, split, or with adapters.
        names: Those that its weights have in memory, without adapters.
    """

    def __init__(self, model: PreTrainedModel, names: Iterable[str]) -> None:
        self._model = model
        conversions = conversions_of(model).get(_CONVERSIONS)
        if conversions is None:
            # of a model that was built from its config; see `revert_weight_conversion`
            known = get_model_conversion_mapping(model, add_legacy=False)
            conversions = [one for one in known if not isinstance(one, PrefixChange)]
        undone = [conversion.reverse_transform() for conversion in reversed(conversions)]
        self._renamings = [one for one in undone if isinstance(one, WeightRenaming)]
        self._converters = [one for one in undone if isinstance(one, WeightConverter)]
        self._sizes = Counter(self._renamed(name)[0] for name in names)

    def convert(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Go through weights as checkpoints have them.

        Those that become one weight together wait for each other; a weight that becomes several,
        such as a stack of experts, is cut into views of it.
        """
        waiting: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, weight in weights:
            renamed, source = self._renamed(name)
            if source is None:
                yield renamed, weight
                continue
            waiting[renamed][name] = weight
            if len(waiting[renamed]) == self._sizes[renamed]:
                yield from revert_weight_conversion(self._model, waiting.pop(renamed)).items()
        assert not waiting, f"weights that wait for others: {sorted(waiting)}"

    def _renamed(self, name: str) -> tuple[str, str | None]:
        """Return a weight's new name, or that of a group, and what in it is converted."""
        return rename_source_key(name, self._renamings, self._converters, reverse=True)
