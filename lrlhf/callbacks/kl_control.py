"""How strongly a policy is held to its reference, from iteration to iteration."""

from __future__ import annotations

import math
from typing import Any, Literal

import lightning as L
from lightning.pytorch.utilities import rank_zero_warn

from lrlhf.arguments import KeepsArguments
from lrlhf.functional.kl import adaptive_kl_coef
from lrlhf.modules.contracts import KLPenalized

_MEASURED = "kl/sequence"
NOTHING_TO_ADAPT = (
    "KLControl adapts the coefficient of a penalty that is not there: reference.kl_coef is 0; set "
    "it above 0, or remove KLControl from trainer.callbacks"
)


class KLControl(KeepsArguments, L.Callback):
    """Owns the KL coefficient of the module: keeps it, or steers the KL towards a target.

    Adaptive control raises the coefficient while a response is further from the reference than
    ``target``, and lowers it while it is nearer. ``kl/coef`` is the coefficient that the
    iteration was trained with.

    Args:
        mode: ``adaptive``, or ``fixed`` to keep the coefficient at ``init_coef``: that of the
            configuration, also where a resumed run has another. An adaptive one goes on from the
            checkpoint's, unless the configured start has changed.
        init_coef: Coefficient of the first iteration; None: the module's own.
        target: KL per response to hold, in nats summed over its tokens (``kl/sequence``).
        horizon: Responses over which a persistent error of 20 % changes the coefficient by
            about 20 %.

    Raises:
        ValueError: If an option is out of range, or the module has no KL penalty.

    Reference:
        Ziegler et al. 2019, section 2.2, https://arxiv.org/abs/1909.08593
    """

    def __init__(
        self,
        mode: Literal["fixed", "adaptive"] = "adaptive",
        init_coef: float | None = None,
        target: float = 6.0,
        horizon: int = 10_000,
    ) -> None:
        if mode not in ("fixed", "adaptive"):
            raise ValueError(f"KLControl mode is {mode!r}; choose 'fixed' or 'adaptive'")
        if init_coef is not None and not 0 <= init_coef < float("inf"):
            raise ValueError(f"KLControl init_coef is {init_coef}; it must be 0 or more")
        if init_coef == 0 and mode == "adaptive":
            raise ValueError("KLControl init_coef is 0, which no factor changes; start above 0")
        if target <= 0:
            raise ValueError(f"KLControl target is {target}; it must be above 0, e.g. 6.0")
        if horizon < 1:
            raise ValueError(f"KLControl horizon is {horizon}; it must be at least 1, e.g. 10000")
        self.mode = mode
        self.init_coef = init_coef
        self.target = target
        self.horizon = horizon
        self._coef: float | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not isinstance(pl_module, KLPenalized):
            raise ValueError(
                f"KLControl steers a KL penalty and {type(pl_module).__name__} has none; "
                "remove KLControl from trainer.callbacks"
            )
        if self.mode == "adaptive" and pl_module.kl_coef == 0:
            raise ValueError(NOTHING_TO_ADAPT)
        if self.init_coef is None:
            # the module's own goes on from a checkpoint too, unless its configuration has changed
            self._coef = pl_module.kl_coef
        elif self._coef is None:
            self._coef = self.init_coef
        pl_module.kl_coef = self._coef

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, KLPenalized)
        pl_module.log("kl/coef", pl_module.kl_coef, batch_size=1)
        if self.mode == "adaptive":
            self._coef = pl_module.kl_coef = self._adapted(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self._coef, "init_coef": self.init_coef}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # what the configuration says goes first: a fixed coefficient, and a start that has changed
        if (
            self.mode == "adaptive"
            and state_dict.get("init_coef", self.init_coef) == self.init_coef
        ):
            self._coef = state_dict["coef"]

    def _adapted(self, trainer: L.Trainer, module: KLPenalized) -> float:
        measured = measured_on_all_ranks(trainer, _MEASURED)
        if measured is None:
            raise ValueError(
                f"KLControl adapts to {_MEASURED!r}, which the module did not log: it has no "
                "reference policy (is its kl_coef 0?); set one above 0, or remove KLControl"
            )
        if not math.isfinite(measured):
            rank_zero_warn(
                f"{_MEASURED} is {measured} at step {trainer.global_step}: "
                f"the KL coefficient stays at {module.kl_coef:.4g}"
            )
            return module.kl_coef
        return adaptive_kl_coef(
            module.kl_coef,
            measured,
            target=self.target,
            horizon=self.horizon,
            num_samples=module.samples_per_step,
        )


def measured_on_all_ranks(trainer: L.Trainer, name: str) -> float | None:
    """Return the mean over the ranks of what a step has logged; None: it has not."""
    value = trainer.callback_metrics.get(name)
    if value is None:
        return None
    # ranks must never drift apart, also where a module logs its own rank's value
    value = value.detach().to(trainer.strategy.root_device, copy=True)
    return float(trainer.strategy.reduce(value, reduce_op="mean"))
