"""What policies have in common that are trained relative to a reference, on given answers."""

from __future__ import annotations

import hashlib
import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lrlhf.models import CausalLM, ReferencePolicy, TextLimits, frozen_reference, limits_of
from lrlhf.modules.contracts import HasEveryRow
from lrlhf.modules.policy.load_policy import LoadedPolicy, LoadedPolicyModule
from lrlhf.run import Collectives
from lrlhf.run.lightning_internals import data_in_use
from lrlhf.types import SequenceBatch

logger = logging.getLogger(__name__)


class ReferencedPolicy(LoadedPolicyModule):
    """A policy and its reference, which is asked in every step, or once about every row.

    A subclass calls `set_policy` and defines ``logprob_chunk`` and ``sequences_of``.
    """

    data_module: ClassVar[str]
    """What messages call the data module that it is trained with."""
    logprob_chunk: int

    def set_policy(
        self,
        loaded: LoadedPolicy,
        reference: str | CausalLM | None,
        *,
        ask_first: bool,
        has_one: bool = True,
    ) -> None:
        """Take the policy, and build its reference.

        Args:
            loaded: The policy, and what reads for it.
            reference: Another model; None: the policy as it starts.
            ask_first: Ask the reference about every row before training, and let go of it.
            has_one: Whether there is a reference at all.
        """
        self.set_model(loaded)
        spec = CausalLM(source=reference) if isinstance(reference, str) else reference
        self.reference: ReferencePolicy | None = (
            frozen_reference(self.policy, spec) if has_one else None
        )
        """Outside of the module tree: not trained, not saved."""
        self.precompute_reference = ask_first
        self._precomputed: PrecomputedReference | None = None

    @abstractmethod
    def sequences_of(self, batch: Any) -> Iterable[SequenceBatch]:
        """Go through the sequences of a batch, on the device, that the reference is asked about."""

    def text_limits(self, *, training: bool) -> list[TextLimits]:
        frozen = [] if self.reference is None else [self.reference.model]
        return [*super().text_limits(training=training), *limits_of(frozen)]

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._place_reference()
        # a step that is replayed has no data: the reference is asked about its rows then
        beforehand = self.precompute_reference and not self.step_guard.collects
        if beforehand and self.reference is not None:
            # in the precision of training steps, which Lightning calls in this context
            with self.trainer.precision_plugin.forward_context():
                self._precompute_reference()

    def on_validation_start(self) -> None:
        if self.trainer.state.fn != TrainerFn.FITTING:
            self._place_reference()

    on_test_start = on_predict_start = on_validation_start

    def _place_reference(self) -> None:
        if self.reference is not None:
            self.shard_frozen(self.reference)

    def _precompute_reference(self) -> None:
        """Ask the reference about every row, and let go of it."""
        data = data_in_use(self.trainer)
        if not isinstance(data, HasEveryRow):
            raise ValueError(
                "precompute_reference needs to know every row beforehand: train with a "
                f"{self.data_module}, or leave it out"
            )
        rank_zero_only(logger.info)("asking the reference about every row")
        precomputed = PrecomputedReference()
        for batch in data.every_row():
            for rows in self.sequences_of(batch):
                logprobs = self.of_reference(rows)
                assert logprobs is not None
                precomputed.add(rows, logprobs)
        precomputed.share(Collectives(self.trainer))
        self._precomputed, self.reference = precomputed, None

    def of_reference(self, rows: SequenceBatch) -> Tensor | None:
        """Return the reference's log-probabilities `[B, T]`; None: there is no reference."""
        if self._precomputed is not None:
            return self._precomputed.logprobs(rows)
        if self.reference is None:
            return None
        reference = self.reference.to(self.device)
        logprobs = reference.logprobs(rows, chunk_size=self.logprob_chunk)
        reference.reshard(offload=False)
        return logprobs


class PrecomputedReference:
    """What a reference said of rows, found again by what these consist of.

    Neither the order of rows, nor the ranks that they are shared out to, nor their padding plays a
    part. Kept in main memory: four bytes for each token of an answer in single precision.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, Tensor] = {}

    def add(self, rows: SequenceBatch, logprobs: Float[Tensor, "B T"]) -> None:
        """Keep what belongs to the answers of some rows."""
        masks, values = rows.response_mask.cpu(), logprobs.cpu()
        for row, key in enumerate(_keys(rows)):
            self._known[key] = values[row, masks[row]]

    def share(self, ranks: Collectives) -> None:
        """Have the rows of all ranks on every rank; all call."""
        for known in ranks.gather(self._known):
            self._known |= known

    def logprobs(self, rows: SequenceBatch) -> Float[Tensor, "B T"]:
        """Return the log-probabilities of the answers, 0 elsewhere.

        Raises:
            ValueError: A row is not among those that were added.
        """
        stored = [self._known.get(key) for key in _keys(rows)]
        if any(each is None for each in stored):
            raise ValueError(
                "the reference was asked about the rows of the data that training began with, and "
                "this is another: leave precompute_reference out, or build the module anew"
            )
        known = [logprob for logprob in stored if logprob is not None]
        masks = rows.response_mask
        result = torch.zeros(masks.shape, dtype=known[0].dtype, device=masks.device)
        result[masks] = torch.cat(known).to(masks.device)
        return result


def _keys(rows: SequenceBatch) -> Iterator[bytes]:
    """Yield what tells each row from others: its tokens, its answer, and what it shows."""
    ids, there, masks = rows.input_ids.cpu(), rows.attention_mask.cpu(), rows.response_mask.cpu()
    for row in range(len(rows)):
        digest = hashlib.blake2b(digest_size=16)
        digest.update(ids[row, there[row]].numpy().tobytes())
        digest.update(masks[row, there[row]].numpy().tobytes())
        media = None if rows.media is None else rows.media[row]
        for name, tensor in sorted(media.tensors.items()) if media is not None else ():
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
        yield digest.digest()
