"""What callbacks may ask of a module, whichever algorithm it is, and a module of its data."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from torch import nn
from transformers import PreTrainedTokenizerBase

if TYPE_CHECKING:
    from lrlhf.modules.policy.settings import PolicySettings
    from lrlhf.rewards import Rewards
    from lrlhf.rollout import RolloutEngine


@runtime_checkable
class Exportable(Protocol):
    """A module whose trained model can leave as a folder that ``transformers`` loads."""

    tokenizer: PreTrainedTokenizerBase

    def trainable_models(self) -> dict[str, nn.Module]:
        """Models that receive gradients, by role: policy, critic or reward."""
        ...

    def export_pretrained(self, folder: Path | None) -> None:
        """Write weights, config and tokenizer into ``folder``.

        All ranks call it, as weights may be split over them; those that write nothing with None.
        """
        ...


@runtime_checkable
class Measured(Protocol):
    """A module whose evaluation returns records, and that says which two metrics matter most."""

    train_metric: str
    """Logged in training steps."""
    eval_metric: str
    """Logged by the validation, and checkpoints are ranked by it; more is better, unless the module
    `HasEvalMode`."""


@runtime_checkable
class HasEvalMode(Protocol):
    """A measured module whose main metric may also be one of which less is better."""

    eval_mode: Literal["min", "max"]


@runtime_checkable
class ListsMetrics(Protocol):
    """A module that knows beforehand what its evaluation can measure."""

    def evaluation_names(self) -> set[str]:
        """Return the names of all metrics that its evaluations may log; empty: there are none."""
        ...


@runtime_checkable
class KLPenalized(Protocol):
    """A module with a KL penalty whose strength may change between iterations."""

    kl_coef: float
    samples_per_step: int
    """Responses of one iteration over all ranks."""


@runtime_checkable
class EntropyRewarded(Protocol):
    """A module with an entropy bonus whose strength may change between iterations."""

    entropy_coef: float


@runtime_checkable
class ScoresResponses(Protocol):
    """A module whose responses are scored by reward functions."""

    rewards: Rewards


@runtime_checkable
class SamplesResponses(Protocol):
    """A module whose policy generates responses through an engine."""

    engine: RolloutEngine
    settings: PolicySettings


@runtime_checkable
class HasEveryRow(Protocol):
    """A data module whose rows are all known before training."""

    def every_row(self) -> Iterable[Any]:
        """Go through this rank's share of all rows, in as many batches on every rank."""
        ...
