"""Procedurally made tasks whose answers can be checked."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable
from typing import Any

from lrlhf.datamodules.loading.sources import Row, Source
from lrlhf.datamodules.rows.bad_rows import BadRow, nearest


class ReasoningGym(Source):
    """A task of the ``reasoning-gym`` package.

    Its rows have the columns ``prompt`` and ``question`` (the same text), ``answer``,
    ``metadata`` and ``task``: what the task's own ``score_answer`` needs.

    Args:
        task: Name of the task, such as ``chain_sum`` or ``gsm_symbolic``.
        size: Number of rows.
        seed: Another seed gives other rows.
        options: Of the task, such as ``{min_terms: 2, max_digits: 1}``.
    """

    def __init__(
        self, task: str, size: int = 1000, seed: int = 0, options: dict[str, Any] | None = None
    ) -> None:
        self._task = task
        self._size = size
        self._seed = seed
        self._options = dict(options or {})

    @property
    def name(self) -> str:
        return f"reasoning_gym:{self._task}"

    def rows(self) -> Iterable[Row | BadRow]:
        for entry in self._dataset():
            yield {"prompt": entry["question"], **entry, "task": self._task}

    def _dataset(self) -> Any:
        try:
            with warnings.catch_warnings():
                # a dependency compares text with `is`, which Python remarks on once
                warnings.simplefilter("ignore", SyntaxWarning)
                package = importlib.import_module("reasoning_gym")
        except ImportError as error:
            raise ImportError(
                "ReasoningGym needs the package reasoning-gym: pip install 'lrlhf[tasks]'"
            ) from error
        known = importlib.import_module("reasoning_gym.factory").DATASETS
        if self._task not in known:
            raise ValueError(
                f"reasoning-gym has no task {self._task!r}{nearest(self._task, known)}; its tasks: "
                f"{', '.join(sorted(known))}"
            )
        try:
            return package.create_dataset(
                self._task, size=self._size, seed=self._seed, **self._options
            )
        except (TypeError, AssertionError, ValueError) as error:
            raise ValueError(
                f"reasoning-gym's task {self._task!r} refuses size={self._size}, "
                f"seed={self._seed}, options={self._options}: {error}"
            ) from error
