"""A callback that verifies rollouts of its own run while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch

from lrlhf.apps.verify.candidate_weights import Candidate
from lrlhf.apps.verify.rollout_rows import rows_of_batch
from lrlhf.apps.verify.verification import Settings, verify
from lrlhf.arguments import KeepsArguments
from lrlhf.models.modes import evaluating
from lrlhf.modules.policy_module import PolicyModule
from lrlhf.rollout.listener import RolloutListener
from lrlhf.run.seeding import running_step
from lrlhf.types import Experience


class VerifyRollouts(KeepsArguments, L.Callback, RolloutListener):
    """Checks a sample of the run's rollouts against its weights and logs ``verify/faults``.

    Groups with responses that earlier weights sampled are left out: those weights are gone.
    Each rank checks its own rows, with the policy in memory; a policy that is split over ranks
    cannot be checked like that.

    Args:
        every: Check the first iteration and each so many.
        rows: Responses of an iteration that are checked at most.
        algorithm: Whose advantages they are, see `Settings.algorithm`; None: any.
        stop: Raise when something is wrong, in place of a warning.

    Raises:
        ValueError: If ``every`` or ``rows`` is below 1.
    """

    def __init__(
        self,
        every: int = 50,
        rows: int = 32,
        algorithm: str | None = None,
        stop: bool = False,
    ) -> None:
        for name, value in {"every": every, "rows": rows}.items():
            if value < 1:
                raise ValueError(f"VerifyRollouts {name} is {value}; it must be at least 1")
        self.every, self.rows, self.stop = every, rows, stop
        self.algorithm = algorithm

    def on_rollout(
        self,
        trainer: L.Trainer,
        module: L.LightningModule,
        experience: Experience,
        records: Sequence[dict[str, Any]],
    ) -> None:
        step = running_step(trainer)
        if not isinstance(module, PolicyModule) or not (step == 1 or step % self.every == 0):
            return
        rows = list(rows_of_batch(experience, f"step {step}"))
        if experience.weight_version is not None:
            # versions count the iterations behind the weights
            current = (experience.weight_version == step - 1).tolist()
            # a baseline needs the whole group
            older = {row.group for row, flag in zip(rows, current, strict=True) if not flag}
            rows = [row for row in rows if row.group not in older]
        if not rows:
            return
        run = module.settings
        # what is whitened over the batch needs all rows of all ranks
        whole = trainer.world_size == 1 and len(rows) == len(experience)
        known = whole or run.algorithm.estimator.normalize == "none"
        settings = Settings(
            algorithm=self.algorithm if known else None,
            kl=(run.reference.kl_estimator or "k1") if run.kl_in_reward else None,
            kl_in="reward" if run.kl_in_reward else "loss",
            kl_coef=module.kl_coef,
            sampling=run.sampling,
            most_rows=self.rows,
        )
        # an engine with a copy of the weights may compute in another type
        dtype = torch.float32 if module.engine.capabilities.exact else None
        candidate = Candidate("policy", module.policy, module.tokenizer, dtype)
        with evaluating(module.policy):
            result = verify(rows, [candidate], settings)
        module.log("verify/faults", float(len(result.faults)), batch_size=len(rows))
        if not result.faults:
            return
        text = "; ".join(f"{fault.item}: {fault.text}" for fault in result.faults)
        if self.stop:
            raise RuntimeError(f"VerifyRollouts: iteration {step}: {text}")
        module.print(f"VerifyRollouts: iteration {step}: {text}")
