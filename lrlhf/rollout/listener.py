"""Callback hooks within an iteration of the rollout and its update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import lightning as L

    from lrlhf.types import Experience


class RolloutListener:
    """Base class of callbacks with hooks for phases and rollouts; all do nothing by default."""

    def on_weights_needed(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Run before an engine with a copy of the weights generates responses."""

    def on_phase(self, phase: str) -> None:
        """Run when ``phase`` begins (sync, generate, reward, logprob, update); empty: it ends."""

    def on_rollout(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        experience: Experience,
        records: Sequence[dict[str, Any]],
    ) -> None:
        """Run with the experience of this rank before it is trained on.

        Args:
            trainer: The running trainer.
            module: The policy module.
            experience: The rows on their device.
            records: One JSON-ready line per row, in the order of ``experience``: ``step``,
                ``group``, ``prompt``, ``completion``, ``token_ids``, ``score``, ``rewards`` by
                name, ``advantage`` (of the first sampled token), ``length`` (sampled tokens),
                ``finish_reason`` (``stop`` or ``length``), ``weight_version`` (iterations behind
                the weights that sampled it), ``columns``, ``extras``, ``temperature`` (of the
                sampling), ``segments`` (``sampled`` and ``text`` of each) where the policy did
                not write all text, ``extra_values`` with values of baseline samples, and
                ``padding`` for padding rows of dynamic sampling.
        """
