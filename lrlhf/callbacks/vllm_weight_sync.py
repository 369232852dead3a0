"""Weight synchronisation (weight sync): the policy's weights in an engine with its own copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L

from lrlhf.arguments import KeepsArguments
from lrlhf.callbacks.ema import EMA
from lrlhf.modules import SamplesResponses
from lrlhf.rollout import RolloutEngine, RolloutListener, WeightSyncError
from lrlhf.run import SplitsModels
from lrlhf.types import Experience

_FLOAT32_GAP = 1e-4
_LOW_PRECISION_GAP = 0.08


class VLLMWeightSync(KeepsArguments, RolloutListener, L.Callback):
    """Pushes the policy into an engine with a copy of the weights before it generates.

    Such are `VLLMEngine` and `VLLMServerEngine`, wrapped or not.

    A push happens when the engine's weights are older than the policy's: after every update, on a
    resume, after the engine had to be started again, and for a validation with averaged weights
    (`EMA`). Each push compares a fingerprint of every weight on both sides; on a schedule the
    log-probabilities of a few tokens are compared too, which also shows weights that arrived but
    are not computed with, and states of older weights in the prefix cache.

    Args:
        every_n_steps: Iterations between two pushes; above 1 the responses come from an older
            policy, for which ``importance_sampling`` corrects. Validation always sees the present
            weights.
        probe_every: Pushes between two comparisons of log-probabilities; the first two pushes of a
            run always have one. 0: never.
        tolerance: Largest difference of log-probabilities, in nats, that half of the tokens of a
            response may exceed. None: 1e-4 where engine and policy are float32, 0.08 with 16 bits,
            whose rounding alone makes 0.03 to 0.05.

    Raises:
        ValueError: An option is out of range, or the module's engine has no weights of its own.
        WeightSyncError: Engine and policy differ; names the first wrong weight.
    """

    def __init__(
        self, every_n_steps: int = 1, probe_every: int = 10, tolerance: float | None = None
    ) -> None:
        for name, value, least in (
            ("every_n_steps", every_n_steps, 1),
            ("probe_every", probe_every, 0),
        ):
            if value < least:
                raise ValueError(f"VLLMWeightSync {name} is {value}; it must be {least} or more")
        if tolerance is not None and tolerance <= 0:
            raise ValueError(f"VLLMWeightSync tolerance is {tolerance}; it must be above 0")
        self.every_n_steps = every_n_steps
        self.probe_every = probe_every
        self.tolerance = tolerance
        self._pushes = 0
        self._averaged = False
        self._evaluated = False

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if not isinstance(pl_module, SamplesResponses):
            raise ValueError(
                f"VLLMWeightSync needs a module with a rollout engine (PPO, RLOO), and "
                f"{type(pl_module).__name__} has none: drop the callback"
            )
        if not pl_module.engine.capabilities.holds_copy:
            raise ValueError(
                f"VLLMWeightSync has nothing to do: model.engine is "
                f"{type(pl_module.engine).__name__}, which generates with the policy itself. Drop "
                "the callback, or set model.engine to lrlhf.rollout.VLLMEngine"
            )
        self._pushes, self._evaluated = 0, False
        # a run that broke off may have left the engine with weights of any step
        pl_module.engine.outdate()

    def on_weights_needed(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Push, if the engine's weights are not those that are to generate."""
        assert isinstance(module, SamplesResponses)
        engine = module.engine
        averaged = any(
            isinstance(callback, EMA) and callback.stands_in
            for callback in trainer.callbacks  # type: ignore[attr-defined]
        )
        step = trainer.global_step
        engine.policy_moved(step)
        evaluated, self._evaluated = self._evaluated, not trainer.training
        # after `setup` the engine may hold weights of an earlier run, whatever their number
        if engine.version is not None and self._pushes and averaged == self._averaged:
            due = self.every_n_steps if trainer.training else 1
            if step - engine.version < due:
                if trainer.training and evaluated:
                    # a run that is resumed after the validation has nothing of it in its caches
                    engine.forget()
                return
        engine.push(step)
        if engine.pushed_bytes is not None and trainer.training:
            for name, size in zip(("bytes", "full_bytes"), engine.pushed_bytes, strict=True):
                module.log(f"sync/{name}", float(size), batch_size=1)
        self._averaged = averaged
        self._pushes += 1
        if self.probe_every and (self._pushes <= 2 or self._pushes % self.probe_every == 0):
            self._probe(engine, trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        """End the engine: Lightning calls no ``teardown`` after an error."""
        if isinstance(pl_module, SamplesResponses):
            pl_module.engine.close()

    def on_rollout(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        experience: Experience,
        records: Sequence[dict[str, Any]],
    ) -> None:
        """Make sure that no token is older than it may be."""
        # stored rollouts are as old as they are
        if experience.versions is None or "stored_step" in records[0]:
            return
        assert isinstance(module, SamplesResponses)
        allowed = self.every_n_steps - 1 + module.settings.max_staleness
        ages = trainer.global_step - experience.versions[experience.response_mask]
        for age in (int(ages.min()), int(ages.max())) if len(ages) else ():
            if not 0 <= age <= allowed:
                raise WeightSyncError(
                    f"a token was sampled with weights {age} iterations old, and at most {allowed} "
                    "are allowed (every_n_steps of VLLMWeightSync, max_staleness)"
                )

    def _probe(self, engine: RolloutEngine, trainer: L.Trainer) -> None:
        gap, limit = engine.probe(), self.tolerance
        if limit is None:
            # weights that are split are gathered in 16 bits, also where autocast is off
            splits = isinstance(trainer.strategy, SplitsModels) and trainer.precision != "32-true"
            limit = _LOW_PRECISION_GAP if gap.low_precision or splits else _FLOAT32_GAP
        if not gap.typical <= limit:
            raise WeightSyncError(
                "every weight arrived in the engine, but its log-probabilities differ from the "
                f"policy's by {gap.typical:.3g} nats in half of a response's tokens (of all tokens "
                f"{gap.mean:.3g} on average, {gap.max:.3g} at most, VLLMWeightSync.tolerance is "
                f"{limit:g}): it computes with other weights than it was given, or with cached "
                "states of older ones"
            )
