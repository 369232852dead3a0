"""How strongly a policy's entropy is held up, from iteration to iteration."""

from __future__ import annotations

from typing import Any

import lightning as L

from lrlhf.arguments import KeepsArguments
from lrlhf.callbacks.kl_control import measured_on_all_ranks
from lrlhf.modules.contracts import EntropyRewarded

_MEASURED = "policy/entropy"


class EntropyControl(KeepsArguments, L.Callback):
    """Steers the coefficient of the entropy bonus towards a target entropy (adaptive entropy).

        α ← α + delta where the entropy is at most the target, else α - delta, within its bounds;
        the bonus counts α where the entropy is at most the target, else 0

    The first iteration is trained with ``update.entropy_coef``. ``entropy/coef`` is the
    coefficient that the iteration was trained with. The entropy is ``policy/entropy`` of the
    iteration; where its bonus is 0, that is the mean surprise of the sampled tokens.

    Args:
        target: Entropy to hold, in nats per token.
        delta: How much α changes in an iteration.
        min_coef: Lower bound of α.
        max_coef: Upper bound of α.

    Raises:
        ValueError: An option is out of range, or the module has no entropy bonus.

    Reference:
        He et al. 2025 (Skywork-OR1), https://arxiv.org/abs/2505.22312; bounds and steps as in TRL
        1.16, which counts optimizer steps where this counts iterations
    """

    def __init__(
        self,
        target: float = 0.2,
        delta: float = 0.005,
        min_coef: float = 0.0,
        max_coef: float = 1.0,
    ) -> None:
        if not target > 0:
            raise ValueError(f"EntropyControl target is {target}; it must be above 0, e.g. 0.2")
        if not delta > 0:
            raise ValueError(f"EntropyControl delta is {delta}; it must be above 0, e.g. 0.005")
        if not 0 <= min_coef < max_coef:
            raise ValueError(
                f"EntropyControl min_coef is {min_coef} and max_coef {max_coef}; the first must be "
                "0 or more, and the smaller one"
            )
        self.target, self.delta = target, delta
        self.min_coef, self.max_coef = min_coef, max_coef
        self._coef: float | None = None
        self._applied: float | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not isinstance(pl_module, EntropyRewarded):
            raise ValueError(
                f"EntropyControl steers an entropy bonus and {type(pl_module).__name__} has none; "
                "remove EntropyControl from trainer.callbacks"
            )
        if self._coef is None or self._applied is None:
            self._coef = self._applied = pl_module.entropy_coef
        pl_module.entropy_coef = self._applied

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        assert isinstance(pl_module, EntropyRewarded)
        assert self._coef is not None
        pl_module.log("entropy/coef", pl_module.entropy_coef, batch_size=1)
        measured = measured_on_all_ranks(trainer, _MEASURED)
        if measured is None or measured != measured:  # an iteration that trained on nothing
            return
        low = measured <= self.target
        moved = self._coef + (self.delta if low else -self.delta)
        self._coef = min(max(moved, self.min_coef), self.max_coef)
        self._applied = pl_module.entropy_coef = self._coef if low else 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self._coef, "applied": self._applied}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._coef, self._applied = state_dict["coef"], state_dict["applied"]
