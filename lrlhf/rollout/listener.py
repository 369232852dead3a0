"""Who wants to hear of an iteration while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import lightning as L

    from lrlhf.types import Experience


class RolloutListener:
    """Base class of callbacks that receive the phase and the rollout of every iteration.

    The methods do nothing by default: override what you need.
    """

    def on_weights_needed(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Hear that an engine with a copy of the weights is about to generate responses."""

    def on_phase(self, phase: str) -> None:
        """Hear that ``phase`` begins (sync, generate, reward, logprob, update); empty: it ends."""

    def on_rollout(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        experience: Experience,
        records: Sequence[dict[str, Any]],
    ) -> None:
        """Hear of the experience of this rank before it is trained on.

        Args:
            trainer: The running trainer.
            module: The module that took the rollout.
            experience: The rows on their device.
            records: One JSON-ready line per row, in the order of ``experience``: ``step``,
                ``group``, ``prompt``, ``completion``, ``token_ids``, ``score``, ``rewards`` by
                name, ``advantage`` (of the first sampled token), ``length`` (sampled tokens),
                ``finish_reason`` (``stop`` or ``length``), ``weight_version`` (iterations behind
                the weights that sampled it), ``columns``, ``extras``, ``temperature`` (of the
                sampling), ``segments`` (``sampled`` and ``text`` of each) where some text was
                given, ``beside`` where values were sampled beside the responses, and ``filler``
                where dynamic sampling found too few groups.
        """
