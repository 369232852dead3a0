"""A callback that verifies rollouts of its own run while it trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch

from lrlhf.apps.verify.candidate_weights import Candidate
from lrlhf.apps.verify.rollout_rows import rows_of_batch
from lrlhf.apps.verify.sampling_checks import Sampling
from lrlhf.apps.verify.verification import Settings, verify
from lrlhf.arguments import KeepsArguments
from lrlhf.models.modes import evaluating
from lrlhf.modules.policy_module import PolicyModule
from lrlhf.rollout.listener import RolloutListener
from lrlhf.run.seeding import running_step
from lrlhf.types import Experience


class VerifyRollouts(KeepsArguments, L.Callback, RolloutListener):
    """Checks a sample of the run's rollouts against its weights and logs ``verify/faults``.

    Responses that earlier weights sampled wholly or partly are left out: those weights are gone.
    Each rank checks its own rows, with the policy in memory; a policy that is split over ranks
    cannot be checked like that.

    Args:
        every: Check the first iteration and each so many.
        rows: Responses of an iteration that are checked at most.
        algorithm: Whose advantages they are, see `Settings.algorithm`; None: any.
        kl_in: ``reward`` where a k1 penalty is part of the scores; else it is not.
        kl_coef: Strength of that penalty.
        stop: Raise when something is wrong, in place of a warning.

    Raises:
        ValueError: If ``every`` or ``rows`` is below 1.
    """

    def __init__(
        self,
        every: int = 50,
        rows: int = 32,
        algorithm: str | None = None,
        kl_in: str | None = None,
        kl_coef: float = 0.0,
        stop: bool = False,
    ) -> None:
        for name, value in {"every": every, "rows": rows}.items():
            if value < 1:
                raise ValueError(f"VerifyRollouts {name} is {value}; it must be at least 1")
        self.every, self.rows, self.stop = every, rows, stop
        self.algorithm, self.kl_in, self.kl_coef = algorithm, kl_in, kl_coef

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
        own = experience.weight_version
        # versions count the iterations behind the weights
        current = None if own is None else own == step - 1
        rows = [
            row
            for number, row in enumerate(rows_of_batch(experience, f"step {step}"))
            if current is None or bool(current[number])
        ]
        if not rows:
            return
        sampling = module.settings.sampling
        options = Sampling(
            sampling.temperature, sampling.top_p or 1.0, sampling.top_k or 0, sampling.min_p or 0.0
        )
        model = module.policy
        candidate = Candidate("policy", model, module.tokenizer, torch.float32)
        with evaluating(model):
            result = verify(
                rows,
                [candidate],
                Settings(
                    algorithm=self.algorithm,
                    kl_in=self.kl_in,
                    kl_coef=self.kl_coef,
                    sampling=options,
                    most_rows=self.rows,
                ),
            )
        module.log("verify/faults", float(len(result.faults)), batch_size=len(rows))
        if not result.faults:
            return
        found = "; ".join(f"{fault.item}: {fault.text}" for fault in result.faults)
        if self.stop:
            raise RuntimeError(f"VerifyRollouts: iteration {step}: {found}")
        module.print(f"VerifyRollouts: iteration {step}: {found}")
