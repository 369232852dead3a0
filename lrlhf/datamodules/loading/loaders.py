"""The loaders of a data module: made once per run, asked for often, saved and restored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

import lightning as L
import torch

from lrlhf.datamodules.loading.attached import data_ranks
from lrlhf.datamodules.loading.loader import EvalLoader, Fetching, TrainLoader
from lrlhf.datamodules.loading.order import BalancedOrder, Order
from lrlhf.datamodules.loading.splits import Sides

RowT = TypeVar("RowT")
BatchT = TypeVar("BatchT")


@dataclass(frozen=True)
class LoaderOptions:
    """How batches are made, as the user set it.

    Args:
        batch_size: Rows per train batch and rank.
        val_batch_size: Rows per validation batch and rank; None: as in training.
        seed: Of the order of the train rows.
        num_workers: Processes that collate.
        pin_memory: None: where there is a GPU.
        accept_changed_data: Resume although the train rows are not those of the checkpoint.
        dated: The chat template writes today's date, so that tokens differ from day to day.
    """

    batch_size: int
    val_batch_size: int | None
    seed: int
    num_workers: int
    pin_memory: bool | None
    accept_changed_data: bool = False
    dated: bool = False

    @property
    def accept_changed(self) -> Literal["nothing", "tokens", "all"]:
        """Which changes of the rows since the checkpoint do not stop a resumed run."""
        if self.accept_changed_data:
            return "all"
        return "tokens" if self.dated else "nothing"

    def __post_init__(self) -> None:
        sizes = {"batch_size": self.batch_size, "val_batch_size": self.val_batch_size}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ValueError(f"{name}={size}: give at least 1")
        if self.num_workers < 0:
            raise ValueError(f"num_workers={self.num_workers}: give 0 or more")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed}: give 0 or more")


class Loaders(Generic[RowT, BatchT]):
    """Makes the loaders of one run, and keeps the one whose position matters.

    Args:
        sides: The rows.
        options: How batches are made.
        collate: Makes a batch of rows.
        trainer: Tells the ranks and the limits; None outside of one.
        order: Of the train rows; None: shuffled by ``options.seed``.
        extend: Adds to each train batch what goes with its number since the run began.
        beside: The rows that it takes that from.
        read: Reads what rows only name, see `Fetching`.
        cost: Tokens of a row, by which each train batch is dealt to the ranks; None: dealt by
            chance.
    """

    def __init__(  # noqa: PLR0913 - what differs from one data module to another
        self,
        sides: Sides[RowT],
        options: LoaderOptions,
        collate: Callable[[Sequence[RowT]], BatchT],
        trainer: L.Trainer | None,
        *,
        order: Order | None = None,
        extend: Callable[[BatchT, int], BatchT] | None = None,
        beside: Sequence[object] = (),
        read: Callable[[RowT], RowT] | None = None,
        cost: Callable[[RowT], int] | None = None,
    ) -> None:
        pin = torch.cuda.is_available() if options.pin_memory is None else options.pin_memory
        self._fetching = Fetching(collate, options.num_workers, pin, read)
        self._sides = sides
        self._options = options
        self._trainer = trainer
        self._order = order
        self._extend = extend
        self._beside = beside
        self._cost = cost
        self._train: TrainLoader[RowT, BatchT] | None = None

    def train(self) -> TrainLoader[RowT, BatchT] | EvalLoader[RowT, BatchT]:
        """Return the shuffled loader, always the same one, so that its position is kept.

        Under ``overfit_batches`` it is a loader of the same few batches in every pass.
        """
        trainer = self._trainer
        if trainer is not None and trainer.overfit_batches:  # type: ignore[attr-defined]
            return EvalLoader(
                self._sides.train.values,
                self._options.batch_size,
                fetching=self._fetching,
                ranks=data_ranks(trainer),
                extend=self._extend,
            )
        if self._train is None:
            ranks = data_ranks(trainer)
            self._train = TrainLoader(
                self._sides.train.values,
                self._train_order(ranks.world),
                self._options.batch_size,
                fetching=self._fetching,
                ranks=ranks,
                pass_limit=trainer.limit_train_batches if trainer is not None else 1.0,
                extend=self._extend,
                beside=self._beside,
                accept_changed=self._options.accept_changed,
            )
        return self._train

    def _train_order(self, world: int) -> Order:
        side = self._sides.train
        order = side.order(self._options.seed) if self._order is None else self._order
        if self._cost is None or world == 1:
            return order
        costs = [self._cost(row) for row in side.values]
        return BalancedOrder(order, costs, self._options.batch_size, world)

    def validation(self) -> EvalLoader[RowT, BatchT] | list[Any]:
        """Return a loader of every validation row; an empty list where there is none."""
        if self._sides.validation is None:
            return []
        size = self._options.val_batch_size or self._options.batch_size
        return EvalLoader(
            self._sides.validation.values,
            size,
            fetching=replace(self._fetching, drop=True),
            ranks=data_ranks(self._trainer),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the train data; empty before it is known."""
        return self._train.state_dict() if self._train is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on in the train data where ``state`` was taken."""
        loader = self.train()
        if state and isinstance(loader, TrainLoader):
            loader.load_state_dict(state)
