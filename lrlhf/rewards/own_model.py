"""Rewards that hold a model in this process."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Generic, TypeVar

from lrlhf.rewards.function import CopiesStartAfresh

LoadedT = TypeVar("LoadedT")


class OwnModelReward(CopiesStartAfresh, Generic[LoadedT]):
    """A reward with a model that is loaded at the first use, and by each copy on its own device."""

    ends_by_itself: ClassVar[bool] = True
    none_is_missing: ClassVar[bool] = True
    _not_copied = ("_loaded",)

    def _start_afresh(self) -> None:
        self._loaded: LoadedT | None = None

    def prepare(self) -> None:
        """Load the model.

        Raises:
            ValueError: The source leads to no model of this kind, or to one that does not fit the
                options.
        """
        self._ready()

    def _ready(self) -> LoadedT:
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    @abstractmethod
    def _load(self) -> LoadedT:
        """Load the model and what goes with it."""
